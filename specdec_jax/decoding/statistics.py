"""Counters of a decode, and the rates that they define.

Three acceptance rates go by one name in the field; each is here under its own,
with its denominator. Finished rows count in none, and a block that EOS or the
length limit cut short counts only for what was committed of it.
"""

from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array


@flax.struct.dataclass(kw_only=True)
class Statistics:
  """Counters of each row, int32.

  Attributes:
    num_tokens: `[B]`, tokens committed after the prompt.
    num_target_runs: `[B]`, target calls in which the row took part.
    num_short_runs: `[B]`, those of them that scored one position, because no
      row of the batch had drafted anything.
    num_drafted: `[B]`, tokens proposed.
    num_tested: `[B, G]`, how often the target reached the i-th drafted token:
      those before it had passed.
    num_accepted: `[B, G]`, how often it then passed.
    accept_prob: float32 `[B]`, acceptance probabilities of the tested tokens,
      summed.
  """

  num_tokens: Array
  num_target_runs: Array
  num_short_runs: Array
  num_drafted: Array
  num_tested: Array
  num_accepted: Array
  accept_prob: Array


def init(batch_size: int, gamma: int) -> Statistics:
  """All counters at zero."""
  per_row = jnp.zeros(batch_size, jnp.int32)
  per_position = jnp.zeros((batch_size, gamma), jnp.int32)
  return Statistics(
    num_tokens=per_row,
    num_target_runs=per_row,
    num_short_runs=per_row,
    num_drafted=per_row,
    num_tested=per_position,
    num_accepted=per_position,
    accept_prob=jnp.zeros(batch_size, jnp.float32),
  )


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
