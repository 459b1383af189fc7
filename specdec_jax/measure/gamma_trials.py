"""Chooses gamma for a run by trials: a few rows decoded with several gammas."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from specdec_jax.theory import estimates
from specdec_jax.theory.costs import Costs
from specdec_jax.theory.speedup import MARGIN, predicted_speedup

# A gamma is chosen only if a loss of more than this share of plain decoding's
# speed is excluded with 95% confidence (this quantile of the normal
# distribution).
_LOSS = 0.05
_QUANTILE = 1.645


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """Measurements of R rows decoded with one gamma.

  Attributes:
    gamma: drafted tokens per iteration; 0 is plain decoding.
    num_tokens: `[R]`, tokens of each row.
    num_runs: `[R]`, target runs of each row.
    num_tested: `[R, gamma]`, how often the i-th drafted token was tested.
    num_accepted: `[R, gamma]`, how often it was accepted.
    fill_seconds: time of a row's prefill.
    iteration_seconds: time of an iteration, for all rows of a batch.
    iteration_error: its relative standard error.
    utilisation: mean share of a batch's rows that are active in an iteration.
  """

  gamma: int
  num_tokens: np.ndarray
  num_runs: np.ndarray
  num_tested: np.ndarray
  num_accepted: np.ndarray
  fill_seconds: float
  iteration_seconds: float
  iteration_error: float = 0.0
  utilisation: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenGamma:
  """The chosen gamma, and why; `bench --json` has its fields.

  Attributes:
    gamma: 0 is plain decoding.
    sentence: the reasons.
    tokens_per_second: by gamma, as text, of those that were tried.
    alpha: accepted / tested drafted tokens; None if none was tested.
    break_even: tokens per target run at which the gamma is as fast as plain
      decoding; 1 for gamma 0.
  """

  gamma: int
  sentence: str
  tokens_per_second: dict[str, float] = dataclasses.field(default_factory=dict)
  alpha: float | None = None
  break_even: float = 1.0


def runs_with(trial: Trial, gamma: int) -> np.ndarray:
  """Counts target runs `[R]` that a trial would have needed with this `gamma`.

  Assumes that shorter drafts are beginnings of the longer ones, as those of
  models and copies are. Exact if `gamma + 1` divides the trial's; otherwise a
  run whose draft was fully accepted counts as a fraction of runs.
  """
  # A run with A accepted tokens gave A + 1 tokens; shorter drafts, if fully
  # accepted, give `gamma + 1` tokens per run.
  # Of 10 runs with gamma 3, 6 accepted a first token, 4 a second, 1 a third:
  # `ended` is 4, 2, 3, 1 runs with 0, 1, 2, 3 accepted. With gamma 1 these need
  # 1, 1, 2, 2 runs each: 4 + 2 + 6 + 2 = 14.
  none = np.zeros_like(trial.num_runs)
  reached = np.column_stack([trial.num_runs, trial.num_accepted, none])
  ended = reached[:, :-1] - reached[:, 1:]
  needed = np.arange(1, trial.gamma + 2) / (gamma + 1)
  needed[:-1] = np.ceil(needed[:-1])
  return ended @ needed


def choose(trials: Sequence[Trial], batch_size: int) -> ChosenGamma:
  """Chooses the fastest gamma, or 0 if none is faster than plain decoding by a
  margin: the planner's, or the larger one that excludes a loss of 5%.

  Tokens per target run are extrapolated to other gammas from the rows with the
  longest drafts (`runs_with`), scaled to what was accepted in all rows, unless
  the trials disagree: see docs/design/measuring.md.

  Args:
    trials: one of them of gamma 0.
    batch_size: rows per batch.
  """
  plain, *drafting = sorted(trials, key=lambda trial: trial.gamma)
  measured, speeds, costs = _speeds(plain, drafting, batch_size)
  best = max(speeds, key=speeds.__getitem__)
  # Prefer a gamma that was tried, or plain decoding, unless the gain exceeds a
  # margin: interpolated times and the acceptance of few texts are uncertain.
  margins = {max(measured, key=speeds.__getitem__): MARGIN}
  margins[0] = max(MARGIN, _QUANTILE * _error(plain, drafting) - _LOSS)
  for surer, margin in margins.items():
    if speeds[best] <= (1 + margin) * speeds[surer]:
      best = surer
  accepted, tested = (
    sum(int(getattr(trial, name).sum()) for trial in drafting)
    for name in ('num_accepted', 'num_tested')
  )
  alpha = estimates.quotient(accepted, tested)
  num_rows = sum(trial.num_runs.size for trial in trials)
  # The reasons, as a sentence.
  shown = [
    f'{speed:.1f} with gamma {gamma}' if gamma else f'plain {speed:.1f}'
    for gamma, speed in measured.items()
  ]
  reasons = [f'{", ".join(shown)} tokens/s in {num_rows} rows']
  if alpha is not None:
    reasons.append(f'alpha {alpha:.2f}')
  if best:
    gain = speeds[best] / speeds[0]
    reasons.append(f'{gain:.2f} times plain is expected of gamma {best}')
  else:
    wide = ', with the errors of so few rows' if margins[0] > MARGIN else ''
    reasons.append(f'no gamma is faster than plain by {margins[0]:.0%}{wide}')
  return ChosenGamma(
    gamma=best,
    sentence=f'gamma auto is {best or "0, plain decoding"}: '
    + '; '.join(reasons),
    tokens_per_second={str(gamma): speed for gamma, speed in measured.items()},
    alpha=alpha,
    break_even=costs.iteration_seconds(best) / costs.plain_seconds,
  )


def _speeds(
  plain: Trial, drafting: Sequence[Trial], batch_size: int
) -> tuple[dict[int, float], dict[int, float], Costs]:
  """Returns measured and expected speeds by gamma, and costs of iterations."""
  trials = [plain, *drafting]
  costs = Costs(
    widths=[trial.gamma + 1 for trial in trials],
    target_seconds=[trial.iteration_seconds for trial in trials],
    first_draft_seconds=0.0,
    draft_seconds=0.0,
  )
  length = np.concatenate([trial.num_tokens for trial in trials]).mean()

  def speed(gamma: int, efficiency: float) -> float:
    # Interpolates measurements between the gammas that were tried.
    near = drafting if gamma else [plain]
    at = lambda values: np.interp(gamma, [t.gamma for t in near], values)
    ratio = costs.iteration_seconds(gamma) / costs.plain_seconds
    pace = predicted_speedup(efficiency, gamma, 0.0, ratio)
    rows_at_work = batch_size * at([t.utilisation for t in near])
    seconds = length * costs.plain_seconds / pace / rows_at_work
    return float(length / (at([t.fill_seconds for t in near]) + seconds))

  efficiencies = {
    trial.gamma: float(trial.num_tokens.sum() / trial.num_runs.sum())
    for trial in drafting
  }
  measured = {0: speed(0, 1.0)}
  for gamma, efficiency in efficiencies.items():
    measured[gamma] = speed(gamma, efficiency)
  agreement = _agree(drafting)
  if agreement is False:
    return measured, measured, costs
  considered: Iterable[int] = efficiencies
  if agreement:
    considered = range(min(efficiencies), max(efficiencies) + 1)
  expected = _efficiencies(drafting, considered)
  speeds = {gamma: speed(gamma, value) for gamma, value in expected.items()}
  return measured, measured | speeds, costs


def _efficiencies(
  trials: Sequence[Trial], gammas: Iterable[int]
) -> dict[int, float]:
  """Computes expected tokens per target run with each gamma."""
  widest = trials[-1]
  tokens = widest.num_tokens.sum()
  shape = lambda gamma: float(tokens / runs_with(widest, gamma).sum())
  accepted = sum(int((t.num_tokens - t.num_runs).sum()) for t in trials)
  predicted = sum(int(t.num_runs.sum()) * (shape(t.gamma) - 1) for t in trials)
  # If 90 tokens were accepted in all trials where the longest drafts predict
  # 100, 0.9 of what they predict is expected of every gamma.
  level = accepted / predicted if predicted else 1.0
  return {gamma: 1 + level * (shape(gamma) - 1) for gamma in gammas}


def _error(plain: Trial, drafting: Sequence[Trial]) -> float:
  """Estimates the relative standard error of a speedup, from those of tokens
  per target run and of times; 0 if there is only one of each."""
  tokens = np.concatenate([trial.num_tokens for trial in drafting])
  runs = np.concatenate([runs_with(t, drafting[0].gamma) for t in drafting])
  error = estimates.standard_error(tokens, runs) or 0.0
  # Squares of independent errors add up.
  errors = (
    error * runs.sum() / tokens.sum(),
    plain.iteration_error,
    np.mean([trial.iteration_error for trial in drafting]),
  )
  return float(np.linalg.norm(np.asarray(errors)))


def _agree(trials: Sequence[Trial]) -> bool | None:
  """Returns whether each trial's tokens per target run agree, within confidence
  intervals, with those expected from the longest drafts; None if there are no
  intervals."""
  widest = trials[-1]
  for trial in trials[:-1]:
    measured, interval = estimates.ratio(trial.num_tokens, trial.num_runs)
    runs = runs_with(widest, trial.gamma)
    predicted, predicted_interval = estimates.ratio(widest.num_tokens, runs)
    if interval is None or predicted_interval is None:
      return None
    # Squares of the half intervals add up.
    tolerance = np.hypot(
      measured - interval[0], predicted - predicted_interval[0]
    )
    if abs(measured - predicted) > tolerance:
      return False
  return True
