"""Gemma 4, the text decoder: E2B, E4B, 31B and 26B-A4B.

Source: transformers 5.24, `models/gemma4`. As in Gemma 3, each part of a layer
has a norm before and one after it, and most layers attend to a window. What is
new: full layers have heads of another size, and may use a key as its value; the
last layers may read the keys and values of earlier ones; each layer may get an
embedding of the token of its own; and experts may stand beside a feed-forward.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.base import Array, Placement
from specdec_jax.models import attention, experts, kv_cache, llama, networks
from specdec_jax.models.gemma import layers
from specdec_jax.models.gemma.layers import Norm, normalized
from specdec_jax.models.kv_cache import Entries, KVCache
from specdec_jax.models.layers import (
  Dense,
  Embed,
  Mlp,
  by_head,
  parameter,
  projections,
)
from specdec_jax.models.networks import Past


class Heads(NamedTuple):
  """Heads of a layer, as `attention.check_sizes` takes them."""

  num_heads: int
  num_kv_heads: int
  head_dim: int
  windows: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config:
  """Sizes of a Gemma 4. `GemmaConfig` has the other attributes.

  A layer is *full* if its window is 0.

  Attributes:
    num_kv_heads: key-value heads of layers with a window.
    head_dim: size of the heads of layers with a window.
    full_num_kv_heads: key-value heads of full layers.
    full_head_dim: size of the heads of full layers.
    full_key_is_value: whether full layers have no projection to values: a value
      is the key before its norm and rotation.
    num_shared_layers: how many layers, the last ones, have no keys and values:
      each reads those of the last layer of its type before them.
    has_wide_shared_mlp: whether their feed-forward is `2 * mlp_dim` wide.
    per_layer_dim: size of the embeddings that each layer has of a token; 0 for
      none.
    per_layer_vocab_size: number of tokens with such embeddings.
    num_experts: of each layer, beside its feed-forward; 0 for none.
    num_chosen_experts: how many of them a token goes through.
    expert_dim: width of each.
    rope_fraction: of the frequencies of full layers, the share that turns.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  full_num_kv_heads: int
  full_head_dim: int
  mlp_dim: int
  windows: tuple[int, ...]
  full_key_is_value: bool = False
  num_shared_layers: int = 0
  has_wide_shared_mlp: bool = False
  per_layer_dim: int = 0
  per_layer_vocab_size: int = 0
  num_experts: int = 0
  num_chosen_experts: int = 0
  expert_dim: int = 0
  logits_softcap: float = 0.0
  rope_base: float = 1e6
  rope_factor: float = 1.0
  rope_fraction: float = 0.25
  local_rope_base: float = 10_000.0
  norm_epsilon: float = 1e-6
  max_positions: int = 131_072
  is_tied: bool = True
  dtype: jnp.dtype = jnp.float32
  cache_dtype: jnp.dtype | None = None

  def __post_init__(self):
    for window in {0, *self.windows}:
      attention.check_sizes(self.heads(window))
    if not self.is_tied:
      raise ValueError('a Gemma has no logits of its own: set is_tied')
    if self.rope_factor <= 0 or not 0 < self.rope_fraction <= 1:
      raise ValueError(
        f'rope_factor {self.rope_factor} must be above 0, and rope_fraction '
        f'{self.rope_fraction} above 0 and at most 1'
      )
    if bool(self.per_layer_dim) != bool(self.per_layer_vocab_size):
      raise ValueError(
        f'per_layer_dim {self.per_layer_dim} and per_layer_vocab_size '
        f'{self.per_layer_vocab_size} go together: set both or none'
      )
    experts.check_sizes(self)
    # Raises ValueError for a shared layer without a source.
    sources(self)

  def heads(self, window: int) -> Heads:
    """Returns the heads of a layer with this window."""
    if window:
      sizes = self.num_kv_heads, self.head_dim
    else:
      sizes = self.full_num_kv_heads, self.full_head_dim
    return Heads(self.num_heads, *sizes, windows=(window,))

  @property
  def num_cached_layers(self) -> int:
    """The number of layers with keys and values, the first ones."""
    return self.num_layers - self.num_shared_layers

  @property
  def cache_heads(self) -> list[tuple[int, int]]:
    """Number and size of the heads of each layer with keys and values."""
    windows = attention.layer_windows(self)[: self.num_cached_layers]
    heads = [self.heads(window) for window in windows]
    return [(layer.num_kv_heads, layer.head_dim) for layer in heads]


def sources(config: Gemma4Config) -> list[int]:
  """Lists the layer whose keys and values each layer reads, itself if it has
  its own; ValueError if a layer has none to read."""
  # Windows [4, 0, 4, 4, 0] of which the last two layers share: [0, 1, 2, 2, 1].
  windows = attention.layer_windows(config)
  num_cached = config.num_cached_layers
  if not 0 < num_cached <= config.num_layers:
    raise ValueError(
      f'{config.num_shared_layers} of {config.num_layers} layers read keys of '
      'earlier ones: the first needs its own'
    )
  chosen = list(range(num_cached))
  for i in range(num_cached, config.num_layers):
    alike = [j for j in range(num_cached) if windows[j] == windows[i]]
    if not alike:
      raise ValueError(
        f'layer {i} reads the keys of an earlier layer with a window of '
        f'{windows[i]} (0 for none), and there is none before layer '
        f'{num_cached}'
      )
    chosen.append(alike[-1])
  return chosen


def norm(config: Any, **name: Any) -> Norm:
  return Norm(config.norm_epsilon, config.dtype, offset=0.0, **name)


class SelfAttention(nn.Module):
  """Self-attention with rotary positions, within a window unless it is 0."""

  config: Gemma4Config
  window: int
  has_keys: bool

  @nn.compact
  def __call__(
    self, x: Array, past: Past | None, positions: Array, mask: Array
  ) -> tuple[Array, Entries, Entries]:
    """Mixes `[B, T, embed]`, at int32 positions `[B or 1, T]`; also returns the
    keys and values attended to. See `Layer`."""
    config, heads = self.config, self.config.heads(self.window)
    is_full = not self.window
    widths = {'query': heads.num_heads * heads.head_dim}
    if self.has_keys:
      widths['key'] = heads.num_kv_heads * heads.head_dim
      if not (is_full and config.full_key_is_value):
        widths['value'] = widths['key']
    queries, *keys_values = (
      layers.placed(by_head(y, heads.head_dim))
      for y in projections(self, x, widths, dtype=config.dtype)
    )
    turn = functools.partial(
      llama.rotate,
      positions=positions.astype(jnp.float32)
      / (config.rope_factor if is_full else 1.0),
      base=config.rope_base if is_full else config.local_rope_base,
      fraction=config.rope_fraction if is_full else 1.0,
    )
    queries = turn(norm(config, name='query_norm')(queries))
    if self.has_keys:
      # Without a value, the key takes its place, before its norm and rotation.
      keys, values = keys_values[0], keys_values[-1]
      keys = turn(norm(config, name='key_norm')(keys))
      values = normalized(values, config.norm_epsilon).astype(config.dtype)
      if past is not None:
        keys = kv_cache.append(past[0], keys, past[2])
        values = kv_cache.append(past[1], values, past[2])
    else:
      if past is None:
        raise ValueError('a layer without keys of its own needs those to read')
      keys, values, _ = past
    has_past = past is not None
    mixed = attention.attend(
      queries, keys, values, mask, scale=1.0, used_only=has_past
    )
    return Dense(x.shape[-1], config.dtype, name='out')(mixed), keys, values


class Layer(nn.Module):
  """One layer; each part f adds `post(f(pre(x)))` to the stream.

  Attributes:
    config: sizes of the network.
    window: positions that the layer attends to, the last ones; 0 for all.
    has_keys: whether it has keys and values of its own.
  """

  config: Gemma4Config
  window: int
  has_keys: bool = True

  @nn.compact
  def __call__(
    self,
    x: Array,
    past: Past | None,
    positions: Array,
    mask: Array,
    embedding: Array | None = None,
  ) -> tuple[Array, Entries, Entries]:
    """Applies the layer.

    Args:
      x: the residual stream, `[B, T, embed]`.
      past: cached keys and values to append to, or for a layer without its own
        those to read, with the new tokens; without, S = T.
      positions: int32 `[B or 1, T]`.
      mask: bool `[B, T or 1, S]`, with the window applied.
      embedding: `[B, T, per_layer_dim]`, the tokens' for this layer, or None.

    Returns:
      The stream, and the keys and values attended to.
    """
    config = self.config
    # 1) Attention.
    h = norm(config, name='pre_self_attention_layer_norm')(x)
    h, keys, values = SelfAttention(
      config, self.window, self.has_keys, name='self_attention'
    )(h, past, positions, mask)
    x = x + norm(config, name='post_self_attention_layer_norm')(h)
    # 2) The feed-forward.
    is_wide = config.has_wide_shared_mlp and not self.has_keys
    mlp_dim = config.mlp_dim * (2 if is_wide else 1)
    h = norm(config, name='pre_mlp_layer_norm')(x)
    h = Mlp(mlp_dim, ('gelu', 'linear'), config.dtype, name='mlp')(h)
    if config.num_experts:
      h = norm(config, name='post_mlp_norm_1')(h) + self._through_experts(x)
    x = x + norm(config, name='post_mlp_layer_norm')(h)
    # 3) The layer's own embedding of the token, gated by the stream.
    if embedding is not None:
      dense = functools.partial(Dense, dtype=config.dtype)
      gate = dense(config.per_layer_dim, name='per_layer_gate')(x)
      h = jax.nn.gelu(gate) * embedding
      h = dense(config.embed_dim, name='per_layer_out')(h)
      x = x + norm(config, name='post_per_layer_norm')(h)
    ones = nn.initializers.ones_init()
    scalar = parameter(self, 'layer_scalar', ones, (1,)).astype(config.dtype)
    return x * scalar[None, None], keys, values

  def _through_experts(self, x: Array) -> Array:
    """Sends the stream `[B, T, embed]` before the feed-forward, with norms of
    their own, through the experts that are chosen for it."""
    config = self.config
    ids, weights = Router(config, name='router')(x)
    mixed = experts.Experts(
      config.num_experts,
      config.expert_dim,
      'gelu',
      config.dtype,
      name='experts',
    )(norm(config, name='pre_mlp_norm_2')(x), ids, weights)
    return norm(config, name='post_mlp_norm_2')(mixed)


class Router(nn.Module):
  """Chooses experts, in float32."""

  config: Gemma4Config

  @nn.compact
  def __call__(self, x: Array) -> tuple[Array, Array]:
    """Returns ids and weights `[B, T, k]` for the stream `[B, T, embed]`."""
    config = self.config
    ones = nn.initializers.ones_init()
    scale = parameter(self, 'scale', ones, (config.embed_dim,))
    scale = scale.astype(jnp.float32) * config.embed_dim**-0.5
    x = normalized(x, config.norm_epsilon) * scale[None, None]
    logits = experts.router_logits(self, x, config.num_experts)
    ids, weights = experts.choose(
      logits, config.num_chosen_experts, is_normalized=True
    )
    per_expert = parameter(
      self, 'per_expert_scale', ones, (config.num_experts,)
    )
    return ids, weights * per_expert.astype(jnp.float32)[ids]


class Decoder(nn.Module):
  """The whole network; its methods are the steps of decoding."""

  config: Gemma4Config

  def setup(self):
    config = self.config
    self.token_embedder = layers.embed(config)
    if config.per_layer_dim:
      width = config.num_layers * config.per_layer_dim
      self.per_layer_embedder = Embed(
        config.per_layer_vocab_size, width, config.dtype
      )
      self.per_layer_projection = Dense(width, config.dtype)
      self.per_layer_norm = norm(config)
    layer = networks.traced_once(self, Layer)
    self.layers = [
      layer(config, window, has_keys=i < config.num_cached_layers)
      for i, window in enumerate(attention.layer_windows(config))
    ]
    self.decoder_norm = norm(config)

  def extend(
    self, tokens: Array, past: KVCache, placement: Placement | None = None
  ) -> tuple[Array, KVCache]:
    """Appends int32 `[B, T]` tokens, which continue the text unless `placement`
    says otherwise, and returns the input `[B, T, embed]` of `project`, and the
    cache."""
    config = self.config
    placement = attention.placed(
      past.lengths, tokens.shape[1], past.capacity, placement
    )
    # Only the inputs are scaled; the logits reuse the embeddings unscaled.
    x = layers.scaled(config, self.token_embedder(tokens))
    embeddings = self._per_layer_embeddings(tokens, x)
    stack = (
      functools.partial(
        layer,
        positions=placement.positions,
        mask=attention.within(placement, layer.window).mask,
        embedding=embedding,
      )
      for layer, embedding in zip(self.layers, embeddings, strict=True)
    )
    x, cache = networks.through(self, stack, x, past, sources(config))
    return self.decoder_norm(x), cache

  def _per_layer_embeddings(
    self, tokens: Array, x: Array
  ) -> list[Array] | list[None]:
    """Returns each layer's `[B, T, per_layer_dim]`: of the tokens, and of their
    scaled embeddings `[B, T, embed]`; or None for each layer."""
    config = self.config
    if not config.per_layer_dim:
      return [None] * config.num_layers
    by_layer = (*tokens.shape, config.num_layers, config.per_layer_dim)
    scale = lambda value: jnp.asarray(value, config.dtype)
    of_tokens = self.per_layer_embedder(tokens) * scale(
      config.per_layer_dim**0.5
    )
    projected = self.per_layer_projection(x) * scale(config.embed_dim**-0.5)
    of_stream = self.per_layer_norm(projected.reshape(by_layer))
    embeddings = (of_stream + of_tokens.reshape(by_layer)) * scale(2**-0.5)
    return [embeddings[:, :, i] for i in range(config.num_layers)]

  def project(self, x: Array) -> Array:
    """Projects `[B, T, embed]` to float32 logits `[B, T, V]`."""
    return layers.logits_of(self.token_embedder, x, self.config.logits_softcap)
