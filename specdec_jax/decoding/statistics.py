"""Counters of a decode, of which `decoding.rates` makes rates.

Finished rows are not counted. Of a block that EOS or the length limit cuts
short, only what was committed counts.
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
    num_short_runs: `[B]`, those that scored one position, as no row drafted.
    num_drafted: `[B]`, tokens proposed; of a tree all nodes, even if cut short.
    num_tested: `[B, G]`, of trees `[B, D]`: how often all tokens before the
      i-th drafted one, or the i-th depth, were accepted.
    num_accepted: like `num_tested`, how often it was then accepted.
    accept_prob: float32 `[B]`, summed acceptance probabilities of the tested
      tokens.
  """

  num_tokens: Array
  num_target_runs: Array
  num_short_runs: Array
  num_drafted: Array
  num_tested: Array
  num_accepted: Array
  accept_prob: Array


def init(batch_size: int, gamma: int) -> Statistics:
  """Makes counters of zero."""
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
  """Counts an iteration that committed `counts[B]` tokens. For a `tree`,
  `draft` is the chain that stands for it; `is_short`: one position was scored.
  """
  gamma, width = before.num_tested.shape[1], draft.tokens.shape[1]
  was_active = (counts > 0).astype(jnp.int32)
  num_accepted = jnp.minimum(verification.num_accepted, counts)
  # A rejection counts only if its correction was committed: of a draft of 4
  # with 2 accepted, 3 tokens are tested, or 2 if EOS cut the block after 2.
  is_whole = counts > verification.num_accepted
  is_rejection = is_whole & (verification.num_accepted < draft.lengths)
  num_tested = num_accepted + is_rejection.astype(jnp.int32)
  cut = jnp.minimum(draft.lengths, counts)
  num_drafted = jnp.where(is_whole, draft.lengths, cut)
  if tree is not None:
    num_drafted = jnp.where(draft.lengths > 0, len(tree.parents), 0)
  is_tested = arrays.is_within(num_tested, width)  # 3 of 4 -> [1, 1, 1, 0]
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
