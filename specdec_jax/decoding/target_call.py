"""The target's call of an iteration: a draft in, logits and cache out.

This module decides how wide the call is, which positions its tokens have and
whether drafts are scored at all; the loop always gets logits of one shape.
"""

import functools
from typing import Any

import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Draft
from specdec_jax.decoding import tree_drafts
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeState


def score(
  params: Any, state: DecodeState, draft: Draft, method: Method
) -> tuple[Array, Any, Array]:
  """Scores the pending token and the draft after it.

  If drafts may be empty, a call of width 1 is compiled beside the full one and
  runs if no row drafted. Returns logits `[B, G+1, V]` of what follows each
  token, 0 if it was not scored; the cache; and bool `[]`, whether the call was
  of width 1.
  """
  target, drafter = method.target, method.drafter
  starts, gamma = state.context.lengths, drafter.gamma
  pending = arrays.read_block(state.context.tokens, starts - 1, 1)
  # Nodes of a tree that are no tokens are fed as 0, and never accepted.
  drafted = jnp.maximum(draft.tokens, 0)
  tokens = jnp.concatenate([pending, drafted], axis=1)

  def extend(width: int, carry: tuple[Array, Any]) -> tuple[Array, Any]:
    placed = tree_drafts.placement(drafter.tree, width, starts, carry[1])
    block = tokens[:, : width + 1]  # width 0: the pending token alone
    logits, cache = target.extend(params, block, carry[1], **placed)
    return jnp.pad(logits, ((0, 0), (0, gamma - width), (0, 0))), cache

  shape = starts.size, gamma + 1, target.vocab_size
  carry = jnp.zeros(shape, jnp.float32), state.target_cache
  if not drafter.may_abstain or not gamma:
    return *extend(gamma, carry), jnp.zeros((), jnp.bool_)
  has_draft = jnp.any(draft.lengths > 0)
  carry = arrays.run_if(has_draft, functools.partial(extend, gamma), carry)
  return *arrays.run_if(
    ~has_draft, functools.partial(extend, 0), carry
  ), ~has_draft
