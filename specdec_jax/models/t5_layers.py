"""The layers of T5 and its sizes; `models.t5` stacks the layers."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array, Placement
from specdec_jax.models import attention, kv_cache
from specdec_jax.models.kv_cache import Cross, Entries
from specdec_jax.models.layers import (
  Dense,
  Dropout,
  Mlp,
  RMSNorm,
  by_head,
  parameter,
)
from specdec_jax.models.networks import Past
from specdec_jax.models.products import PROJECTIONS, joint_name
from specdec_jax.sharding import rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
  """Sizes of a T5.

  Attributes:
    vocab_size: V, rows of the embedding; T5's 32,100 pieces are padded to
      32,128.
    embed_dim: width of the residual stream.
    num_encoder_layers: 0 for a decoder-only model.
    num_heads: H, heads of every attention, each of width `head_dim`, D.
    mlp_dim: width of the feed-forward.
    mlp_activations: ('gelu', 'linear') in T5 1.1, ('relu',) in T5 1.0.
    is_tied: whether the logits reuse the embeddings, scaled by
      `1 / sqrt(embed_dim)`, as T5 1.0 does.
    relpos_num_buckets: columns of the relative-position table.
    relpos_max_distance: all distances from here on share a bucket.
    has_layer_relpos: whether each layer has its own table, as in T5X's
      scalable_t5 and in umT5.
    dtype: of activations and cache; norms and logits are float32.
    has_float32_scores: whether attention's scores and softmax are float32 too.
      T5X computes them in `dtype` by default; only the same rounding reproduces
      its tokens in bfloat16.
    cache_dtype: int8 for keys and values as `kv_cache.Packed`, or None.
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
  has_layer_relpos: bool = False
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32
  has_float32_scores: bool = True
  cache_dtype: jnp.dtype | None = None

  def __post_init__(self):
    # An encoder uses half of the buckets for each side, and half of those for
    # exact distances: of 32 buckets 8.
    fewest = self.relpos_num_buckets // (4 if self.num_encoder_layers else 2)
    most = self.relpos_num_buckets // 2
    if fewest < 1 or most >= self.relpos_max_distance:
      raise ValueError(
        f'{self.relpos_num_buckets} buckets of relative positions, at least 4, '
        f'do not fit distances up to {self.relpos_max_distance}: give fewer '
        'buckets, or a larger relpos_max_distance'
      )


def buckets_by_distance(
  num_buckets: int, max_distance: int, *, is_bidirectional: bool
) -> np.ndarray:
  """Tabulates the relative-position bucket of every distance, int32.

  Returns `[max_distance + 1]` by `query - key` for a causal stack, and `[2 *
  max_distance + 1]` by `key - query + max_distance` for a bidirectional one.
  All greater distances share the last bucket.
  """
  # Half of the buckets have one distance each, the others grow logarithmically
  # up to `max_distance`. Bidirectional stacks use half of all buckets for keys
  # before the query and half for keys after it: of 32 buckets, 0 to 7 to either
  # side have one each, and 8 to 128 share 8, of which one holds 31, 32 and 33.
  one_sided = num_buckets // 2 if is_bidirectional else num_buckets
  num_exact = one_sided // 2
  # In numpy, so that no device's logarithm moves a distance over a boundary.
  distances = np.arange(max_distance + 1)
  # float32, as T5X and Hugging Face compute it; the epsilon keeps distances
  # that lie on a boundary in the upper bucket.
  ratios = np.maximum(distances, 1).astype(np.float32) / np.float32(num_exact)
  logs = np.log(ratios + np.finfo(np.float32).eps)
  scale = np.float32((one_sided - num_exact) / np.log(max_distance / num_exact))
  large = num_exact + (logs * scale).astype(np.int32)
  buckets = np.where(
    distances < num_exact, distances, np.minimum(large, one_sided - 1)
  ).astype(np.int32)
  if not is_bidirectional:
    return buckets
  # Distances -2 to 2, of buckets [0, 1, 2] to one side: [2, 1, 0, n+1, n+2].
  before, after = buckets[:0:-1], buckets[1:] + one_sided
  return np.concatenate([before, buckets[:1], after]).astype(np.int32)


class RelativePositionBias(nn.Module):
  """Attention biases by head and relative position; all layers share one table
  unless each has its own."""

  config: T5Config
  is_bidirectional: bool

  @nn.compact
  def __call__(self, query_positions: Array, key_positions: Array) -> Array:
    """Computes biases float32 `[B, H, T, S]` from int32 positions."""
    num_buckets = self.config.relpos_num_buckets
    limit = self.config.relpos_max_distance
    table = parameter(
      self,
      'rel_embedding',
      nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'),
      (self.config.num_heads, num_buckets),
    )
    buckets = buckets_by_distance(
      num_buckets, limit, is_bidirectional=self.is_bidirectional
    )
    # Two look-ups, the first of them small: the bias of each distance, then the
    # distance of each pair of positions.
    by_distance = jnp.take(table.astype(jnp.float32), buckets, axis=1)
    distances = key_positions[:, None, :] - query_positions[:, :, None]
    if self.is_bidirectional:
      distances = jnp.clip(distances, -limit, limit) + limit
    else:
      distances = jnp.clip(-distances, 0, limit)
    # [H, D] taken at [B, T, S] is [H, B, T, S]; heads go behind the rows.
    biases = jnp.take(by_distance, distances, axis=1, mode='clip')
    return jnp.moveaxis(biases, 0, 1)


class Attention(nn.Module):
  """The four projections of an attention, applied in two steps: `keys_values`,
  whose results can be cached, and the call."""

  config: T5Config

  def setup(self):
    config = self.config
    # May differ from `embed_dim`: T5 11b has 128 heads of 128 beside 1024.
    width = config.num_heads * config.head_dim
    kernel_init = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')
    # T5 does not scale scores; its initial query kernels have the factor.
    query_init = nn.initializers.variance_scaling(
      1.0 / config.head_dim, 'fan_in', 'normal'
    )
    dense = functools.partial(Dense, dtype=config.dtype)
    self.is_joined = self.has_variable('params', joint_name(PROJECTIONS))
    if self.is_joined:
      self.query_key_value = dense(3 * width)
    else:
      self.query = dense(width, kernel_init=query_init)
      self.key = dense(width, kernel_init=kernel_init)
      self.value = dense(width, kernel_init=kernel_init)
    self.out = dense(config.embed_dim, kernel_init=kernel_init)
    self.dropout = Dropout(config.dropout_rate)

  def keys_values(self, x: Array) -> tuple[Array, Array]:
    """Projects `[B, T, embed]` to keys and values `[B, H, T, D]`."""
    # A row of the joined product is [queries, keys, values], H * D wide each.
    if self.is_joined:
      _, keys, values = jnp.split(self.query_key_value(x), 3, axis=-1)
    else:
      keys, values = self.key(x), self.value(x)
    return self._by_head(keys), self._by_head(values)

  def __call__(
    self,
    x: Array,
    keys: Entries,
    values: Entries,
    mask: Array,
    bias: Array | None = None,
    *,
    used_only: bool = False,
  ) -> Array:
    """Attends from `[B, T, embed]` to keys and values `[B, H, S, D]`; see
    `attention.attend`."""
    # If joined, the compiler reuses the product made by `keys_values`.
    queries = (
      jnp.split(self.query_key_value(x), 3, axis=-1)[0]
      if self.is_joined
      else self.query(x)
    )
    config = self.config
    mixed = attention.attend(
      self._by_head(queries),
      keys,
      values,
      mask,
      scale=1.0,
      bias=bias,
      dropout=self.dropout if self.has_rng('dropout') else None,
      score_dtype=jnp.float32 if config.has_float32_scores else config.dtype,
      used_only=used_only,
    )
    return self.out(mixed)

  def _by_head(self, x: Array) -> Array:
    x = by_head(x, self.config.head_dim)
    return rules.constrain(x, 'batch', 'heads', 'length', 'kv')


class EncoderLayer(nn.Module):
  """One pre-norm layer of the encoder."""

  config: T5Config

  @nn.compact
  def __call__(
    self, x: Array, mask: Array, bias: Array | None, positions: Array
  ) -> Array:
    """Applies the layer to `[B, E, embed]`. `bias` is None if the layer has its
    own table, which then uses the `positions` int32 `[1, E]`."""
    config = self.config
    # In scalable_t5 every layer has a table, in T5 all layers share one.
    if bias is None:
      table = RelativePositionBias(
        config, is_bidirectional=True, name='relpos_bias'
      )
      bias = table(positions, positions)
    drop = Dropout(config.dropout_rate)
    attend = Attention(config, name='attention')
    h = RMSNorm(dtype=config.dtype, name='pre_attention_layer_norm')(x)
    x = x + drop(attend(h, *attend.keys_values(h), mask, bias))
    h = RMSNorm(dtype=config.dtype, name='pre_mlp_layer_norm')(x)
    h = _mlp(config, name='mlp')(h)
    return rules.constrain(x + drop(h), 'batch', 'length', 'embed')


class DecoderLayer(nn.Module):
  """One pre-norm layer of the decoder."""

  config: T5Config

  def setup(self):
    config = self.config
    norm = functools.partial(RMSNorm, dtype=config.dtype)
    if config.has_layer_relpos:
      self.relpos_bias = RelativePositionBias(config, is_bidirectional=False)
    self.pre_self_attention_layer_norm = norm()
    self.self_attention = Attention(config)
    if config.num_encoder_layers:
      self.pre_cross_attention_layer_norm = norm()
      self.encoder_decoder_attention = Attention(config)
    self.pre_mlp_layer_norm = norm()
    self.mlp = _mlp(config)
    self.dropout = Dropout(config.dropout_rate)

  def __call__(
    self,
    x: Array,
    past: Past | None,
    placement: Placement,
    bias: Array | None,
    cross: Cross | None,
  ) -> tuple[Array, Entries, Entries]:
    """Applies the layer to `[B, T, embed]`.

    Args:
      x: the residual stream, `[B, T, embed]`.
      past: cached keys and values to append to; None in training, with S = T.
      placement: positions and mask of the tokens.
      bias: `[B or 1, H, T, S]`; None if the layer has its own table, which then
        uses the positions of `placement`.
      cross: keys, values and mask of the encoder; None without one.

    Returns:
      The stream, and the keys and values attended to.
    """
    if bias is None:
      bias = self.relpos_bias(placement.positions, placement.key_positions)
    # The call's keys and values are written to the cache first; queries then
    # attend to the cache itself, and the mask hides entries beyond a row's end.
    h = self.pre_self_attention_layer_norm(x)
    keys, values = self.self_attention.keys_values(h)
    if past is not None:
      keys = kv_cache.append(past[0], keys, past[2])
      values = kv_cache.append(past[1], values, past[2])
    # Training has no past and takes gradients: it attends to all entries.
    has_past = past is not None
    h = self.self_attention(
      h, keys, values, placement.mask, bias, used_only=has_past
    )
    x = x + self.dropout(h)
    if cross is not None:
      h = self.pre_cross_attention_layer_norm(x)
      h = self.encoder_decoder_attention(h, *cross, used_only=has_past)
      x = x + self.dropout(h)
    h = self.mlp(self.pre_mlp_layer_norm(x))
    x = rules.constrain(x + self.dropout(h), 'batch', 'length', 'embed')
    return x, keys, values


def _mlp(config: T5Config, **name: Any) -> Mlp:
  sizes = config.mlp_dim, config.mlp_activations
  return Mlp(*sizes, config.dtype, config.dropout_rate, **name)
