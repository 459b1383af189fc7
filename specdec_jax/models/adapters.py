"""Networks as `LanguageModel`s: the three functions that decoding calls."""

from typing import Any

import jax.numpy as jnp

from specdec_jax.base import Array, LanguageModel, Prompt
from specdec_jax.models import kv_cache
from specdec_jax.models.kv_cache import KVCache
from specdec_jax.models.llama import Llama, LlamaConfig


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

  def extend(params, tokens: Array, cache: KVCache) -> tuple[Array, KVCache]:
    result: Any = network.apply({'params': params}, tokens, cache)
    return result

  def rewind(cache: KVCache, lengths: Array) -> KVCache:
    return kv_cache.rewind(cache, lengths.astype(jnp.int32))

  return LanguageModel(init, extend, rewind, config.vocab_size)
