"""Rates of a finished decode, each under its own name.

Three acceptance rates go by one name in the field. Here each has its own, and
its denominator.
"""

from typing import NamedTuple

import jax
import numpy as np

from specdec_jax.decoding.statistics import Statistics


class Rates(NamedTuple):
  """Rates over all rows of a batch. NaN where nothing was counted.

  Attributes:
    alpha: accepted / tested drafted tokens: the estimate of Leviathan's alpha,
      the chance that a token passes given that those before it did.
    acceptance_per_drafted: accepted / drafted tokens; falls with gamma.
    block_efficiency: tokens / target runs.
    mean_accept_prob: acceptance probability of the tested tokens; the same
      expectation as `alpha`, with less variance.
    row_utilisation: target runs of the rows / (rows * runs of the slowest).
  """

  alpha: float
  acceptance_per_drafted: float
  block_efficiency: float
  mean_accept_prob: float
  row_utilisation: float


def rates(statistics: Statistics) -> Rates:
  """Rates of a finished decode; pulls the counters to the host."""
  tested = int(np.sum(statistics.num_tested))
  accepted = int(np.sum(statistics.num_accepted))
  runs = np.asarray(statistics.num_target_runs)

  def divide(a: float, b: float) -> float:
    return float(a) / float(b) if b else float('nan')

  return Rates(
    alpha=divide(accepted, tested),
    acceptance_per_drafted=divide(accepted, np.sum(statistics.num_drafted)),
    block_efficiency=divide(np.sum(statistics.num_tokens), runs.sum()),
    mean_accept_prob=divide(np.sum(statistics.accept_prob), tested),
    row_utilisation=divide(runs.sum(), runs.size * runs.max(initial=0)),
  )


def alpha_by_position(statistics: Statistics) -> np.ndarray:
  """Conditional acceptance of the i-th drafted token, float64 `[G]`; NaN where
  the target never got there."""
  tested = np.sum(statistics.num_tested, axis=0, dtype=np.float64)
  accepted = np.sum(statistics.num_accepted, axis=0, dtype=np.float64)
  return np.divide(
    accepted, tested, out=np.full_like(tested, np.nan), where=tested > 0
  )


def row_summary(statistics: Statistics, row: int) -> dict[str, float | None]:
  """The counters and rates of one row, as JSON can hold them."""
  one = jax.tree.map(lambda values: values[row : row + 1], statistics)
  result: dict[str, float | None] = {
    'tokens': int(one.num_tokens[0]),
    'target_runs': int(one.num_target_runs[0]),
    'drafted': int(one.num_drafted[0]),
    'tested': int(np.sum(one.num_tested)),
    'accepted': int(np.sum(one.num_accepted)),
  }
  found = rates(one)
  for name in ('alpha', 'acceptance_per_drafted', 'block_efficiency'):
    value = getattr(found, name)
    result[name] = None if np.isnan(value) else value
  return result
