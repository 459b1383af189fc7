"""A Llama-type decoder that keeps its residual streams at all positions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import base
from specdec_jax.base import Array, LanguageModel, Placement, Prompt
from specdec_jax.models import kv_cache, llama
from specdec_jax.models.kv_cache import KVCache


@base.value
class RecordedCache:
  """A decoder's cache, and what passed through it.

  Attributes:
    decoder: the decoder's own.
    streams: uint16 `[B, 1, S, layers * embed]`, the bits of bfloat16, in the
      layout of a cache. CPUs write bits faster, see `kv_cache`.
  """

  decoder: KVCache
  streams: Array

  @property
  def lengths(self) -> Array:
    return self.decoder.lengths

  @property
  def capacity(self) -> int:
    return self.decoder.capacity


def recording(config: Any, layers: Sequence[int]) -> LanguageModel:
  """The decoder with a `RecordedCache`; its params and tokens are those of
  `llama.language_model`.

  Args:
    config: sizes of a family that `keeps_streams`.
    layers: whose inputs are kept, counted from 0; `num_layers` names the output
      of the last layer. ValueError for one that is not there.
  """
  check_layers(config, layers)
  apply = llama.with_streams(config, tuple(layers))

  def extend(
    params,
    tokens: Array,
    cache: RecordedCache,
    at: Array | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, RecordedCache]:
    logits, decoder, new = apply(params, tokens, cache.decoder, at, placement)
    bits = jax.lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16)
    streams = kv_cache.append(cache.streams, bits[:, None], cache.lengths)
    return logits, RecordedCache(decoder=decoder, streams=streams)

  def init(params, prompt: Prompt, max_len: int) -> RecordedCache:
    batch_size, prompt_len = prompt.decoder_tokens.shape
    shape = batch_size, config.num_kv_heads, max_len, config.head_dim
    width = len(layers) * config.embed_dim
    cache = RecordedCache(
      decoder=kv_cache.init(
        shape, num_layers=config.num_layers, dtype=config.dtype
      ),
      streams=jnp.zeros((batch_size, 1, max_len, width), jnp.uint16),
    )
    if prompt_len > 1:
      _, cache = extend(params, prompt.decoder_tokens[:, :-1], cache)
    return rewind(cache, prompt.decoder_lengths - 1)

  def rewind(cache: RecordedCache, lengths: Array) -> RecordedCache:
    return dataclasses.replace(
      cache, decoder=kv_cache.rewind(cache.decoder, lengths)
    )

  def gather(
    cache: RecordedCache, starts: Array, offsets: Array, span: int
  ) -> RecordedCache:
    return RecordedCache(
      decoder=kv_cache.gather_all(cache.decoder, starts, offsets, span),
      streams=kv_cache.gather(cache.streams, starts, offsets, span),
    )

  return LanguageModel(init, extend, rewind, config.vocab_size, gather)


def check_layers(config: Any, layers: Sequence[int]) -> None:
  """Raises ValueError unless the decoder has these layers."""
  for layer in layers:
    if not 1 <= layer <= config.num_layers:
      raise ValueError(
        f'layer {layer} is not one of 1 to {config.num_layers}, whose residual '
        'streams can be kept'
      )
