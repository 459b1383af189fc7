"""How attention learns of positions: Llama's rotations, T5's biases.

Rotary embedding: Su et al., arXiv 2104.09864. Relative-position bias: Raffel et
al., arXiv 1910.10683, Sec. 2.1: every stack has one table of biases by head and
bucket; a bucket is a range of distances between query and key. The bucket of a
distance is computed once, in numpy on the host, so that no device's rounding of
a logarithm can move a distance across a boundary.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

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


def check_buckets(
  num_buckets: int, max_distance: int, *, is_bidirectional: bool
) -> None:
  """Raises ValueError if there are too few buckets, or they reach beyond the
  distance; see `buckets_by_distance`."""
  num_exact = num_buckets // (4 if is_bidirectional else 2)
  if not 1 <= num_exact < max_distance:
    raise ValueError(
      f'{num_buckets} buckets of relative positions do not fit distances up to '
      f'{max_distance}: there are at least 4, and half as many distances'
    )


def buckets_by_distance(
  num_buckets: int, max_distance: int, *, is_bidirectional: bool
) -> np.ndarray:
  """The bucket of every distance that has one of its own.

  Half of the buckets are exact distances, the others grow logarithmically up to
  `max_distance`; all distances beyond share the last one. Bidirectional stacks
  keep one half for keys before the query and one for keys after it.

  Returns:
    int32 `[max_distance + 1]` for a causal stack, by `query - key`; for a
    bidirectional one `[2 * max_distance + 1]`, by `key - query + max_distance`.

  Raises:
    ValueError: if there are too few buckets, or they reach beyond the distance.
  """
  check_buckets(num_buckets, max_distance, is_bidirectional=is_bidirectional)
  one_sided = num_buckets // 2 if is_bidirectional else num_buckets
  num_exact = one_sided // 2
  distances = np.arange(max_distance + 1)
  # float32, as T5X and Hugging Face compute it; the epsilon keeps distances
  # that lie on a boundary in the upper bucket.
  ratios = np.maximum(distances, 1).astype(np.float32) / np.float32(num_exact)
  logs = np.log(ratios + np.finfo(np.float32).eps)
  scale = np.float32((one_sided - num_exact) / np.log(max_distance / num_exact))
  large = num_exact + (logs * scale).astype(np.int32)
  buckets = np.where(
    distances < num_exact, distances, np.minimum(large, one_sided - 1)
  ).astype(np.int32)
  if not is_bidirectional:
    return buckets
  before, after = buckets[:0:-1], buckets[1:] + one_sided
  return np.concatenate([before, buckets[:1], after]).astype(np.int32)


class RelativePositionBias(nn.Module):
  """Biases of attention scores by head and distance, shared by the layers.

  Attributes:
    num_heads: H.
    num_buckets: columns of the table.
    max_distance: all distances from here on share a bucket.
    is_bidirectional: for encoders.
  """

  num_heads: int
  num_buckets: int
  max_distance: int
  is_bidirectional: bool

  @nn.compact
  def __call__(self, query_positions: Array, key_positions: Array) -> Array:
    """int32 `[B, T]` and `[B, S]` to float32 `[B, H, T, S]`."""
    table = self.param(
      'rel_embedding',
      nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'),
      (self.num_heads, self.num_buckets),
    )
    buckets = buckets_by_distance(
      self.num_buckets,
      self.max_distance,
      is_bidirectional=self.is_bidirectional,
    )
    by_distance = jnp.take(table.astype(jnp.float32), buckets, axis=1)
    distances = key_positions[:, None, :] - query_positions[:, :, None]
    if self.is_bidirectional:
      distances = jnp.clip(distances, -self.max_distance, self.max_distance)
      distances = distances + self.max_distance
    else:
      distances = jnp.clip(-distances, 0, self.max_distance)
    biases = jnp.take(by_distance, distances, axis=1, mode='clip')
    return jnp.moveaxis(biases, 0, 1)
