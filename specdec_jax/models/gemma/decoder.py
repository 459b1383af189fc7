"""Gemma 2 and Gemma 3, the text decoders.

Parameters are named as T5X names those of a decoder-only model. The cache is an
explicit argument and result. It keeps all positions, even those outside a
layer's window, so that rolling back is an assignment to its lengths.
"""

import functools

import flax.linen as nn

from specdec_jax.base import Array, Placement
from specdec_jax.models import attention, networks
from specdec_jax.models.gemma import layers
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.kv_cache import KVCache


class Decoder(nn.Module):
  """The decoder stack with its embeddings; `has_cross` tells whether it attends
  to an encoder."""

  config: GemmaConfig
  has_cross: bool = False

  def setup(self):
    config = self.config
    self.token_embedder = layers.embed(config)
    layer = networks.traced_once(self, layers.Layer)
    self.layers = [
      layer(config, window, self.has_cross)
      for window in attention.layer_windows(config)
    ]
    self.decoder_norm = layers.norm(config)

  def extend(
    self, tokens: Array, past: KVCache, placement: Placement | None = None
  ) -> tuple[Array, KVCache]:
    """Appends int32 `[B, T]` tokens, which continue the text unless `placement`
    says otherwise, and returns the input `[B, T, embed]` of `project`, and the
    cache."""
    crosses = past.crosses
    placement = attention.placed(
      past.lengths, tokens.shape[1], past.capacity, placement
    )
    # Only the inputs are scaled; the logits reuse the embeddings unscaled.
    x = layers.scaled(self.config, self.token_embedder(tokens))
    stack = (
      functools.partial(
        layer,
        positions=placement.positions,
        mask=attention.within(placement, layer.window).mask,
        cross=cross,
      )
      for layer, cross in zip(self.layers, crosses, strict=True)
    )
    x, cache = networks.through(self, stack, x, past)
    return self.decoder_norm(x), cache

  def project(self, x: Array) -> Array:
    """Projects `[B, T, embed]` to float32 logits `[B, T, V]`."""
    return layers.logits_of(self.token_embedder, x, self.config.logits_softcap)
