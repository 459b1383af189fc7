"""Shared by the verification rules: draw, decide, then draw the next token.

A rule is its `decide` function, which is deterministic given uniform draws.
Tests integrate it over the draws exactly; `verify` passes random ones.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Draft, Tree, Verification
from specdec_jax.sampling import distributions, keys

# The id of a tree's node that is no token; see `proposed`.
NO_TOKEN = -1


@base.value
class Decision:
  """A rule's verdict on a draft, given uniform draws.

  Attributes:
    num_accepted: int32 `[B]`.
    next_probs: float32 `[B, V]`, the distribution of the next token.
    accept_probs: float32 `[B, G]`, see `Verification`.
    path: int32 `[B, D]`, see `Verification`; None for a chain.
  """

  num_accepted: Array
  next_probs: Array
  accept_probs: Array
  path: Array | None = None


DecideFn = Callable[[Array, Draft, Array], Decision]


class Threshold(NamedTuple):
  """The uniform draw below which a token is accepted, as a fraction; 0 / 0 is
  1, since p covers q there and acceptance is certain."""

  numerator: Array
  denominator: Array

  def passes(self, uniforms: Array) -> Array:
    # Strict and undivided: a draw of 0 fails the threshold 0 / 1.
    is_below = uniforms * self.denominator < self.numerator
    return is_below | (self.denominator == 0)

  def value(self) -> Array:
    is_certain = self.denominator == 0
    divisor = jnp.where(is_certain, 1.0, self.denominator)
    return jnp.where(is_certain, 1.0, self.numerator / divisor)


def verify(
  decide: DecideFn, row_keys: Array, draft: Draft, target_probs: Array
) -> Verification:
  """Calls `decide` with random draws, then draws the next token.

  `decide` is `(uniforms[B, G], draft, target_probs) -> Decision`; all else is
  as in `base.VerifyFn`. The two kinds of draws have separate streams: a draw
  known to have accepted or rejected is no longer uniform.
  """
  accept_keys, next_keys = split_by_purpose(row_keys)
  uniforms = distributions.uniforms(accept_keys, draft.tokens.shape[1])
  decision = decide(uniforms, draft, target_probs)
  return Verification(
    num_accepted=decision.num_accepted,
    next_token=distributions.sample(next_keys, decision.next_probs),
    accept_probs=decision.accept_probs,
    uniforms=uniforms,
    path=decision.path,
  )


def proposed(draft: Draft, vocab_size: int, *, is_tree: bool = False) -> Draft:
  """Returns a draft in which only what a drafter may propose counts.

  Lengths are cut to 0 .. G. A chain ends before its first id that is no token,
  0 to V - 1, such as a copier's padding of -1: what follows is decoded as if it
  were not proposed. In a tree such ids become `NO_TOKEN`, and rules for trees
  accept neither these nodes nor those below.
  """
  is_token = (draft.tokens >= 0) & (draft.tokens < vocab_size)
  gamma = draft.tokens.shape[1]
  most = gamma if is_tree else arrays.count_leading(is_token)
  return dataclasses.replace(
    draft,
    # [5, -1, 7] with length 9: [5, 0, 7] with length 1.
    tokens=jnp.where(is_token, draft.tokens, NO_TOKEN if is_tree else 0),
    lengths=jnp.clip(draft.lengths, 0, most),
  )


def split_by_purpose(row_keys: Array) -> tuple[Array, Array]:
  """Splits keys `[B]` into those for acceptance and those for the next token,
  `[B]` each."""
  accept_keys, next_keys = keys.split(row_keys, 2)
  return accept_keys, next_keys


def check_nodes(draft: Draft, tree: Tree) -> None:
  """Raises ValueError unless a draft has all nodes of a tree, or none."""
  if draft.tokens.shape[1] not in (0, len(tree.parents)):
    raise ValueError(
      f'a draft of {draft.tokens.shape[1]} tokens, and the rule is for a tree '
      f'of {len(tree.parents)} nodes'
    )


def probs_at(probs: Array, positions: Array) -> Array:
  """Picks `probs[b, positions[b]]`: `[B, W, V]`, int32 `[B]` to `[B, V]`."""
  positions = jnp.clip(positions, 0, probs.shape[1] - 1)
  return jnp.take_along_axis(probs, positions[:, None, None], axis=1)[:, 0]


def drafted_probs(draft: Draft) -> Array:
  """Picks q of each drafted token, float32 `[B, G]`; 1 if q is one-hot."""
  if draft.probs is None:
    return jnp.ones(draft.tokens.shape, jnp.float32)
  return arrays.pick(draft.probs, draft.tokens)


def subtract_draft(weights: Array, draft: Draft, positions: Array) -> Array:
  """Computes max(0, weights - q), q being the draft's at `positions[b]`.

  `weights`, in [0, 1], and the result are float32 `[B, V]`; `positions` are
  int32 `[B]`, 0 to G-1.
  """
  if draft.probs is not None:
    return jnp.maximum(weights - probs_at(draft.probs, positions), 0.0)
  # A one-hot q needs no [B, V] array, as no weight exceeds 1: [.5, .3, .2] less
  # [0, 1, 0] is [.5, 0, .2], the weights without the drafted token.
  tokens = arrays.read_block(draft.tokens, positions, 1)
  ids = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, :]
  return jnp.where(ids == tokens, 0.0, weights)
