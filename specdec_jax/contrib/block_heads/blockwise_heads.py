"""Blockwise parallel decoding (Stern et al., arXiv 1811.03115): extra heads on
the target predict further ahead."""

from collections.abc import Callable

import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter
from specdec_jax.drafters.stateless import check_gamma

# `(params, target_cache, lengths[B]) -> (logits[B, G, V], is_ready[B])`: the
# float32 logits of tokens `lengths[b]` to `lengths[b] + G - 1`, from what the
# target's last call left in its cache, and whether it left anything for row b.
HeadsFn = Callable[[Arrays, Arrays, Array], tuple[Array, Array]]


def blockwise_heads(heads_fn: HeadsFn, *, gamma: int) -> Drafter:
  """Drafts the likeliest token of each of gamma extra heads.

  https://arxiv.org/abs/1811.03115 with k = gamma + 1: the target's own head
  gives the token after the accepted ones, and the extra heads predict what
  follows it. Verification and prediction share one call of the target: the
  heads read the hidden state that the last verification left at the last
  accepted token. Before the first call there is none, and the draft is empty.

  Args:
    heads_fn: from `contrib.block_heads.network`, bound to the loop's target.
    gamma: extra heads, at least 1; ValueError otherwise.
  """
  check_gamma(gamma)

  def init(
    params: Arrays, prompt: base.Prompt, max_len: int, target_cache: Arrays
  ) -> tuple[Arrays, Arrays]:
    del params, prompt, max_len
    return (), target_cache

  def propose(
    params: Arrays,
    row_keys: Array,
    context: Context,
    state: Arrays,
    target_cache: Arrays,
  ) -> tuple[Draft, Arrays]:
    del row_keys
    logits, is_ready = heads_fn(params, target_cache, context.lengths)
    draft = Draft(
      tokens=arrays.argmax(logits),
      probs=None,
      lengths=jnp.where(is_ready, gamma, 0).astype(jnp.int32),
    )
    return draft, state

  return Drafter(
    gamma, init, propose, may_abstain=True, reads_target_cache=True
  )
