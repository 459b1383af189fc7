"""Operations on two distributions over the vocabulary, p of the target and q of
the drafter (Leviathan et al., Sec. 2.3 and 3.1)."""

import jax
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.sampling import keys

# Tokens whose sum is cumulated as one; a TPU's vectors are as wide.
_BLOCK = 128


def normalize(weights: Array, fallback: Array) -> Array:
  """Scales weights to sum to one, float32 `[..., V]`.

  Args:
    weights: float32 `[..., V]`, none negative.
    fallback: float32 `[..., V]`, normalised: what rows without mass become.
  """
  mass = jnp.sum(weights, axis=-1, keepdims=True)
  # `mass != 0`, not `mass > 0`: a NaN must stay one, to be seen and reported.
  has_mass = mass != 0
  return jnp.where(has_mass, weights / jnp.where(has_mass, mass, 1.0), fallback)


def residual(p: Array, q: Array) -> Array:
  """Computes norm(max(0, p - q)), of which corrections are drawn; p if it is 0.

  All are float32 `[..., V]`. The residual is 0 only if p and q agree up to
  rounding, so the fallback is nearly exact.
  """
  return normalize(jnp.maximum(p - q, 0.0), p)  # [.6, .4], [.9, .1]: [0, 1]


def overlap(p: Array, q: Array) -> Array:
  """Computes beta, the mass that p and q share, sum_x min(p(x), q(x)) (Sec.
  3.1): 1 less their total variation; `[..., V]` to `[...]`."""
  return jnp.sum(jnp.minimum(p, q), axis=-1)  # [.6, .4], [.9, .1]: .7


def sample(row_keys: Array, probs: Array) -> Array:
  """Draws one token per row, int32 `[B]`, by each row's own key.

  Two draws invert the cumulative distribution, over blocks of tokens and then
  within one, each with all the bits of a float32 draw. Gumbel noise would take
  V draws, most of the time of a small model's step.

  Args:
    row_keys: `[B]`, of any kind; each is used up.
    probs: float32 `[B, V]`; a token of probability zero is never drawn.
  """
  draws = uniforms(row_keys, 2)
  width = min(_BLOCK, probs.shape[-1])
  padded = jnp.pad(probs, ((0, 0), (0, -probs.shape[-1] % width)))
  blocks = padded.reshape(probs.shape[0], -1, width)
  block = _invert(draws[:, 0], jnp.sum(blocks, axis=-1))
  within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return block * width + _invert(draws[:, 1], within)  # block 2, entry 5: 261


def _invert(draws: Array, weights: Array) -> Array:
  """Finds the index `[B]` at which cumulated `weights` pass `draws[b]` of their
  sum; that of the largest weight if none does because of rounding."""
  cumulated = jnp.cumsum(weights, axis=-1)
  is_found = (cumulated > draws[:, None] * cumulated[:, -1:]) & (weights > 0)
  index = jnp.argmax(is_found, axis=-1)  # [1, 0, 3], draw .5: 1 1 4 > 2: 2
  largest = jnp.argmax(weights, axis=-1)
  index = jnp.where(jnp.any(is_found, axis=-1), index, largest)
  return index.astype(jnp.int32)


def uniforms(row_keys: Array, count: int) -> Array:
  """Draws float32 `[B, count]` from [0, 1), each row by its own key."""
  draw_fn = lambda key: jax.random.uniform(key, (count,), jnp.float32)
  return keys.draw(draw_fn, row_keys)
