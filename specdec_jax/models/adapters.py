"""Networks as the functions that decoding calls: `LanguageModel`s, and the
`BlockModel` of a Spec-Drafter."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Prompt
from specdec_jax.drafters.spec_drafter import BlockModel
from specdec_jax.models import kv_cache
from specdec_jax.models.block_decoder import (
  BlockDecoder,
  BlockDecoderConfig,
  BlockMemory,
)
from specdec_jax.models.kv_cache import KVCache
from specdec_jax.models.llama import Llama, LlamaConfig
from specdec_jax.models.t5 import T5, T5Cache, T5Config


def of(config: LlamaConfig | T5Config) -> LanguageModel:
  """The language model of these sizes, by their type."""
  return t5(config) if isinstance(config, T5Config) else llama(config)


def with_logits_of(model: LanguageModel, vocab_size: int) -> LanguageModel:
  """The same model with logits `[..., vocab_size]`, cut or filled with -inf.

  Models of one family share a vocabulary and pad their embeddings differently.
  A draft model's logits are brought to the size of its target's; what is cut or
  filled is padding, which has no probability (invariant 10).
  """
  num_missing = vocab_size - model.vocab_size
  if not num_missing:
    return model

  def extend(
    params, tokens: Array, cache: Any, at: Array | None = None
  ) -> tuple[Array, Any]:
    logits, cache = model.extend(params, tokens, cache, at)
    if num_missing < 0:
      return logits[..., :vocab_size], cache
    padding = ((0, 0), (0, 0), (0, num_missing))
    return jnp.pad(logits, padding, constant_values=-jnp.inf), cache

  return model._replace(extend=extend, vocab_size=vocab_size)


def llama(config: LlamaConfig) -> LanguageModel:
  """A Llama-type decoder; its params are `{'token_embedder': ..., ...}`."""
  network = Llama(config)

  def init(params, prompt: Prompt, max_len: int) -> KVCache:
    if prompt.encoder_tokens is not None:
      raise ValueError('a decoder-only model takes no encoder tokens')
    batch_size, prompt_len = prompt.decoder_tokens.shape
    cache = kv_cache.init(
      batch_size=batch_size,
      num_layers=config.num_layers,
      num_heads=config.num_kv_heads,
      capacity=max(max_len, prompt_len),
      head_dim=config.head_dim,
      dtype=config.dtype,
    )
    if prompt_len > 1:
      # The logits of the prompt are never read, so the compiler drops them.
      _, cache = extend(params, prompt.decoder_tokens[:, :-1], cache)
    return rewind(cache, prompt.decoder_lengths - 1)

  def extend(
    params, tokens: Array, cache: KVCache, at: Array | None = None
  ) -> tuple[Array, KVCache]:
    result: Any = network.apply({'params': params}, tokens, cache, at)
    return result

  def rewind(cache: KVCache, lengths: Array) -> KVCache:
    return kv_cache.rewind(cache, lengths.astype(jnp.int32))

  return LanguageModel(init, extend, rewind, config.vocab_size)


def t5(config: T5Config) -> LanguageModel:
  """A T5, with or without an encoder; its params are T5X's tree.

  The encoder's padding is id 0. A decoder-only model takes its whole prompt as
  decoder tokens, an encoder-decoder its start token (0 in T5).
  """
  network = T5(config)

  def apply(params, *args, method) -> Any:
    return network.apply({'params': params}, *args, method=method)

  def init(params, prompt: Prompt, max_len: int) -> T5Cache:
    encoder_tokens = prompt.encoder_tokens
    if (encoder_tokens is None) == bool(config.num_encoder_layers):
      raise ValueError(
        'an encoder-decoder needs encoder tokens'
        if config.num_encoder_layers
        else 'a decoder-only model takes no encoder tokens'
      )
    batch_size, prompt_len = prompt.decoder_tokens.shape
    cross: tuple[Any, Any] = ((), ())
    if encoder_tokens is not None:
      encoded = apply(params, encoder_tokens, method=T5.encode)
      cross = apply(params, encoded, method=T5.cross_keys_values)
    cache = T5Cache(
      decoder=kv_cache.init(
        batch_size=batch_size,
        num_layers=config.num_decoder_layers,
        num_heads=config.num_heads,
        capacity=max(max_len, prompt_len),
        head_dim=config.head_dim,
        dtype=config.dtype,
      ),
      cross_keys=cross[0],
      cross_values=cross[1],
      encoder_mask=None if encoder_tokens is None else encoder_tokens > 0,
    )
    if prompt_len > 1:
      _, cache = extend(params, prompt.decoder_tokens[:, :-1], cache)
    return rewind(cache, prompt.decoder_lengths - 1)

  def extend(
    params, tokens: Array, cache: T5Cache, at: Array | None = None
  ) -> tuple[Array, T5Cache]:
    return apply(params, tokens, cache, at, method=T5.extend)

  def rewind(cache: T5Cache, lengths: Array) -> T5Cache:
    decoder = kv_cache.rewind(cache.decoder, lengths.astype(jnp.int32))
    return dataclasses.replace(cache, decoder=decoder)

  return LanguageModel(init, extend, rewind, config.vocab_size)


def block_decoder(config: BlockDecoderConfig) -> BlockModel:
  """The network of a Spec-Drafter; its params are those of `BlockDecoder`.

  Room is made for as many positions as the network has, at most: a decode whose
  longest text and block need more raises ValueError when it is traced.
  """
  network = BlockDecoder(config)

  def init(params, encoder_tokens: Array, num_positions: int) -> BlockMemory:
    result: Any = network.apply(
      {'params': params},
      encoder_tokens,
      min(num_positions, config.max_positions),
      method=BlockDecoder.encode,
    )
    return result

  def predict(
    params, tokens: Array, lengths: Array, memory: BlockMemory, width: int
  ) -> Array:
    result: Any = network.apply(
      {'params': params},
      tokens,
      arrays.is_within(lengths, tokens.shape[1]),
      lengths,
      memory,
      width=width,
      method=BlockDecoder.predict,
    )
    return result

  return BlockModel(init, predict, config.vocab_size)
