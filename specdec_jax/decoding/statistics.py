"""Counters of a decode; `measure.metrics` makes rates of them.

Finished rows count in none, and a block that EOS or the length limit cut short
counts only for what was committed of it.
"""

import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Draft, Tree, Verification


@base.value
class Statistics:
  """Counters of each row, int32.

  Attributes:
    num_tokens: `[B]`, tokens committed after the prompt.
    num_target_runs: `[B]`, target calls in which the row took part.
    num_short_runs: `[B]`, those of them that scored one position, because no
      row of the batch had drafted anything.
    num_drafted: `[B]`, tokens proposed; of a tree all nodes, whatever cut it.
    num_tested: `[B, G]`, of trees `[B, D]`: how often the target reached the
      i-th drafted token, or the i-th depth: those before it had passed.
    num_accepted: like `num_tested`, how often it then passed.
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


def count(
  before: Statistics,
  draft: Draft,
  verification: Verification,
  counts: Array,
  *,
  is_short: Array | bool = False,
  tree: Tree | None = None,
) -> Statistics:
  """The counters after an iteration that committed `counts[B]` tokens; for a
  `tree`, `draft` is the chain that stands for it. `is_short`, of
  all rows, says that one position was scored."""
  gamma, width = before.num_tested.shape[1], draft.tokens.shape[1]
  was_active = (counts > 0).astype(jnp.int32)
  num_accepted = jnp.minimum(verification.num_accepted, counts)
  # A rejection counts only when its correction was committed.
  is_whole = counts > verification.num_accepted
  is_rejection = is_whole & (verification.num_accepted < draft.lengths)
  num_tested = num_accepted + is_rejection.astype(jnp.int32)
  num_drafted = jnp.where(
    is_whole, draft.lengths, jnp.minimum(draft.lengths, counts)
  )
  if tree is not None:
    num_drafted = jnp.where(draft.lengths > 0, len(tree.parents), 0)
  is_tested = arrays.is_within(num_tested, width)
  accept_probs = jnp.where(is_tested, verification.accept_probs, 0.0)
  reach = lambda lengths: arrays.is_within(lengths, gamma).astype(jnp.int32)
  return Statistics(
    num_tokens=before.num_tokens + counts,
    num_target_runs=before.num_target_runs + was_active,
    num_short_runs=before.num_short_runs + jnp.where(is_short, was_active, 0),
    num_drafted=before.num_drafted + num_drafted * was_active,
    num_tested=before.num_tested + reach(num_tested),
    num_accepted=before.num_accepted + reach(num_accepted),
    accept_prob=before.accept_prob + jnp.sum(accept_probs, axis=1),
  )
