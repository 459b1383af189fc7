"""Chooses gamma from acceptance rates and costs, and predicts the speedup.

Theorem 3.8 of Leviathan et al. (https://arxiv.org/abs/2211.17192) without three
of its assumptions: scoring a draft has its own cost, the loop has a cost, and a
batch ends with its slowest row. There may be an acceptance rate per position.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax.theory.acceptance import (
  alpha_from_block_efficiency,
  expected_tokens_of_profile,
  in_range,
)
from specdec_jax.theory.costs import Costs
from specdec_jax.theory.speedup import MARGIN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
  """The expected results of a gamma, or of a tree.

  Attributes:
    gamma: drafted tokens per iteration, nodes of a tree; 0 is plain decoding.
    expected_tokens: per target run and row.
    speedup: over plain decoding, of the whole batch; see `plan`.
    operations_factor: arithmetic operations per token over plain decoding's.
    row_utilisation: mean iterations of a row over those of the slowest row.
    break_even_alpha: the acceptance rate at which one row neither gains nor
      loses; None if there is none, and for a tree.
    tree: its `parents`, see `theory.trees`; None for a chain.
  """

  gamma: int
  expected_tokens: float
  speedup: float
  operations_factor: float
  row_utilisation: float
  break_even_alpha: float | None
  tree: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GammaPlan:
  """The forecasts of gammas from 0 to the largest considered, the fastest of
  them, and sentences that explain it."""

  choices: tuple[Forecast, ...]
  best: Forecast
  sentences: tuple[str, ...]


def expected_iterations(
  profile: ArrayLike, length: int, batch_size: int
) -> float:
  """Computes mean iterations until the slowest of `batch_size` rows has
  `length` tokens, at least 1, from acceptance rates by position, `[G]`. Exact
  if rows and iterations are independent."""
  # Convolves the distribution of the tokens per iteration until the length is
  # reached; the mean of the maximum is `sum_m (1 - P(done within m)^B)`.
  in_range('length', length, 1)
  in_range('batch_size', batch_size, 1)
  profile = in_range('profile', profile, 0, 1)
  reached = np.concatenate([[1.0], profile.cumprod()])
  block = reached - np.append(reached[1:], 0.0)
  # With rates 0.8, 0.5: at least 0, 1, 2 drafted tokens are accepted with
  # probabilities 1, 0.8, 0.4 (`reached`), so that an iteration gives 1, 2, 3
  # tokens with 0.2, 0.4, 0.4 (`block`).
  # `missing[n]`: the probability that a row is unfinished with n tokens, not
  # counting one token per iteration, which is certain.
  missing = np.zeros(length)
  missing[0] = 1.0
  mean = 0.0
  unfinished = 1.0
  while unfinished > 1e-15:
    # All B rows are done with probability (1 - unfinished)^B.
    mean += 1 - (1 - unfinished) ** batch_size
    missing = np.convolve(missing, block)[: missing.size - 1]
    unfinished = min(float(missing.sum()), 1.0)
  return mean


def plan(
  alpha: float | ArrayLike,
  costs: Costs,
  *,
  max_gamma: int | None = None,
  batch_size: int = 1,
  length: int = 128,
  interval: tuple[float, float] | None = None,
  mean: float | None = None,
) -> GammaPlan:
  """Chooses a gamma and explains what it gains, or why drafting loses.

  Args:
    alpha: the acceptance rate, or one per position, `max_gamma` or more.
    costs: of an iteration's parts, for all rows of the batch together.
    max_gamma: the largest considered; None: the largest that was measured.
    batch_size: rows decoded together; all wait for the slowest.
    length: tokens that each row decodes; sets how long they wait.
    interval: confidence interval of an estimated alpha; the sentences then say
      whether the choice of gamma is the same at both ends.
    mean: the estimate, relative to which rates per position are scaled; None:
      the first rate.

  Raises:
    ValueError: if an argument is out of range, or `max_gamma` not measured.
  """
  max_gamma = costs.max_gamma if max_gamma is None else max_gamma
  costs.check_gamma(max_gamma)
  profile = np.atleast_1d(in_range('alpha', alpha, 0, 1))
  if profile.size == 1:
    profile = np.full(max(max_gamma, 1), profile[0])
  if profile.size < max_gamma:
    raise ValueError(f'{profile.size} rates are too few for gamma {max_gamma}')
  choices = tuple(
    forecast(profile[:gamma], costs, batch_size, length)
    for gamma in range(max_gamma + 1)
  )
  best = max(choices, key=lambda choice: choice.speedup)
  sentences = _verdict(choices, best, costs, batch_size, profile)
  if interval is not None:
    # Of a drafter that often abstains, rates are 0.36, 0.8, and the mean over
    # its drafts 0.8: at the upper end 0.9 the rates are 0.405, 0.9.
    scales = [end / (mean or profile[0] or 1.0) for end in interval]
    low, high = (
      plan(
        np.minimum(scale * profile, 1.0),
        costs,
        max_gamma=max_gamma,
        batch_size=batch_size,
        length=length,
      ).best
      for scale in scales
    )
    chosen = f'gamma lies between {low.gamma} and {high.gamma}'
    if low.gamma == best.gamma == high.gamma:
      chosen = f'gamma is {best.gamma} throughout'
    sentences.append(
      f'With alpha between {interval[0]:.3f} and {interval[1]:.3f} the best '
      f'{chosen}, and the speedup between {low.speedup:.2f} and '
      f'{high.speedup:.2f}.'
    )
  return GammaPlan(choices=choices, best=best, sentences=tuple(sentences))


def oracle_speedup(
  alpha: float | ArrayLike, costs: Costs, length: int = 128
) -> float:
  """Computes an upper bound on the speedup of any schedule that varies gamma:
  an oracle drafts only what is accepted and scores at the least measured cost.

  `alpha` is as in `plan`; positions beyond its rates have the last one. If
  drafts are always right and nothing takes time but scoring, it is infinite.
  """
  rates = np.atleast_1d(in_range('alpha', alpha, 0, 1))
  # Beyond the last position the rate stays r, and r + r^2 + ... = r / (1 - r).
  reached, last = rates.cumprod(), rates[-1]
  with np.errstate(divide='ignore', invalid='ignore'):
    beyond = np.nan_to_num(reached[-1] * last / (1 - last), posinf=np.inf)
    accepted = reached.sum() + beyond
    drafting = min(costs.first_draft_seconds, costs.draft_seconds)
    scoring = min(costs.target_seconds)
    # With 3 accepted tokens per run, a token costs 1/4 of a scoring and 3/4 of
    # a draft step. If all are accepted, only drafting costs time.
    share = 1 / (1 + accepted)
    seconds = share * scoring + (1 - share) * drafting
    decode_seconds = length * seconds + costs.launch_seconds
    return float(max(costs.decode_seconds(0, length) / decode_seconds, 1.0))


def forecast(
  profile: np.ndarray,
  costs: Costs,
  batch_size: int,
  length: int,
  *,
  tree: tuple[int, ...] | None = None,
) -> Forecast:
  """Forecasts a chain from the rates of its positions, or a tree from those of
  its depths; all else is as in `plan`."""
  gamma = len(tree or profile)
  tokens = float(expected_tokens_of_profile(profile))
  row_iterations = expected_iterations(profile, length, 1)
  batch_iterations = row_iterations
  if batch_size != 1:
    batch_iterations = expected_iterations(profile, length, batch_size)
  depth = len(profile) if tree else None
  # The iterations of a long decode, with those that wait for the slowest row.
  num_iterations = length / tokens * batch_iterations / row_iterations
  decode_seconds = costs.decode_seconds(gamma, num_iterations, depth)
  # Break-even: expected tokens equal the iteration's cost in plain steps.
  cost = costs.iteration_seconds(gamma, depth) / costs.plain_seconds
  break_even = None
  if 0 < gamma >= cost - 1 and tree is None:
    break_even = float(alpha_from_block_efficiency(max(cost, 1.0), gamma))
  return Forecast(
    gamma=gamma,
    expected_tokens=tokens,
    speedup=costs.decode_seconds(0, length) / decode_seconds,
    operations_factor=(gamma * costs.c_hat + gamma + 1) / tokens,
    row_utilisation=row_iterations / batch_iterations,
    break_even_alpha=break_even,
    tree=tree,
  )


def _verdict(
  choices: Sequence[Forecast],
  best: Forecast,
  costs: Costs,
  batch_size: int,
  profile: np.ndarray,
) -> list[str]:
  """Returns sentences on where drafting gains and where it loses, and why."""
  drafting = choices[1:]
  if not drafting:
    return ['No gamma was considered: decode plainly.']
  gaining = [choice.gamma for choice in drafting if choice.speedup > 1]
  first = max(drafting, key=lambda choice: choice.speedup)
  if best.speedup > 1 + MARGIN:
    sentences = [
      f'Take gamma {best.gamma}: {best.expected_tokens:.2f} tokens per target '
      f'run, {best.speedup:.2f} times as fast as plain decoding, for '
      f'{best.operations_factor:.2f} times the arithmetic.'
    ]
    losing = [choice.gamma for choice in drafting if choice.speedup < 1]
    if losing:
      sentences.append(
        f'It gains from gamma {gaining[0]} to {gaining[-1]}; at gamma '
        f'{losing[0]} it loses.'
      )
    elif best.gamma == drafting[-1].gamma > 1:
      sentences.append(
        f'Gamma {best.gamma} is the largest considered: more may be better.'
      )
  elif first.speedup > 1 - MARGIN:
    sentences = [
      f'Speculation neither gains nor loses here: gamma {first.gamma} is '
      f'{first.speedup:.2f} times as fast as plain decoding.'
    ]
  else:
    rates = [(choice.break_even_alpha, choice.gamma) for choice in drafting]
    needed = min((rate for rate in rates if rate[0] is not None), default=None)
    sentences = [
      'Speculation loses here: decode plainly. Its best gamma, '
      f'{first.gamma}, is {first.speedup:.2f} times as fast, since '
      f'{_reason(first, costs, batch_size, profile)}.',
      'No acceptance rate would make it pay.'
      if needed is None
      else f'With gamma {needed[1]} it stops losing from alpha '
      f'{needed[0]:.2f} on.',
    ]
  if batch_size > 1 and best.row_utilisation < 0.9:
    sentences.append(
      f'Of {batch_size} rows that start together the slowest sets the end: '
      f'on average a row works {best.row_utilisation:.0%} of the time.'
    )
  return sentences


def _reason(
  choice: Forecast, costs: Costs, batch_size: int, profile: np.ndarray
) -> str:
  """Names the largest cost of a choice that loses."""
  gamma, tokens = choice.gamma, choice.expected_tokens
  ratio = costs.verify_cost_ratio(gamma)
  drafting = costs.drafting_seconds(gamma) / costs.plain_seconds
  loop = costs.loop_seconds / costs.plain_seconds
  if tokens < 1.25:
    return f'only {profile[0]:.0%} of the target runs accept a drafted token'
  drafted, rows = plural(gamma, 'token'), plural(batch_size, 'row')
  scored = f'scoring {gamma + 1} positions of {rows} costs {ratio:.2f}'
  reasons = {
    f'drafting {drafted} costs {drafting:.2f} plain steps': drafting,
    f'{scored} plain steps': ratio - 1,
    f'the loop itself costs {loop:.2f} plain steps per iteration': loop,
  }
  return max(reasons, key=lambda reason: reasons[reason])


def plural(count: int, noun: str) -> str:
  """Writes a count with its noun: '1 row', '4 rows'."""
  return f'{count} {noun}' + 's' * (count > 1)


class Prediction(NamedTuple):
  """Time and cost (None without a price) of a gamma; 0 is plain decoding."""

  gamma: int
  tokens_per_second_per_chip: float
  chip_hours: float
  cost_per_million_tokens: float | None


def predict_fleet(
  costs: Costs,
  plans: Sequence[GammaPlan],
  *,
  num_tokens: float,
  num_chips: int,
  batch_size: int,
  length: int,
  price: float | None = None,
) -> list[Prediction]:
  """Predicts the cost of many tokens, of plain decoding and of each plan.

  Assumes full batches without prefill, encoder and idle chips.

  Args:
    costs: of a whole batch, on its `num_chips` together.
    plans: the plans, each with its `best` gamma.
    num_tokens: total output tokens.
    num_chips: chips that decode a batch together.
    batch_size: rows per batch.
    length: output tokens per row.
    price: of one chip-hour, in any currency; None if unknown.
  """
  plain = costs.decode_seconds(0, length) * num_chips / (batch_size * length)

  def predict(gamma: int, seconds: float) -> Prediction:
    """Predicts from the chip-seconds of a token."""
    cost = None if price is None else price * seconds / 3600 * 1e6
    return Prediction(gamma, 1 / seconds, num_tokens * seconds / 3600, cost)

  bests = [plan.best for plan in plans]
  return [
    predict(0, plain),
    *(predict(best.gamma, plain / best.speedup) for best in bests),
  ]
