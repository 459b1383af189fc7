"""Which rows `gamma='auto'` tries which gamma on, and what they show."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_jax.decoding.statistics import Statistics
from specdec_jax.measure import metrics
from specdec_jax.theory import estimates
from specdec_jax.theory.gamma_trials import ChosenGamma, Trial

# Rows of each gamma that suffice.
NUM_ROWS = 8
# Of so many batches one may be of the measurement.
SHARE = 20


def num_batches_needed(gammas: Sequence[int], batch_size: int) -> int:
  """Batches of a run that can use as many rows as suffice."""
  return -(-NUM_ROWS // batch_size) * SHARE * len(gammas)


def schedule(
  gammas: Sequence[int], batch_size: int, num_batches: int
) -> tuple[int, ...]:
  """Assigns a gamma to each of the first batches of a run; empty if the run has
  too few to compare `gammas`, which include 0."""
  num_rounds = min(
    -(-NUM_ROWS // batch_size), num_batches // (SHARE * len(gammas))
  )
  # There and back again, so that a drift of the machine's speed cancels:
  # gammas 0, 2, 5 in three rounds are tried as 0 2 5, 5 2 0, 0 2 5.
  turns = (tuple(gammas), tuple(reversed(gammas)))
  return tuple(gamma for i in range(num_rounds) for gamma in turns[i % 2])


def too_short(gammas: Sequence[int], num_batches: int) -> ChosenGamma:
  """Makes the choice for a run without a schedule."""
  return ChosenGamma(
    gamma=0,
    sentence='gamma auto is 0, plain decoding: to measure takes '
    f'{SHARE * len(gammas)} batches, and there are {num_batches}',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visit:
  """One batch that was decoded with one gamma: the counters of its rows, and
  the seconds of its prefill and of its iterations."""

  gamma: int
  statistics: Statistics
  num_iterations: int
  fill_seconds: float
  loop_seconds: float


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
