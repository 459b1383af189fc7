"""Times of plain and speculative decoding, and what they say of each other."""

import dataclasses
from typing import Any

import numpy as np

from specdec_jax import theory
from specdec_jax.base import Drafter
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.rates import Counts
from specdec_jax.measure.loops import Timed
from specdec_jax.measure.sameness import Sameness
from specdec_jax.theory import estimates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
  """Seconds of decoding some batches, plainly or with a drafter.

  Attributes:
    prefill: of all batches.
    loop: of the loop, by batch and repeat, with the counters of its results.
    per_iteration: of an iteration with a draft; of a step, in plain decoding.
    per_proposal: of one draft.
    per_short_iteration: of an iteration without a draft; None if there always
      is one.
  """

  prefill: float
  loop: Timed
  per_iteration: float
  per_proposal: float = 0.0
  per_short_iteration: float | None = None

  @property
  def end_to_end(self) -> float:
    """Seconds of prefill and loop."""
    return self.prefill + self.loop.total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """Speculative decoding compared with plain decoding of the same prompts.

  Attributes:
    drafter: what drafted.
    ends_early: as in `benchmark.Drafted`.
    drafted: the times of speculative decoding.
    plain: of plain decoding in the target's dtype; its step is T(1), the unit
      of costs.
    baseline: of the fastest plain decoding, which speedups are relative to.
    sameness: of the tokens.
  """

  drafter: Drafter
  ends_early: bool
  drafted: Timing
  plain: Timing
  baseline: Timing
  sameness: Sameness

  @property
  def speedup(self) -> float:
    return self.drafted.loop.speed / self.baseline.loop.speed

  @property
  def most_speedup(self) -> float:
    """The speedup if an iteration took no longer than a plain step."""
    drafted, plain = self.drafted.loop.counts, self.baseline.loop.counts
    plain_pace = plain.num_tokens / plain.iterations
    return drafted.num_tokens / drafted.iterations / plain_pace

  @property
  def speedup_range(self) -> list[float]:
    """The least and the greatest speedup of a repeat."""
    drafted, plain = self.drafted.loop, self.baseline.loop
    ratio = drafted.counts.num_tokens / plain.counts.num_tokens
    speedups = plain.turns / drafted.turns * ratio
    return [float(speedups.min()), float(speedups.max())]

  @property
  def speedup_interval(self) -> list[float] | None:
    """A confidence interval over batches; None for fewer than two."""
    drafted, plain = self.drafted.loop, self.baseline.loop
    # Sampled texts differ in length: for a batch of 120 drafted and 100 plain
    # tokens, plain decoding's time is scaled by 1.2.
    ratio = drafted.num_tokens / plain.num_tokens
    plain_seconds = np.median(plain.seconds, axis=1)
    drafted_seconds = np.median(drafted.seconds, axis=1)
    _, interval = estimates.ratio(plain_seconds * ratio, drafted_seconds)
    return interval

  @property
  def end_to_end_speedup(self) -> float:
    """The speedup with the prefill; texts of different length count as they
    are."""
    return self.baseline.end_to_end / self.drafted.end_to_end

  # Costs are relative to a plain step in the target's dtype. The baseline may
  # be of another dtype, so that `predict_speedup` takes its cost.

  @property
  def c(self) -> float:
    """The cost of a drafted token."""
    seconds = self.drafted.per_proposal / max(self.drafter.gamma, 1)
    return seconds / self.plain.per_iteration

  @property
  def verify_cost_ratio(self) -> float:
    """The cost of scoring gamma + 1 positions."""
    return self.drafted.per_iteration / self.plain.per_iteration

  @property
  def without_draft_cost_ratio(self) -> float | None:
    """The cost of an iteration without a draft; None if there always is one."""
    seconds = self.drafted.per_short_iteration
    return None if seconds is None else seconds / self.plain.per_iteration

  @property
  def num_drafted(self) -> int | None:
    """Steps of the drafter in all iterations; None if unknown."""
    counts = self.drafted.loop.counts
    if not self.ends_early:
      return counts.iterations * self.drafter.gamma
    # An iteration takes as many steps as the longest draft of its rows.
    state = self.drafted.loop.states[0]
    is_lone = state.context.lengths.size == 1
    return int(counts.statistics.num_drafted.sum()) if is_lone else None

  @property
  def predicted_speedup(self) -> float | None:
    """The speedup that counters and costs promise, see `predict_speedup`."""
    return predict_speedup(
      self.baseline.loop.counts,
      self.drafted.loop.counts,
      num_drafted=self.num_drafted,
      c=self.c,
      verify_cost_ratio=self.verify_cost_ratio,
      without_draft_cost_ratio=self.without_draft_cost_ratio,
      baseline_cost=self.baseline.per_iteration / self.plain.per_iteration,
    )

  @property
  def rates(self) -> metrics.Rates:
    return metrics.rates(self.drafted.loop.counts.statistics)

  @property
  def alpha_from_block_efficiency(self) -> float | None:
    """The alpha that independent acceptances would need for the block
    efficiency; None if nothing was drafted, or for trees."""
    statistics = self.drafted.loop.counts.statistics
    efficiency, gamma = self.rates.block_efficiency, self.drafter.gamma
    has_drafts = np.any(statistics.num_drafted)
    if efficiency is None or self.drafter.tree or not has_drafts:
      return None
    efficiency = np.clip(efficiency, 1, gamma + 1)
    return float(theory.alpha_from_block_efficiency(efficiency, gamma))

  @property
  def alpha_by_position(self) -> list[float | None]:
    """The rate of acceptance at each position of a draft."""
    statistics = self.drafted.loop.counts.statistics
    num_accepted = statistics.num_accepted.sum(0)
    num_tested = statistics.num_tested.sum(0)
    pairs = zip(num_accepted, num_tested, strict=True)
    return [estimates.quotient(*pair) for pair in pairs]

  @property
  def theory_speedup(self) -> float | None:
    """The theorem's speedup, which is for chains of one gamma; else None."""
    alpha = self.rates.alpha
    if self.ends_early or self.drafter.tree or alpha is None:
      return None
    speedup = theory.walltime_improvement(alpha, self.drafter.gamma, self.c)
    return float(speedup)

  @property
  def num_rows(self) -> int:
    """Rows that decoded a token."""
    return int(np.count_nonzero(self.drafted.loop.counts.statistics.num_tokens))


def predict_speedup(
  baseline: Counts,
  drafted: Counts,
  *,
  num_drafted: int | None,
  c: float,
  verify_cost_ratio: float,
  without_draft_cost_ratio: float | None = None,
  baseline_cost: float = 1.0,
) -> float | None:
  """Predicts the speedup from the measured tokens per target run, by
  `theory.predicted_speedup` with the cost of iterations without a draft.

  Args:
    baseline: counts of plain decoding.
    drafted: counts of speculative decoding.
    num_drafted: steps of the drafter in all iterations; None if unknown, and so
      is the result.
    c: cost of a drafted token. All costs are relative to T(1).
    verify_cost_ratio: cost of scoring gamma + 1 positions.
    without_draft_cost_ratio: cost of an iteration without a draft; None if
      there always is one.
    baseline_cost: cost of an iteration of the baseline.
  """
  if num_drafted is None:
    return None
  # Of 10 iterations, 4 without a draft: 6 cost T(gamma + 1), 4 about T(1).
  num_short = drafted.short_iterations
  scoring = (
    (drafted.iterations - num_short) * verify_cost_ratio
    + num_short * (without_draft_cost_ratio or 1.0)
  ) / drafted.iterations
  speedup = theory.predicted_speedup(
    drafted.num_tokens / drafted.iterations,
    num_drafted / drafted.iterations,
    c,
    scoring,
  )
  plain_pace = baseline.num_tokens / baseline.iterations
  return float(speedup / plain_pace * baseline_cost)


def figures(row: Row) -> dict[str, Any]:
  """Returns a row as JSON has it: times in seconds; rates of drafts are None if
  nothing was drafted."""
  drafted, baseline = row.drafted.loop, row.baseline.loop
  return {
    'autoregressive_tokens_per_second': baseline.speed,
    'speculative_tokens_per_second': drafted.speed,
    'speedup': row.speedup,
    'speedup_range': row.speedup_range,
    'speedup_interval': row.speedup_interval,
    'most_speedup': row.most_speedup,
    'turn_seconds': {
      'plain': baseline.turns.tolist(),
      'speculative': drafted.turns.tolist(),
    },
    'tokens': drafted.counts.num_tokens,
    'autoregressive_tokens': baseline.counts.num_tokens,
    'target_runs': drafted.counts.iterations,
    'short_target_runs': drafted.counts.short_iterations,
    'autoregressive_target_runs': baseline.counts.iterations,
    **row.rates._asdict(),
    'alpha_from_block_efficiency': row.alpha_from_block_efficiency,
    'alpha_by_position': row.alpha_by_position,
    'rows': row.num_rows,
    'c': row.c,
    'verify_cost_ratio': row.verify_cost_ratio,
    'without_draft_cost_ratio': row.without_draft_cost_ratio,
    'seconds_per_plain_iteration': row.plain.per_iteration,
    'seconds_per_full_width_iteration': row.drafted.per_iteration,
    'seconds_per_propose': row.drafted.per_proposal,
    'predicted_speedup': row.predicted_speedup,
    'theory_speedup': row.theory_speedup,
    'compared_tokens': row.plain.loop.counts.num_tokens,
    'prefill_seconds': row.drafted.prefill,
    'end_to_end_speedup': row.end_to_end_speedup,
    **row.sameness.figures(),
  }
