"""What the verification rules share: draws, then a decision, then a token.

A rule is its `decide` function, deterministic in the uniform draws that it is
handed. Tests integrate it over the draws exactly; `verify` feeds it random
ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax import arrays, base, distributions, keys
from specdec_jax.base import Array, Draft, Tree, Verification


@base.value
class Decision:
  """What a rule makes of a draft, given the uniform draws.

  Attributes:
    num_accepted: int32 `[B]`.
    next_probs: float32 `[B, V]`, the distribution of the token that follows.
    accept_probs: float32 `[B, G]`, see `Verification`.
    path: int32 `[B, D]`, see `Verification`; None for a chain.
  """

  num_accepted: Array
  next_probs: Array
  accept_probs: Array
  path: Array | None = None


DecideFn = Callable[[Array, Draft, Array], Decision]


class Threshold(NamedTuple):
  """The uniform draw below which a token is accepted, as a fraction. It is 1
  where both parts are 0: p covers q there, and acceptance is certain."""

  numerator: Array
  denominator: Array

  def passes(self, uniforms: Array) -> Array:
    is_below = uniforms * self.denominator < self.numerator
    return is_below | (self.denominator == 0)

  def value(self) -> Array:
    is_certain = self.denominator == 0
    divisor = jnp.where(is_certain, 1.0, self.denominator)
    return jnp.where(is_certain, 1.0, self.numerator / divisor)


def verify(
  decide: DecideFn, row_keys: Array, draft: Draft, target_probs: Array
) -> Verification:
  """Draws what `decide` needs, then the token after the accepted prefix.

  `decide` is `(uniforms[B, G], draft, target_probs) -> Decision`; the rest is
  as of a `base.VerifyFn`. Acceptance and the next token use separate streams: a
  draw that accepted or rejected says something about itself and must not be
  used again.
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


def split_by_purpose(row_keys: Array) -> tuple[Array, Array]:
  """Keys `[B]` for the acceptance draws, and keys `[B]` for the next token."""
  accept_keys, next_keys = keys.split(row_keys, 2)
  return accept_keys, next_keys


def check_nodes(draft: Draft, tree: Tree) -> None:
  """Raises ValueError unless a draft has all of a tree's nodes, or none."""
  if draft.tokens.shape[1] not in (0, len(tree.parents)):
    raise ValueError(
      f'a draft of {draft.tokens.shape[1]} tokens, and the rule is for a tree '
      f'of {len(tree.parents)} nodes'
    )


def probs_at(probs: Array, positions: Array) -> Array:
  """`probs[b, positions[b]]`: `[B, W, V]` and int32 `[B]` to `[B, V]`."""
  positions = jnp.clip(positions, 0, probs.shape[1] - 1)
  return jnp.take_along_axis(probs, positions[:, None, None], axis=1)[:, 0]


def drafted_probs(draft: Draft) -> Array:
  """q of each drafted token, float32 `[B, G]`; 1 where q is one-hot."""
  if draft.probs is None:
    return jnp.ones(draft.tokens.shape, jnp.float32)
  return arrays.pick(draft.probs, draft.tokens)


def subtract_draft(weights: Array, draft: Draft, positions: Array) -> Array:
  """max(0, weights - q), q being the draft's distribution at `positions[b]`.

  The one-hot distribution of a deterministic drafter is never materialised:
  since no weight exceeds 1, it just removes the drafted token.

  `weights` and what is returned are float32 `[B, V]`, weights within [0, 1];
  `positions` are int32 `[B]`, 0 to G-1.
  """
  if draft.probs is not None:
    return jnp.maximum(weights - probs_at(draft.probs, positions), 0.0)
  tokens = arrays.read_block(draft.tokens, positions, 1)
  ids = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, :]
  return jnp.where(ids == tokens, 0.0, weights)
