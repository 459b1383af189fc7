"""Gemma 2 and Gemma 3 (text): decoders alone.

Parameters are named as T5X names those of a decoder-only model. The cache is an
explicit argument and result. It keeps all positions, those that a window has
left behind too, so that rolling it back is an assignment to its lengths.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Placement, Prompt
from specdec_jax.models import attention, kv_cache
from specdec_jax.models.gemma import layers
from specdec_jax.models.gemma.layers import Cross, GemmaConfig
from specdec_jax.models.kv_cache import KVCache
from specdec_jax.models.layers import applied
from specdec_jax.sharding import rules


class Decoder(nn.Module):
  """The decoder stack, with its embeddings; `has_cross` for one that attends to
  an encoder."""

  config: GemmaConfig
  has_cross: bool = False

  def setup(self):
    config = self.config
    self.token_embedder = layers.embed(config)
    self.layers = [
      layers.Layer(
        config, attention.window_of(config.windows, i), self.has_cross
      )
      for i in range(config.num_layers)
    ]
    self.decoder_norm = layers.norm(config)

  def __call__(
    self,
    tokens: Array,
    past: KVCache,
    crosses: Sequence[Cross] = (),
    placement: Placement | None = None,
  ) -> tuple[Array, KVCache]:
    """Appends int32 `[B, T]`: the input `[B, T, embed]` of `project`, and the
    cache. `crosses` is what each layer knows of an encoder; tokens are a run of
    text unless they are placed otherwise."""
    num_tokens = tokens.shape[1]
    placement = attention.placed(
      past.lengths, num_tokens, past.capacity, placement
    )
    x = layers.scaled(self.config, self.token_embedder(tokens))
    keys, values = [], []
    for i, layer in enumerate(self.layers):
      x, layer_keys, layer_values = layer(
        x,
        (past.keys[i], past.values[i], past.lengths),
        placement.positions,
        attention.within(placement, layer.window).mask,
        crosses[i] if crosses else None,
      )
      keys.append(layer_keys)
      values.append(layer_values)
    lengths = past.lengths + num_tokens
    cache = KVCache(keys=tuple(keys), values=tuple(values), lengths=lengths)
    return self.decoder_norm(x), cache

  def project(self, x: Array) -> Array:
    """`[B, T, embed]` to float32 logits `[B, T, V]`."""
    logits = self.token_embedder.attend(x)
    if self.config.logits_softcap:
      logits = attention.softcapped(logits, self.config.logits_softcap)
    return rules.constrain(logits, 'batch', 'length', 'vocab')


def empty_cache(config: GemmaConfig, batch_size: int, capacity: int) -> KVCache:
  """An empty cache for `Decoder`."""
  shape = batch_size, config.num_kv_heads, capacity, config.head_dim
  return kv_cache.init(shape, num_layers=config.num_layers, dtype=config.dtype)


def init_params(config: GemmaConfig, rng_key: Array) -> Any:
  """Fresh float32 parameters."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  return Decoder(config).init(rng_key, tokens, empty_cache(config, 1, 1))[
    'params'
  ]


def language_model(config: GemmaConfig) -> LanguageModel:
  """A Gemma 2 or 3; its params are `{'token_embedder': ..., ...}`."""
  apply = applied(Decoder(config))

  def init(params, prompt: Prompt, max_len: int) -> KVCache:
    if prompt.encoder_tokens is not None:
      raise ValueError('a decoder-only model takes no encoder tokens')
    batch_size, prompt_len = prompt.decoder_tokens.shape
    cache = empty_cache(config, batch_size, max(max_len, prompt_len))
    if prompt_len > 1:
      _, cache = apply(params, prompt.decoder_tokens[:, :-1], cache)
    return kv_cache.rewind(cache, prompt.decoder_lengths - 1)

  def extend(
    params,
    tokens: Array,
    cache: KVCache,
    at: Array | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, KVCache]:
    x, cache = apply(params, tokens, cache, placement=placement)
    if at is not None:
      x = arrays.read_block(x, at, 1)
    return apply(params, x, method=Decoder.project), cache

  return LanguageModel(
    init, extend, kv_cache.rewind, config.vocab_size, kv_cache.gather_all
  )
