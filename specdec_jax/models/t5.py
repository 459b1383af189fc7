"""T5 1.0 and 1.1 encoder-decoders, and T5X's decoder-only language model.

Raffel et al., arXiv 1910.10683. Parameters have T5X's names and shapes
(`t5x/examples/t5` and `t5x/examples/decoder_only`), so that its checkpoints
load unchanged. Decoding differs: the cache is an explicit argument and result,
a call appends any number of tokens, each row has its own positions, and the
keys and values of cross-attention are computed once per decode.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax.base import Array, Placement
from specdec_jax.models import (
  attention,
  kv_cache,
  layers,
  networks,
  t5_layers,
)
from specdec_jax.models.drafting import draft_vocabulary
from specdec_jax.models.kv_cache import Cross, CrossCache, KVCache
from specdec_jax.models.layers import Dropout, Embed, RMSNorm
from specdec_jax.models.networks import MaybeCache
from specdec_jax.models.t5_layers import RelativePositionBias, T5Config
from specdec_jax.sharding import rules


class Encoder(nn.Module):
  """The encoder stack: embedded tokens `[B, E, embed]` to hidden states of the
  same shape."""

  config: T5Config

  @nn.compact
  def __call__(self, x: Array, mask: Array) -> Array:
    """Encodes `x` under `mask`, bool `[B or 1, E or 1, E]`, true where a token
    attends."""
    config = self.config
    drop = Dropout(config.dropout_rate)
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    bias = None
    if not config.has_layer_relpos:
      table = RelativePositionBias(
        config, is_bidirectional=True, name='relpos_bias'
      )
      bias = table(positions, positions)
    x = drop(x)
    for i in range(config.num_encoder_layers):
      layer = networks.traced_once(self, t5_layers.EncoderLayer)
      x = layer(config, name=f'layers_{i}')(x, mask, bias, positions)
    return drop(RMSNorm(dtype=config.dtype, name='encoder_norm')(x))


class Decoder(nn.Module):
  """The decoder stack, from token ids to the input of `T5.project`. It shares
  the encoder's token embeddings, `embed`, or has its own without an encoder."""

  config: T5Config
  embed: Embed | None = None

  def setup(self):
    config = self.config
    # In T5X's tree shared embeddings lie beside the encoder, not here.
    self.token_embedder = self.embed or _embed(config)
    if not config.has_layer_relpos:
      self.relpos_bias = RelativePositionBias(config, is_bidirectional=False)
    layer = networks.traced_once(self, t5_layers.DecoderLayer)
    self.layers = [layer(config) for _ in range(config.num_decoder_layers)]
    self.decoder_norm = RMSNorm(dtype=config.dtype)
    self.dropout = Dropout(config.dropout_rate)
    if not config.is_tied:
      self.logits_dense = layers.Dense(
        draft_vocabulary.num_logits(self, config.vocab_size)
      )

  def __call__(
    self,
    tokens: Array,
    placement: Placement,
    crosses: Iterable[Cross | None],
    past: MaybeCache,
  ) -> tuple[Array, MaybeCache]:
    """Runs the stack over T new tokens.

    Args:
      tokens: int32 `[B, T]`.
      placement: their positions and mask.
      crosses: each layer's keys, values and mask of the encoder, or None.
      past: the cache to append to; None if all tokens are new, as in training.

    Returns:
      `[B, T, embed]`, the input of `project`, and the cache.
    """
    bias = None
    if not self.config.has_layer_relpos:
      bias = self.relpos_bias(placement.positions, placement.key_positions)
    x = self.token_embedder(tokens)
    x = rules.constrain(x, 'batch', 'length', 'embed')
    stack = (
      functools.partial(layer, placement=placement, bias=bias, cross=cross)
      for layer, cross in zip(self.layers, crosses, strict=True)
    )
    x, cache = networks.through(self, stack, self.dropout(x), past)
    return self.dropout(self.decoder_norm(x)), cache


class T5(nn.Module):
  """The whole network; with `config.num_encoder_layers` 0 it has no encoder.

  Its methods are the steps of decoding; calling it is teacher forcing.
  """

  config: T5Config

  def setup(self):
    config = self.config
    if config.num_encoder_layers:
      self.token_embedder = _embed(config)
      self.encoder = Encoder(config)
      self.decoder = Decoder(config, self.token_embedder)
    else:
      self.decoder = Decoder(config)

  def encode(
    self, encoder_tokens: Array, segment_ids: Array | None = None
  ) -> Array:
    """Encodes int32 `[B, E]`, 0 where padded, to `[B, E, embed]`."""
    mask = (encoder_tokens > 0)[:, None, :]
    # Segments [1, 1, 2] are two packed examples: token 2 sees itself alone.
    if segment_ids is not None:
      mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return self.encoder(self.token_embedder(encoder_tokens), mask)

  def cross_cache(self, encoder_tokens: Array) -> CrossCache:
    """Encodes int32 `[B, E]`, 0 where padded, and computes each layer's keys
    and values of cross-attention."""
    encoded, is_token = self.encode(encoder_tokens), encoder_tokens > 0
    layers = self.decoder.layers
    return kv_cache.crossed(self.config, layers, encoded, is_token)

  def extend(
    self, tokens: Array, cache: KVCache, placement: Placement | None = None
  ) -> tuple[Array, KVCache]:
    """Appends int32 `[B, T]` tokens and returns the input `[B, T, embed]` of
    `project`, and the cache."""
    placement = attention.placed(
      cache.lengths, tokens.shape[1], cache.capacity, placement
    )
    return self.decoder(tokens, placement, cache.crosses, cache)

  def project(self, x: Array) -> Array:
    """Projects `[B, T, embed]` to float32 logits `[B, T, V]`."""
    decoder = self.decoder
    if self.config.is_tied:
      logits = decoder.token_embedder.attend(x)
      # As in Mesh TensorFlow: embeddings are initialised with a deviation of 1,
      # which would make logits too large.
      logits = logits * self.config.embed_dim**-0.5
    else:
      logits = decoder.logits_dense(x)
    return rules.constrain(logits, 'batch', 'length', 'vocab')

  def __call__(self, *args: Any, **options: Any) -> Array:
    """Computes teacher-forced logits, float32 `[B, T, V]`, as `hidden`."""
    return self.project(self.hidden(*args, **options))

  def hidden(
    self,
    encoder_tokens: Array | None,
    decoder_tokens: Array,
    *,
    encoder_segment_ids: Array | None = None,
    decoder_segment_ids: Array | None = None,
  ) -> Array:
    """Runs the network by teacher forcing up to the last projection.

    In training, it is applied with a random key named `dropout`.

    Args:
      encoder_tokens: int32 `[B, E]`, 0 where padded; None if decoder-only.
      decoder_tokens: int32 `[B, T]`, the targets shifted right.
      encoder_segment_ids: int32 `[B, E]`, the example that each token of a
        packed row belongs to; None if rows are not packed.
      decoder_segment_ids: int32 `[B, T]`, likewise.

    Returns:
      `[B, T, embed]`, the input of `project`.
    """
    num_tokens, ids = decoder_tokens.shape[1], decoder_segment_ids
    # One start for all rows: position and mask broadcast over the batch.
    start = jnp.zeros(1, jnp.int32)
    placement = attention.placed(start, num_tokens, num_tokens)
    if ids is not None:
      mask = placement.mask & (ids[:, :, None] == ids[:, None, :])
      placement = dataclasses.replace(placement, mask=mask)
    crosses: Iterable[Cross | None] = [None] * len(self.decoder.layers)
    if encoder_tokens is not None:
      encoded = self.encode(encoder_tokens, encoder_segment_ids)
      cross_mask = (encoder_tokens > 0)[:, None, :]
      if encoder_segment_ids is not None and ids is not None:
        is_same = ids[:, :, None] == encoder_segment_ids[:, None, :]
        cross_mask = cross_mask & is_same
      # A generator: each layer's keys and values are made when it is reached.
      crosses = (
        (*layer.encoder_decoder_attention.keys_values(encoded), cross_mask)
        for layer in self.decoder.layers
      )
    x, _ = self.decoder(decoder_tokens, placement, crosses, None)
    return x


def _embed(config: T5Config) -> Embed:
  return Embed(config.vocab_size, config.embed_dim, config.dtype)
