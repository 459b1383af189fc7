"""The layers of T5, and their sizes; `models.t5` stacks them."""

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.models import attention, kv_cache, positions
from specdec_jax.models.layers import Dense, Dropout, Mlp, RMSNorm
from specdec_jax.sharding import rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
  """Sizes of a T5.

  Attributes:
    vocab_size: V, the rows of the embedding; T5's 32,100 pieces are padded to
      32,128.
    embed_dim: width of the residual stream.
    num_encoder_layers: 0 for a decoder-only model.
    num_decoder_layers: decoder layers.
    num_heads: H, of every attention.
    head_dim: D, size of a head.
    mlp_dim: width of the feed-forward.
    mlp_activations: ('gelu', 'linear') in T5 1.1, ('relu',) in T5 1.0.
    is_tied: whether the logits reuse the embeddings, scaled by
      `1 / sqrt(embed_dim)`, as T5 1.0 does.
    relpos_num_buckets: columns of the relative-position table.
    relpos_max_distance: all distances from here on share a bucket.
    dropout_rate: in training.
    dtype: of activations and cache; norms and logits are float32.
    has_float32_scores: whether attention's scores and softmax are float32, too.
      T5X computes them in `dtype` by default, and only the same rounding gives
      its tokens in bfloat16.
  """

  vocab_size: int
  embed_dim: int
  num_encoder_layers: int
  num_decoder_layers: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...] = ('gelu', 'linear')
  is_tied: bool = False
  relpos_num_buckets: int = 32
  relpos_max_distance: int = 128
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32
  has_float32_scores: bool = True

  def __post_init__(self):
    for is_bidirectional in {False, self.num_encoder_layers > 0}:
      positions.check_buckets(
        self.relpos_num_buckets,
        self.relpos_max_distance,
        is_bidirectional=is_bidirectional,
      )


class Attention(nn.Module):
  """The four projections of an attention, used in two steps."""

  config: T5Config

  def setup(self):
    config = self.config
    width = config.num_heads * config.head_dim
    kernel_init = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')
    # T5 does not scale scores: the factor is in the initial query kernel.
    query_init = nn.initializers.variance_scaling(
      1.0 / config.head_dim, 'fan_in', 'normal'
    )
    dense = functools.partial(Dense, dtype=config.dtype)
    self.query = dense(width, kernel_init=query_init)
    self.key = dense(width, kernel_init=kernel_init)
    self.value = dense(width, kernel_init=kernel_init)
    self.out = dense(config.embed_dim, kernel_init=kernel_init)
    self.dropout = Dropout(config.dropout_rate)

  def keys_values(self, x: Array) -> tuple[Array, Array]:
    """Keys and values `[B, H, T, D]` of `[B, T, embed]`."""
    return self._by_head(self.key(x)), self._by_head(self.value(x))

  def __call__(
    self,
    x: Array,
    keys: Array,
    values: Array,
    mask: Array,
    bias: Array | None = None,
    *,
    is_training: bool = False,
  ) -> Array:
    """`[B, T, embed]` attends to `[B, H, S, D]`; see `attention.attend`."""
    dropout = functools.partial(self.dropout, is_training=is_training)
    mixed = attention.attend(
      self._by_head(self.query(x)),
      keys,
      values,
      mask,
      scale=1.0,
      bias=bias,
      dropout=dropout if is_training else None,
      score_dtype=(
        jnp.float32 if self.config.has_float32_scores else self.config.dtype
      ),
    )
    return self.out(mixed)

  def _by_head(self, x: Array) -> Array:
    shape = (*x.shape[:2], self.config.num_heads, self.config.head_dim)
    by_head = x.reshape(shape).transpose(0, 2, 1, 3)
    return rules.constrain(by_head, 'batch', 'heads', 'length', 'kv')


class EncoderLayer(nn.Module):
  """One pre-norm layer of the encoder."""

  config: T5Config

  @nn.compact
  def __call__(
    self, x: Array, mask: Array, bias: Array, *, is_training: bool
  ) -> Array:
    config = self.config
    drop = functools.partial(
      Dropout(config.dropout_rate), is_training=is_training
    )
    attend = Attention(config, name='attention')
    h = RMSNorm(dtype=config.dtype, name='pre_attention_layer_norm')(x)
    keys, values = attend.keys_values(h)
    x = x + drop(attend(h, keys, values, mask, bias, is_training=is_training))
    h = RMSNorm(dtype=config.dtype, name='pre_mlp_layer_norm')(x)
    h = _mlp(config)(h, is_training=is_training)
    return x + drop(h)


class DecoderLayer(nn.Module):
  """One pre-norm layer of the decoder."""

  config: T5Config

  def setup(self):
    config = self.config
    norm = functools.partial(RMSNorm, dtype=config.dtype)
    self.pre_self_attention_layer_norm = norm()
    self.self_attention = Attention(config)
    if config.num_encoder_layers:
      self.pre_cross_attention_layer_norm = norm()
      self.encoder_decoder_attention = Attention(config)
    self.pre_mlp_layer_norm = norm()
    self.mlp = _mlp(config, name=None)
    self.dropout = Dropout(config.dropout_rate)

  def cross_keys_values(self, encoded: Array) -> tuple[Array, Array]:
    """Keys and values `[B, H, E, D]` of the encoder's output."""
    return self.encoder_decoder_attention.keys_values(encoded)

  def __call__(
    self,
    x: Array,
    past: tuple[Array, Array, Array] | None,
    mask: Array,
    bias: Array,
    cross: tuple[Array, Array, Array] | None,
    *,
    is_training: bool = False,
  ) -> tuple[Array, Array, Array]:
    """Self-attention, cross-attention and feed-forward.

    Args:
      x: `[B, T, embed]`.
      past: cached keys and values `[B, H, S, D]` and the rows' lengths `[B]`,
        to which the new ones are appended; None for T tokens without a past.
      mask: bool `[B, T, S]`, or `[B, T, T]` without a past.
      bias: float32 `[B or 1, H, T, S]`, relative positions.
      cross: keys, values and mask `[B, T, E]` of the encoder, or None.
      is_training: whether to drop out.

    Returns:
      `[B, T, embed]`, and the keys and values that were attended to.
    """
    drop = functools.partial(self.dropout, is_training=is_training)
    h = self.pre_self_attention_layer_norm(x)
    keys, values = self.self_attention.keys_values(h)
    if past is not None:
      keys = kv_cache.append(past[0], keys, past[2])
      values = kv_cache.append(past[1], values, past[2])
    h = self.self_attention(
      h, keys, values, mask, bias, is_training=is_training
    )
    x = x + drop(h)
    if cross is not None:
      h = self.pre_cross_attention_layer_norm(x)
      h = self.encoder_decoder_attention(h, *cross, is_training=is_training)
      x = x + drop(h)
    h = self.mlp(self.pre_mlp_layer_norm(x), is_training=is_training)
    x = rules.constrain(x + drop(h), 'batch', 'length', 'embed')
    return x, keys, values


def _mlp(config: T5Config, name: str | None = 'mlp') -> Mlp:
  return Mlp(
    config.mlp_dim,
    config.mlp_activations,
    config.dtype,
    config.dropout_rate,
    name=name,
  )
