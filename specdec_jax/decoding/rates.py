"""Rates of a finished decode.

Three acceptance rates go by one name in the field; here each has a name of its
own, and its denominator.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from specdec_jax.decoding.statistics import Statistics
from specdec_jax.theory import estimates


class Rates(NamedTuple):
  """Rates over all rows of a batch. None where nothing was counted.

  Attributes:
    alpha: accepted / tested drafted tokens: the estimate of Leviathan's alpha,
      the chance that a token passes given that those before it did.
    acceptance_per_drafted: accepted / drafted tokens; falls with gamma.
    block_efficiency: tokens / target runs.
    mean_accept_prob: acceptance probability of the tested tokens; the same
      expectation as `alpha`, with less variance.
    row_utilisation: target runs of the rows / (rows * runs of the slowest).
  """

  alpha: float | None
  acceptance_per_drafted: float | None
  block_efficiency: float | None
  mean_accept_prob: float | None
  row_utilisation: float | None


@dataclasses.dataclass(frozen=True)
class Counts:
  """Counters of all batches of one run: of their rows, of the loop's
  iterations, and of those of them that scored one position."""

  statistics: Statistics
  iterations: int
  short_iterations: int

  @property
  def num_tokens(self) -> int:
    return int(np.sum(self.statistics.num_tokens))


def count(statistics: Sequence[Statistics]) -> Counts:
  """Returns the counters of batches, together."""
  batches = jax.device_get(list(statistics))
  return Counts(
    statistics=joined(batches),
    iterations=sum(int(s.num_target_runs.max()) for s in batches),
    short_iterations=sum(int(s.num_short_runs.max()) for s in batches),
  )


def joined(statistics: Sequence[Statistics]) -> Statistics:
  """Joins the counters of several batches, in numpy; those by position are as
  wide as the longest drafts."""
  batches = jax.device_get(list(statistics))
  gamma = max(batch.num_tested.shape[1] for batch in batches)

  def widen(values: np.ndarray) -> np.ndarray:
    # Rows of a batch with gamma 2 beside one with gamma 4:
    # `[5, 3]` becomes `[5, 3, 0, 0]`. Other counters have one number per row.
    if values.ndim == 1:
      return values
    return np.pad(values, ((0, 0), (0, gamma - values.shape[1])))

  return jax.tree.map(
    lambda *values: np.concatenate(list(map(widen, values))), *batches
  )


def rates(statistics: Statistics) -> Rates:
  """Computes the rates of a finished decode; pulls the counters to the host."""
  total = jax.tree.map(np.sum, jax.device_get(statistics))
  runs = np.asarray(statistics.num_target_runs)
  num_slots, quotient = runs.size * runs.max(initial=0), estimates.quotient
  return Rates(
    alpha=quotient(total.num_accepted, total.num_tested),
    acceptance_per_drafted=quotient(total.num_accepted, total.num_drafted),
    block_efficiency=quotient(total.num_tokens, total.num_target_runs),
    mean_accept_prob=quotient(total.accept_prob, total.num_tested),
    row_utilisation=quotient(total.num_target_runs, num_slots),
  )


def row_summary(statistics: Statistics, row: int) -> dict[str, float | None]:
  """Returns the counters and rates of one row, as values of JSON."""
  row_statistics = jax.tree.map(
    lambda values: values[row : row + 1], statistics
  )
  row_rates = rates(row_statistics)
  return {
    'tokens': int(row_statistics.num_tokens[0]),
    'target_runs': int(row_statistics.num_target_runs[0]),
    'drafted': int(row_statistics.num_drafted[0]),
    'tested': int(np.sum(row_statistics.num_tested)),
    'accepted': int(np.sum(row_statistics.num_accepted)),
    'alpha': row_rates.alpha,
    'acceptance_per_drafted': row_rates.acceptance_per_drafted,
    'block_efficiency': row_rates.block_efficiency,
  }
