"""What `gamma='auto'` tries on the first rows of a run, and what they show."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec_jax.decoding.statistics import Statistics
from specdec_jax.launch import processes
from specdec_jax.measure import metrics
from specdec_jax.theory import estimates, gamma_trials
from specdec_jax.theory.gamma_trials import ChosenGamma, Trial

# Rows of a turn that suffice.
NUM_ROWS = 8
# Of the time of a run, what comparing may take: no run is to be slower than
# plain decoding by 3%, and up to 1% goes where a turn waits for its last row.
SHARE = 0.02
# Batches of a run, of several rows each, for that to be 1%.
NUM_BATCHES = 128
# A program with a drafter is larger than the plain one, which the compilation
# cache may have had.
_COMPILING = 6.0
# A turn with drafts takes up to so many plain ones, as far as is known.
_SLOWNESS = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visit:
  """Rows that were decoded with one gamma: their counters, and the seconds of
  prefills, of iterations, and of compiling for them."""

  gamma: int
  statistics: Statistics
  num_iterations: int
  fill_seconds: float
  loop_seconds: float
  compile_seconds: float = 0.0


def trial(visits: Sequence[Visit], *, waits: bool) -> Trial:
  """Sums up what the batches of one gamma show. If a batch `waits` for its
  slowest row, rows are not refilled."""
  total: Any = metrics.joined([visit.statistics for visit in visits])
  num_slots = sum(
    v.num_iterations * v.statistics.num_tokens.size for v in visits
  )
  seconds = np.array([visit.loop_seconds for visit in visits])
  iterations = np.array([visit.num_iterations for visit in visits])
  iteration_seconds = float(seconds.sum() / iterations.sum())
  error = estimates.standard_error(seconds, iterations) or 0.0
  return Trial(
    gamma=visits[0].gamma,
    num_tokens=total.num_tokens,
    num_runs=total.num_target_runs,
    num_tested=total.num_tested,
    num_accepted=total.num_accepted,
    fill_seconds=sum(visit.fill_seconds for visit in visits)
    / total.num_tokens.size,
    iteration_seconds=iteration_seconds,
    iteration_error=error / iteration_seconds,
    utilisation=float(total.num_target_runs.sum() / num_slots)
    if waits
    else 1.0,
  )


def num_batches_of_turn(batch_size: int) -> int:
  """Returns how many batches are enough rows for a turn."""
  return -(-NUM_ROWS // batch_size)


def num_turns(gammas: Sequence[int]) -> int:
  """Returns how many turns compare gammas, 0 among them."""
  return 2 * len(gammas)


def choose(
  tried: Sequence[int],
  decode: Callable[[int], Sequence[Visit]],
  *,
  batch_size: int,
  waits: bool,
  known: ChosenGamma | None = None,
  is_worth: Callable[[float], bool] = lambda num_turns: True,
) -> ChosenGamma:
  """Chooses the gamma of a run by decoding its first rows, turn by turn.

  Args:
    tried: ascending, 0 among them.
    decode: decodes the rows of the next turn with a gamma, in batches or all
      together.
    batch_size: rows decoded at once.
    waits: whether batches wait for their slowest row, as for `trial`.
    known: what an earlier run chose; it holds unless these rows need more
      target runs than it can bear.
    is_worth: whether so many turns are left; in all processes alike.
  """
  turns: list[int] = []

  def visit(gamma: int) -> list[Visit]:
    turns.append(gamma)
    return list(decode(gamma))

  def told(choice: ChosenGamma) -> ChosenGamma:
    return dataclasses.replace(choice, turns=turns)

  if known is not None:
    counts = metrics.joined([each.statistics for each in visit(known.gamma)])
    sums = counts.num_tokens.sum(), counts.num_target_runs.sum()
    return told(known.checked(*map(int, sums)))
  visits = {0: visit(0)}
  gammas = _affordable(tried, visits[0], is_worth)
  if len(gammas) == 1:
    return told(unmeasured())
  # There and back again, so that a drift of the machine's speed cancels:
  # gammas 0, 2, 5 are tried as 0 2 5 5 2 0.
  for gamma in (*gammas[1:], *reversed(gammas)):
    visits.setdefault(gamma, []).extend(visit(gamma))
  found = [trial(each, waits=waits) for each in visits.values()]
  return told(gamma_trials.choose(found, batch_size))


def unmeasured() -> ChosenGamma:
  """Makes the choice of a run that is too short to compare anything."""
  return ChosenGamma(
    gamma=0,
    sentence='gamma auto is 0, plain decoding: this is too short to measure '
    'what pays, and nothing is remembered; give a gamma, or let `specdec '
    'bench` measure',
  )


def _affordable(
  tried: Sequence[int],
  first: Sequence[Visit],
  is_worth: Callable[[float], bool],
) -> Sequence[int]:
  """Returns the gammas that a run is long enough to try: all, the one in the
  middle, or 0 alone, which its first turn was decoded with."""
  turn = sum(visit.fill_seconds + visit.loop_seconds for visit in first)
  compile_seconds = sum(visit.compile_seconds for visit in first)
  drafting = tried[1:]
  middle = len(drafting) // 2
  for gammas in (drafting, drafting[middle : middle + 1]):
    # Of several, the best may be one between them, and is compiled as well.
    programs = len(gammas) + (len(gammas) > 1)
    compiling = _COMPILING * compile_seconds * programs / turn
    needed = compiling + 2 * len(gammas) * (_SLOWNESS - 1)
    # The clock of the first process counts; a float of 32 bits will do.
    needed = processes.number_of_first(min(round(needed / SHARE), 2**31 - 1))
    if is_worth(needed):
      return (0, *gammas)
  return (0,)
