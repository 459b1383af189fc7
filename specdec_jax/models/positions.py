"""Rotary position embedding (Su et al., arXiv 2104.09864)."""

import jax.numpy as jnp

from specdec_jax.base import Array


def rotate(x: Array, positions: Array, *, base: float) -> Array:
  """Rotates each head of `x` by its position, pairing halves as Llama does.

  Dimension i is paired with `i + D/2`, the layout of Hugging Face checkpoints;
  GGUF files interleave the pairs and are permuted when they are read.

  Args:
    x: `[B, H, T, D]`, D even.
    positions: int32 `[B, T]`.
    base: theta, the wavelength base (10,000 in Llama).

  Returns:
    `[B, H, T, D]`, in the dtype of `x`; angles are computed in float32.
  """
  half = x.shape[-1] // 2
  exponents = jnp.arange(half, dtype=jnp.float32) / half
  frequencies = jnp.power(jnp.float32(base), -exponents)
  angles = (
    positions.astype(jnp.float32)[:, None, :, None]
    * frequencies[None, None, None, :]
  )
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x.dtype)
