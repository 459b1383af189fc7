"""Features of a target's last call, stored in its cache for drafters."""

import dataclasses

import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays


@base.value
class FeatureCache:
  """A target's cache and the features, hidden states, of its last call.

  Attributes:
    target: the target's own cache.
    features: `[B, W, F]`, of the call's first W tokens; with a `Placement`, of
      all its tokens until `gather` leaves W of them.
    starts: int32 `[B]`, the position of the first feature; after the prefill
      that of the last token read, -1 if there was none.
    prompt: `[B, P-1, F]`, of all tokens of the prefill; None once the drafter
      has read them.
  """

  target: Arrays
  features: Array
  starts: Array
  prompt: Array | None

  @property
  def lengths(self) -> Array:
    lengths: Array = self.target.lengths
    return lengths

  @property
  def capacity(self) -> int:
    capacity: int = self.target.capacity
    return capacity


def of_last_read(cache: FeatureCache, lengths: Array) -> tuple[Array, Array]:
  """Returns the features `[B, F]` of the token before the pending one, the last
  that the target read, and whether they exist, bool `[B]`; `lengths` are the
  context's."""
  # A call from position 5 with 2 accepted: length 9, feature 9 - 2 - 5 = 2.
  offsets = lengths - 2 - cache.starts
  is_within = (offsets >= 0) & (offsets < cache.features.shape[1])
  features = arrays.read_block(cache.features, offsets, 1)[:, 0]
  return features, (cache.starts >= 0) & is_within


def gather(
  cache: FeatureCache, starts: Array, offsets: Array, *, width: int
) -> FeatureCache:
  """Reorders the features as `LanguageModel.gather` reorders the entries, and
  selects those of the W entries from `cache.starts` on.

  With the root's features at entry 7, so that `starts` is 8, and a path whose
  `offsets` are [1, 4], features 0, 2 and 5 become those of entries 7, 8, 9.
  """
  first = starts - cache.starts
  unmoved = arrays.block_positions(jnp.zeros_like(starts), width)
  num_moved = jnp.full_like(starts, offsets.shape[1])
  sources = arrays.write_block(
    unmoved, first[:, None] + offsets, first, num_moved
  )
  features = jnp.take_along_axis(
    cache.features, sources[..., None], axis=1, mode='clip'
  )
  return dataclasses.replace(cache, features=features)
