"""Llama-type decoders (Touvron et al., arXiv 2302.13971): Llama up to 3.2,
SmolLM2, Mistral, Qwen2, Qwen3 and Qwen3-MoE.

Pre-norm layers with grouped-query attention, rotary positions and a gated SiLU
feed-forward. The cache is an explicit argument and result. Parameters are named
as T5X names those of a decoder-only model.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array, Placement
from specdec_jax.models import attention, experts, kv_cache, networks
from specdec_jax.models.drafting.draft_vocabulary import num_logits
from specdec_jax.models.kv_cache import Entries, KVCache
from specdec_jax.models.layers import (
  Dense,
  Embed,
  Mlp,
  RMSNorm,
  query_key_value,
)
from specdec_jax.models.networks import Past


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Llama 3.1's scaling of rotary positions to longer contexts.

  Wavelengths from `original_max_positions / low_freq_factor` on become `factor`
  times longer, those up to `original_max_positions / high_freq_factor` stay,
  and frequencies between the two are interpolated.
  """

  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_positions: int = 8192

  def __post_init__(self):
    if self.factor < 1 or self.original_max_positions < 1:
      raise ValueError(
        f'factor {self.factor} and original_max_positions '
        f'{self.original_max_positions} must be at least 1'
      )
    if not 0 < self.low_freq_factor < self.high_freq_factor:
      raise ValueError(
        f'low_freq_factor {self.low_freq_factor} must be more than 0 and less '
        f'than high_freq_factor {self.high_freq_factor}'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
  """Sizes of a Llama-type decoder.

  Attributes:
    embed_dim: width of the residual stream.
    num_heads: query heads.
    num_kv_heads: key-value heads; divides `num_heads`.
    mlp_dim: width of the gated feed-forward.
    rope_base: base of the rotary wavelengths.
    rope_scaling: how the wavelengths are scaled, or None.
    max_positions: the longest context the model was trained for.
    is_tied: whether the logits reuse the token embeddings.
    has_attention_bias: whether query, key and value projections have biases
      (Qwen2).
    has_qk_norm: whether each head of queries and keys has a norm (Qwen3).
    windows: positions that each layer attends to, the last ones; 0 for all. The
      pattern repeats: (4096, 0) alternates, one number holds for all (Mistral).
    num_experts: in place of each feed-forward; 0 for none.
    num_chosen_experts: how many of them a token goes through.
    expert_dim: width of each; `mlp_dim` then counts for nothing.
    has_normalized_experts: whether the weights of those sum to 1.
    dtype: of activations and cache; norms, softmax and logits are float32.
    cache_dtype: int8 for keys and values as `kv_cache.Packed`, or None.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_base: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-5
  max_positions: int = 2048
  is_tied: bool = False
  has_attention_bias: bool = False
  has_qk_norm: bool = False
  windows: tuple[int, ...] = ()
  num_experts: int = 0
  num_chosen_experts: int = 0
  expert_dim: int = 0
  has_normalized_experts: bool = False
  dtype: jnp.dtype = jnp.float32
  cache_dtype: jnp.dtype | None = None

  def __post_init__(self):
    attention.check_sizes(self)
    experts.check_sizes(self)


def rope_divisors(
  scaling: RopeScaling, *, base: float, head_dim: int
) -> np.ndarray:
  """Computes the divisors of the rotary frequencies, float32 `[D / 2]`, highest
  frequency first."""
  # `turns` are those of a frequency within the original context: slow ones,
  # below `low`, are divided by `factor`, fast ones, above `high`, by 1.
  frequencies = base ** -(np.arange(head_dim // 2) / (head_dim // 2))
  turns = scaling.original_max_positions * frequencies / (2 * np.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  share = np.clip((turns - low) / (high - low), 0, 1)
  multipliers = share + (1 - share) / scaling.factor
  return (1 / multipliers).astype(np.float32)


def rotate(
  x: Array,
  positions: Array,
  *,
  base: float,
  scaling: RopeScaling | None = None,
  fraction: float = 1.0,
) -> Array:
  """Rotates the heads of `[B, H, T, D]` by their positions, int32 `[B, T]`,
  with angles in float32 (Su et al., arXiv 2104.09864; `base` is theta). Of the
  D / 2 frequencies, the first `fraction` turn and the others are 0.

  Dimension i is paired with `i + D/2`, the layout of Hugging Face checkpoints;
  GGUF files interleave the pairs and are permuted when they are read.
  """
  # With D = 4, dimensions 0 and 2 turn by position * 1, and 1 and 3 by position
  # * base^(-1/2).
  half = x.shape[-1] // 2
  exponents = jnp.arange(half, dtype=jnp.float32) / half
  frequencies = jnp.power(jnp.float32(base), -exponents)
  if scaling is not None:
    frequencies /= rope_divisors(scaling, base=base, head_dim=2 * half)
  if fraction != 1:
    is_turning = jnp.arange(half) < int(fraction * half)
    frequencies = jnp.where(is_turning, frequencies, 0)
  positions = positions.astype(jnp.float32)
  angles = positions[:, None, :, None] * frequencies[None, None, None, :]
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x.dtype)


# `(queries[B, Hq, T, D], keys[B, H, T, D], values) -> [B, T, Hq * D]`: attends
# among the T positions alone; queries and keys are rotated.
MixFn = Callable[[Array, Array, Array], Array]


class SelfAttention(nn.Module):
  """Appends T positions to one layer's cache and attends as `placement` says.

  If `mix` is given, as in training, that function attends instead, without a
  cache; the keys and values returned are then those of the T positions.
  """

  config: LlamaConfig

  @nn.compact
  def __call__(
    self,
    x: Array,
    keys: Entries,
    values: Entries,
    lengths: Array,
    placement: Placement,
    mix: MixFn | None = None,
  ) -> tuple[Array, Entries, Entries]:
    config = self.config
    queries, new_keys, new_values = query_key_value(
      self, x, config, use_bias=config.has_attention_bias
    )
    if config.has_qk_norm:
      norm = functools.partial(RMSNorm, config.norm_epsilon, config.dtype)
      queries = norm(name='query_norm')(queries)
      new_keys = norm(name='key_norm')(new_keys)
    turn = functools.partial(
      rotate,
      positions=placement.positions,
      base=config.rope_base,
      scaling=config.rope_scaling,
    )
    out = Dense(config.embed_dim, config.dtype, name='out')
    # The cache holds rotated keys, as an entry's position never changes.
    if mix is not None:
      new_keys = turn(new_keys)
      mixed = mix(turn(queries), new_keys, new_values)
      return out(mixed), new_keys, new_values
    keys = kv_cache.append(keys, turn(new_keys), lengths)
    values = kv_cache.append(values, new_values, lengths)
    mixed = attention.attend(
      turn(queries),
      keys,
      values,
      placement.mask,
      scale=config.head_dim**-0.5,
      used_only=True,
    )
    return out(mixed), keys, values


class DecoderLayer(nn.Module):
  """One pre-norm layer."""

  config: LlamaConfig

  @nn.compact
  def __call__(
    self, x: Array, past: Past, placement: Placement
  ) -> tuple[Array, Entries, Entries]:
    config = self.config
    norm = functools.partial(RMSNorm, config.norm_epsilon, config.dtype)
    # Each part f adds f(norm(x)) to the stream.
    h = norm(name='pre_self_attention_layer_norm')(x)
    h, keys, values = SelfAttention(config, name='self_attention')(
      h, *past, placement
    )
    x = x + h
    h = norm(name='pre_mlp_layer_norm')(x)
    if config.num_experts:
      h = experts.RoutedExperts(config, 'silu', name='experts')(h)
    else:
      h = Mlp(config.mlp_dim, ('silu', 'linear'), config.dtype, name='mlp')(h)
    return x + h, keys, values


class Llama(nn.Module):
  """The whole network; its methods are the steps of decoding."""

  config: LlamaConfig

  def setup(self):
    # Named as in T5X's trees; the layers become `layers_0`, `layers_1` ...
    config = self.config
    sizes = config.vocab_size, config.embed_dim
    self.token_embedder = Embed(*sizes, config.dtype)
    layer = networks.traced_once(self, DecoderLayer)
    self.layers = [layer(config) for _ in range(config.num_layers)]
    self.decoder_norm = RMSNorm(config.norm_epsilon, config.dtype)
    if not config.is_tied:
      self.logits_dense = Dense(num_logits(self, config.vocab_size))

  def extend(
    self, tokens: Array, cache: KVCache, placement: Placement | None = None
  ) -> tuple[Array, KVCache]:
    """Appends int32 `[B, T]` tokens, which continue the text unless `placement`
    says otherwise, and returns the input `[B, T, embed]` of `project`, and the
    cache."""
    x = self.token_embedder(tokens)
    # Without windows, which `within` applies layer by layer.
    placement = attention.placed(
      cache.lengths, tokens.shape[1], cache.capacity, placement
    )
    windows = attention.layer_windows(self.config)
    stack = (
      functools.partial(layer, placement=attention.within(placement, window))
      for layer, window in zip(self.layers, windows, strict=True)
    )
    return networks.through(self, stack, x, cache)

  def project(self, x: Array) -> Array:
    """Norms the last layer's output `[B, T, embed]` and projects it to float32
    logits `[B, T, V]`."""
    x = self.decoder_norm(x)
    if self.config.is_tied:
      return self.token_embedder.attend(x)
    logits: Array = self.logits_dense(x)
    return logits
