"""The layers of Gemma 2, Gemma 3 and T5Gemma, and their sizes.

Gemma Team, arXiv 2408.00118 and 2503.19786; Zhang et al., arXiv 2504.06225.
Every part of a layer has a norm before and one after it, feed-forwards are
gated by GELU, and some layers attend to a window of the text only.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.models import attention, kv_cache, llama
from specdec_jax.models.kv_cache import Cross, Entries
from specdec_jax.models.layers import (
  Dense,
  Embed,
  Mlp,
  by_head,
  inverse_root,
  parameter,
  query_key_value,
)
from specdec_jax.models.networks import Past
from specdec_jax.sharding import rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig:
  """Sizes of a Gemma 2 or 3, or of one stack of a T5Gemma. `LlamaConfig` has
  the other attributes.

  Attributes:
    query_pre_attn_scalar: attention scores are divided by its square root.
    attention_softcap: bounds scores, see `attention.softcapped`; 0 for none.
    logits_softcap: bounds logits likewise; 0 for none.
    rope_base: base of the rotary wavelengths in layers without a window.
    rope_factor: positions are divided by it in layers without a window.
    local_rope_base: base of the wavelengths in layers with a window.
    is_tied: whether the logits reuse the token embeddings; always true.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  query_pre_attn_scalar: int
  windows: tuple[int, ...]
  attention_softcap: float = 0.0
  logits_softcap: float = 0.0
  rope_base: float = 10_000.0
  rope_factor: float = 1.0
  local_rope_base: float = 10_000.0
  has_qk_norm: bool = False
  norm_epsilon: float = 1e-6
  max_positions: int = 8192
  is_tied: bool = True
  dtype: jnp.dtype = jnp.float32
  cache_dtype: jnp.dtype | None = None

  def __post_init__(self):
    attention.check_sizes(self)
    if not self.is_tied:
      raise ValueError('a Gemma has no logits of its own: set is_tied')
    if self.rope_factor <= 0:
      raise ValueError(f'rope_factor must be above 0, got {self.rope_factor}')


def normalized(x: Array, epsilon: float) -> Array:
  """Divides `[..., D]` by its root mean square, in float32."""
  x = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return x * inverse_root(mean_square + epsilon)


class Norm(nn.Module):
  """Root-mean-square norm, scaled by `offset + scale` in float32, then rounded.

  `scale` starts so that the factor is 1. With an offset of 1, as in Gemma 2 and
  3, weight decay pulls the factor towards 1; in Gemma 4 the offset is 0.
  """

  epsilon: float
  dtype: jnp.dtype
  offset: float = 1.0

  @nn.compact
  def __call__(self, x: Array) -> Array:
    initial = nn.initializers.constant(1.0 - self.offset)
    scale = parameter(self, 'scale', initial, (x.shape[-1],))
    factor = self.offset + scale.astype(jnp.float32)
    x = normalized(x, self.epsilon)
    factor = jnp.expand_dims(factor, tuple(range(x.ndim - 1)))
    return (x * factor).astype(self.dtype)


def norm(config: GemmaConfig, **name: Any) -> Norm:
  return Norm(config.norm_epsilon, config.dtype, **name)


def embed(config: Any, **name: Any) -> Embed:
  return Embed(config.vocab_size, config.embed_dim, config.dtype, **name)


def scaled(config: Any, embedded: Array) -> Array:
  """Scales embeddings `[B, T, embed]` by the root of their width, rounded to
  their dtype as in training."""
  scale = jnp.asarray(config.embed_dim**0.5, config.dtype)
  return embedded * scale


def logits_of(embedder: Embed, x: Array, softcap: float) -> Array:
  """Projects `[B, T, embed]` to float32 logits `[B, T, V]`, bounded by
  `softcap` unless it is 0."""
  # A softcap keeps the argmax but changes the distribution, so it comes
  # before temperature and limits.
  logits = embedder.attend(x)
  if softcap:
    logits = attention.softcapped(logits, softcap)
  return rules.constrain(logits, 'batch', 'length', 'vocab')


class SelfAttention(nn.Module):
  """Self-attention with rotary positions, within a window unless it is 0."""

  config: GemmaConfig
  window: int

  @nn.compact
  def __call__(
    self, x: Array, past: Past | None, positions: Array, mask: Array
  ) -> tuple[Array, Entries, Entries]:
    """Mixes `[B, T, embed]`, at int32 positions `[B or 1, T]`; also returns the
    keys and values attended to. See `Layer`."""
    config = self.config
    queries, keys, values = map(placed, query_key_value(self, x, config))
    if config.has_qk_norm:
      queries = norm(config, name='query_norm')(queries)
      keys = norm(config, name='key_norm')(keys)
    # Gemma 3: layers with a window have a smaller base, and those without were
    # extended to long contexts by dividing positions.
    base = config.local_rope_base if self.window else config.rope_base
    if not self.window:
      positions = positions.astype(jnp.float32) / config.rope_factor
    turn = functools.partial(llama.rotate, positions=positions, base=base)
    # The cache holds rotated keys, as an entry's position never changes.
    queries, keys = turn(queries), turn(keys)
    if past is not None:
      keys = kv_cache.append(past[0], keys, past[2])
      values = kv_cache.append(past[1], values, past[2])
    has_past = past is not None
    mixed = _attend(config, queries, keys, values, mask, used_only=has_past)
    return Dense(x.shape[-1], config.dtype, name='out')(mixed), keys, values


class CrossAttention(nn.Module):
  """Attention of a decoder layer to the encoder, without positions."""

  config: GemmaConfig

  def setup(self):
    config = self.config
    dense = functools.partial(Dense, dtype=config.dtype)
    self.query = dense(config.num_heads * config.head_dim)
    self.key = dense(config.num_kv_heads * config.head_dim)
    self.value = dense(config.num_kv_heads * config.head_dim)
    self.out = dense(config.embed_dim)

  def keys_values(self, encoded: Array) -> tuple[Array, Array]:
    """Projects the encoder's output `[B, E, embed]` to keys and values `[B, H,
    E, D]`; `embed` is the encoder's."""
    keys, values = self.key(encoded), self.value(encoded)
    return _by_head(self.config, keys), _by_head(self.config, values)

  def __call__(
    self, x: Array, keys: Entries, values: Entries, mask: Array
  ) -> Array:
    queries = _by_head(self.config, self.query(x))
    mixed = _attend(self.config, queries, keys, values, mask, used_only=True)
    return self.out(mixed)


class Layer(nn.Module):
  """One layer; each part f adds `post(f(pre(x)))` to the stream.

  Attributes:
    config: sizes of the stack.
    window: positions that the layer attends to, the last ones; 0 for all.
    has_cross: whether it also attends to an encoder.
  """

  config: GemmaConfig
  window: int
  has_cross: bool = False

  def setup(self):
    config = self.config
    self.pre_self_attention_layer_norm = norm(config)
    self.self_attention = SelfAttention(config, self.window)
    self.post_self_attention_layer_norm = norm(config)
    if self.has_cross:
      self.pre_cross_attention_layer_norm = norm(config)
      self.encoder_decoder_attention = CrossAttention(config)
      self.post_cross_attention_layer_norm = norm(config)
    self.pre_mlp_layer_norm = norm(config)
    self.mlp = Mlp(config.mlp_dim, ('gelu', 'linear'), config.dtype)
    self.post_mlp_layer_norm = norm(config)

  def __call__(
    self,
    x: Array,
    past: Past | None,
    positions: Array,
    mask: Array,
    cross: Cross | None = None,
  ) -> tuple[Array, Entries, Entries]:
    """Applies the layer.

    Args:
      x: the residual stream, `[B, T, embed]`.
      past: cached keys and values to append to; without, S = T.
      positions: int32 `[B or 1, T]`.
      mask: bool `[B, T or 1, S]`, with the window applied.
      cross: keys, values and mask of the encoder; None without one.

    Returns:
      The stream, and the keys and values attended to.
    """
    # Each part is normed before and after: x + post(f(pre(x))).
    h = self.pre_self_attention_layer_norm(x)
    h, keys, values = self.self_attention(h, past, positions, mask)
    x = x + self.post_self_attention_layer_norm(h)
    if cross is not None:
      h = self.pre_cross_attention_layer_norm(x)
      h = self.encoder_decoder_attention(h, *cross)
      x = x + self.post_cross_attention_layer_norm(h)
    h = self.mlp(self.pre_mlp_layer_norm(x))
    return x + self.post_mlp_layer_norm(h), keys, values


def _by_head(config: GemmaConfig, x: Array) -> Array:
  """Splits `[B, T, H * D]` into heads, `[B, H, T, D]`."""
  return placed(by_head(x, config.head_dim))


def placed(x: Array) -> Array:
  """Splits heads `[B, H, T, D]` over the devices."""
  return rules.constrain(x, 'batch', 'heads', 'length', 'kv')


def _attend(config: GemmaConfig, *inputs: Array, used_only: bool) -> Array:
  return attention.attend(
    *inputs,
    scale=config.query_pre_attn_scalar**-0.5,
    softcap=config.attention_softcap,
    used_only=used_only,
  )
