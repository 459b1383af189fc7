"""T5Gemma: an encoder and a decoder of Gemma 2's layers.

Zhang et al., arXiv 2504.06225. Windows of the encoder look both ways. The
decoder attends to the encoder between its own text and the feed-forward, whose
keys and values are computed once per decode. Each stack has embeddings.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Placement, Prompt
from specdec_jax.models import attention
from specdec_jax.models.gemma import layers
from specdec_jax.models.gemma.decoder import Decoder, empty_cache
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.layers import applied
from specdec_jax.models.t5 import T5Cache, gather, rewind


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5GemmaConfig:
  """Sizes of a T5Gemma.

  Those that begin with `encoder_` are the encoder's, whose counterparts are the
  decoder's; the others are of both. See `GemmaConfig`. A window of W positions
  has W - 1 before a token of the decoder, and W to either side in the encoder.
  """

  vocab_size: int
  encoder_embed_dim: int
  num_encoder_layers: int
  encoder_num_heads: int
  encoder_num_kv_heads: int
  encoder_mlp_dim: int
  embed_dim: int
  num_decoder_layers: int
  num_heads: int
  num_kv_heads: int
  mlp_dim: int
  head_dim: int
  query_pre_attn_scalar: int
  windows: tuple[int, ...] = (4096, 0)
  attention_softcap: float = 50.0
  logits_softcap: float = 30.0
  rope_base: float = 10_000.0
  norm_epsilon: float = 1e-6
  max_positions: int = 8192
  is_tied: bool = True
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    # They raise ValueError for sizes that do not fit together.
    encoder_of(self), decoder_of(self)


_SHARED = (
  *('vocab_size', 'head_dim', 'query_pre_attn_scalar', 'windows', 'dtype'),
  *('attention_softcap', 'logits_softcap', 'rope_base', 'norm_epsilon'),
  *('max_positions', 'is_tied'),
)
_OF_EACH = ('embed_dim', 'num_heads', 'num_kv_heads', 'mlp_dim')


def encoder_of(config: T5GemmaConfig) -> GemmaConfig:
  """The sizes of the encoder."""
  own = {name: getattr(config, f'encoder_{name}') for name in _OF_EACH}
  return _stack(config, num_layers=config.num_encoder_layers, **own)


def decoder_of(config: T5GemmaConfig) -> GemmaConfig:
  """The sizes of the decoder."""
  own = {name: getattr(config, name) for name in _OF_EACH}
  return _stack(config, num_layers=config.num_decoder_layers, **own)


def _stack(config: T5GemmaConfig, **own: Any) -> GemmaConfig:
  shared = {name: getattr(config, name) for name in _SHARED}
  return GemmaConfig(local_rope_base=config.rope_base, **shared, **own)


class Encoder(nn.Module):
  """int32 `[B, E]`, 0 where padded, to `[B, E, embed]`."""

  config: GemmaConfig

  @nn.compact
  def __call__(self, tokens: Array) -> Array:
    config = self.config
    embed = layers.embed(config, name='token_embedder')
    x = layers.scaled(config, embed(tokens))
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    distances = jnp.abs(positions[:, :, None] - positions[:, None, :])
    is_token = (tokens > 0)[:, None, :]
    for i in range(config.num_layers):
      window = attention.window_of(config.windows, i)
      mask = is_token & (distances <= window) if window else is_token
      layer = layers.Layer(config, window, name=f'layers_{i}')
      x, _, _ = layer(x, None, positions, mask)
    return layers.norm(config, name='encoder_norm')(x)


class T5Gemma(nn.Module):
  """The whole network; its methods are the steps of decoding."""

  config: T5GemmaConfig

  def setup(self):
    self.encoder = Encoder(encoder_of(self.config))
    self.decoder = Decoder(decoder_of(self.config), has_cross=True)

  def cross_keys_values(
    self, encoder_tokens: Array
  ) -> list[tuple[Array, Array]]:
    """Keys and values of the encoder's output, `[B, H, E, D]` for each layer of
    the decoder."""
    encoded = self.encoder(encoder_tokens)
    return [
      layer.encoder_decoder_attention.keys_values(encoded)
      for layer in self.decoder.layers
    ]

  def extend(
    self, tokens: Array, cache: T5Cache, placement: Placement | None = None
  ) -> tuple[Array, T5Cache]:
    """Appends int32 `[B, T]`; the input `[B, T, embed]` of `project`, and the
    cache."""
    assert cache.encoder_mask is not None
    mask = cache.encoder_mask[:, None]
    pairs = zip(cache.cross_keys, cache.cross_values, strict=True)
    crosses = [(*pair, mask) for pair in pairs]
    x, decoder = self.decoder(tokens, cache.decoder, crosses, placement)
    return x, dataclasses.replace(cache, decoder=decoder)

  def project(self, x: Array) -> Array:
    """`[B, T, embed]` to float32 logits `[B, T, V]`."""
    return self.decoder.project(x)

  def __call__(self, encoder_tokens: Array, tokens: Array) -> Array:
    """Logits of int32 `[B, T]` after an encoder's `[B, E]`."""
    cache = self.empty_cache(encoder_tokens, tokens.shape[1])
    x, _ = self.extend(tokens, cache)
    return self.project(x)

  def empty_cache(self, encoder_tokens: Array, capacity: int) -> T5Cache:
    """No tokens after an encoder's int32 `[B, E]`."""
    pairs = self.cross_keys_values(encoder_tokens)
    batch_size = encoder_tokens.shape[0]
    return T5Cache(
      decoder=empty_cache(decoder_of(self.config), batch_size, capacity),
      cross_keys=tuple(keys for keys, _ in pairs),
      cross_values=tuple(values for _, values in pairs),
      encoder_mask=encoder_tokens > 0,
    )


def init_params(config: T5GemmaConfig, rng_key: Array) -> Any:
  """Fresh float32 parameters."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  return T5Gemma(config).init(rng_key, tokens, tokens)['params']


def language_model(config: T5GemmaConfig) -> LanguageModel:
  """A T5Gemma; its params are `{'encoder': ..., 'decoder': ...}`.

  The encoder's padding is id 0; the decoder begins with the start of text, 2.
  """
  apply = applied(T5Gemma(config))

  def init(params, prompt: Prompt, max_len: int) -> T5Cache:
    if prompt.encoder_tokens is None:
      raise ValueError('an encoder-decoder needs encoder tokens')
    prompt_len = prompt.decoder_tokens.shape[1]
    cache = apply(
      params,
      prompt.encoder_tokens,
      max(max_len, prompt_len),
      method=T5Gemma.empty_cache,
    )
    if prompt_len > 1:
      tokens = prompt.decoder_tokens[:, :-1]
      _, cache = apply(params, tokens, cache, method=T5Gemma.extend)
    return rewind(cache, prompt.decoder_lengths - 1)

  def extend(
    params,
    tokens: Array,
    cache: T5Cache,
    at: Array | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, T5Cache]:
    x, cache = apply(params, tokens, cache, placement, method=T5Gemma.extend)
    if at is not None:
      x = arrays.read_block(x, at, 1)
    return apply(params, x, method=T5Gemma.project), cache

  return LanguageModel(init, extend, rewind, config.vocab_size, gather)
