"""A block-parallel drafter on the target's features, as DFlash (Chen et al.,
arXiv 2602.06036), as a user would add it.

Masks stand at the drafted places. One pass fills all of them: each layer
attends to the block, in both directions, and to keys and values that it makes
of the target's features of all text before.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.assembly import lengths, models
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.lengths import Gamma, Length, LengthChoice
from specdec_jax.assembly.models import Model
from specdec_jax.base import Array, Draft, Drafter
from specdec_jax.models import attention, families, kv_cache, taps
from specdec_jax.models.families import Drafts, Family
from specdec_jax.models.kv_cache import KVCache
from specdec_jax.models.layers import Dense, Mlp, RMSNorm, applied
from specdec_jax.models.llama import rotate
from specdec_jax.models.networks import Bound, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
  """Sizes; `feature_layers` are those of the target that are read."""

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  feature_layers: tuple[int, ...]
  dtype: jnp.dtype = jnp.float32


class Layer(nn.Module):
  """Attends to the text's features and to the block itself."""

  config: BlockConfig

  def setup(self):
    config = self.config
    width = config.num_heads * config.head_dim
    dense = functools.partial(Dense, dtype=config.dtype)
    self.norm = RMSNorm(dtype=config.dtype)
    self.pre_mlp_layer_norm = RMSNorm(dtype=config.dtype)
    self.query, self.key, self.value = (dense(width) for _ in range(3))
    self.out = dense(config.embed_dim)
    self.mlp = Mlp(config.mlp_dim, ('silu', 'linear'), config.dtype)

  def keys_values(self, x: Array, positions: Array) -> tuple[Array, Array]:
    """`[B, T, embed]` to keys and values `[B, H, T, D]`."""
    return rotate(self._by_head(self.key(x)), positions, base=1e4), (
      self._by_head(self.value(x))
    )

  def __call__(
    self, x: Array, positions: Array, past: tuple[Array, Array], mask: Array
  ) -> Array:
    h = self.norm(x)
    queries = rotate(self._by_head(self.query(h)), positions, base=1e4)
    keys, values = (
      jnp.concatenate(both, axis=2)
      for both in zip(past, self.keys_values(h, positions), strict=True)
    )
    scale = self.config.head_dim**-0.5
    mixed = attention.attend(queries, keys, values, mask, scale=scale)
    x = x + self.out(mixed)
    return x + self.mlp(self.pre_mlp_layer_norm(x))

  def _by_head(self, x: Array) -> Array:
    shape = (*x.shape[:2], self.config.num_heads, self.config.head_dim)
    return x.reshape(shape).transpose(0, 2, 1, 3)


class BlockDrafter(nn.Module):
  """The network; embeddings of tokens and logits are the target's."""

  config: BlockConfig

  def setup(self):
    config = self.config
    self.join = Dense(config.embed_dim, config.dtype)
    self.join_norm = RMSNorm(dtype=config.dtype)
    self.mask = self.param(
      'mask', nn.initializers.normal(), (config.embed_dim,)
    )
    self.layers = [Layer(config) for _ in range(config.num_layers)]

  def read(self, features: Array, cache: KVCache) -> KVCache:
    """Appends the features `[B, T, F]` of a text to the cache."""
    x = self.join_norm(self.join(features))
    positions = arrays.block_positions(cache.lengths, x.shape[1])
    append = functools.partial(kv_cache.append, lengths=cache.lengths)
    pairs = [layer.keys_values(x, positions) for layer in self.layers]
    keys, values = zip(*pairs, strict=True)
    return KVCache(
      keys=tuple(map(append, cache.keys, keys)),
      values=tuple(map(append, cache.values, values)),
      lengths=cache.lengths + x.shape[1],
    )

  def fill(self, pending: Array, cache: KVCache, gamma: int) -> Array:
    """Embeddings `[B, embed]` of the pending tokens to the states `[B, gamma,
    embed]` of what follows."""
    dtype, embed_dim = self.config.dtype, self.mask.size
    masks = jnp.broadcast_to(self.mask, (len(pending), gamma, embed_dim))
    both = pending[:, None].astype(dtype), masks.astype(dtype)
    x = jnp.concatenate(both, axis=1)
    positions = arrays.block_positions(cache.lengths, gamma + 1)
    is_text = arrays.is_within(cache.lengths, cache.capacity)
    mask = jnp.pad(is_text, ((0, 0), (0, gamma + 1)), constant_values=True)
    for layer, *past in zip(self.layers, cache.keys, cache.values, strict=True):
      x = layer(x, positions, tuple(past), mask[:, None])
    return x[:, 1:]

  def __call__(self, features: Array, pending: Array, cache: KVCache) -> Array:
    return self.fill(pending, self.read(features, cache), 1)


def empty_cache(config: BlockConfig, batch_size: int, capacity: int) -> KVCache:
  return kv_cache.init(config, batch_size, capacity, config.num_layers)


def init_params(config: BlockConfig, rng_key: Array) -> Any:
  width = len(config.feature_layers) * config.embed_dim
  sizes = jnp.zeros((1, 1, width)), jnp.zeros((1, config.embed_dim))
  cache = empty_cache(config, 1, 1)
  return BlockDrafter(config).init(rng_key, *sizes, cache)['params']


def bind(target: Network, config: BlockConfig, *, width: int) -> Bound:
  apply = applied(BlockDrafter(config))

  def read(params, features: Array, cache: KVCache) -> KVCache:
    return apply(params['own'], features, cache, method='read')

  def fill(params, tokens: Array, cache: KVCache, gamma: int) -> Array:
    table = target.token_embedder(params['target'])['embedding']
    pending = jnp.take(table, tokens, axis=0)
    x = apply(params['own'], pending, cache, gamma, method='fill')
    return target.project(params['target'], x)

  return Bound(
    model=(functools.partial(empty_cache, config), read, fill),
    target=taps.last_call(target, config.feature_layers, width=width),
    join=lambda target, own: {'own': own, 'target': target},
  )


def drafter(model: Any, *, gamma: int, vocab_size: int) -> Drafter:
  """Drafts the likeliest token at each of gamma masks, in one pass."""
  empty, read, fill = model

  def init(params, prompt, max_len, target_cache):
    width = target_cache.features.shape[1]
    cache = empty(len(prompt.decoder_tokens), max_len + width)
    if prompt.decoder_tokens.shape[1] > 1:
      cache = read(params, target_cache.prompt, cache)
    return cache, dataclasses.replace(target_cache, prompt=None)

  def propose(params, row_keys, context, cache, target_cache):
    # What the target's last call read, over what was rejected before.
    starts, last = jnp.maximum(target_cache.starts, 0), context.lengths - 1
    cache = kv_cache.rewind(cache, starts)
    cache = kv_cache.rewind(read(params, target_cache.features, cache), last)
    pending = arrays.read_block(context.tokens, last, 1)[:, 0]
    logits = fill(params, pending, cache, gamma)
    return Draft(
      tokens=arrays.argmax(logits[..., :vocab_size]),
      probs=None,
      lengths=jnp.full_like(last, gamma),
    ), cache

  return Drafter(gamma, init, propose, reads_target_cache=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockParallel:
  """The choice: its fields are the options that users have."""

  model: Model
  gamma: Gamma = lengths.gamma_option(3)

  @property
  def length(self) -> LengthChoice:
    return lengths.of(gamma=self.gamma)

  def make(self, target: Target, length: Length) -> Drafting:
    config = models.read_drafter_config(self.model, 'block_parallel')
    gamma = lengths.fixed(length)
    bound = families.bind(target.config, config, width=gamma + 1)
    made = drafter(bound.model, gamma=gamma, vocab_size=target.vocab_size)
    return Drafting(
      drafter=made,
      model=self.model,
      config=config,
      target=bound.target,
      join=bound.join,
    )


FAMILY = Family(
  name='block_parallel',
  config=BlockConfig,
  init_params=init_params,
  drafts=Drafts('block_parallel', bind),
  has_vocabulary=False,
)
