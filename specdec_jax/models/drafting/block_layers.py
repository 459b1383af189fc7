"""The sizes and the layers of a block drafter; `block_drafter` stacks them."""

import dataclasses
import functools
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax.base import Array, Placement
from specdec_jax.models import attention, kv_cache
from specdec_jax.models.kv_cache import Cross, Entries
from specdec_jax.models.layers import Dense, Mlp, RMSNorm, by_head
from specdec_jax.models.llama import MixFn, RopeScaling, rotate

MARKOV_HEADS = ('vanilla', 'gated', 'rnn')


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDrafterConfig:
  """Sizes of a block drafter.

  Attributes:
    vocab_size: the target's.
    draft_vocab_size: number of tokens that can be drafted.
    embed_dim: width of the target's residual stream, and of the drafter's.
    num_layers: layers that the block runs through.
    block_size: k, the slots of a block, the anchor's included.
    sample_from_anchor: whether slot i drafts the token i + 1 after the anchor,
      as in DSpark; otherwise slot i drafts the token i after it, and the
      anchor's slot none, as in DFlash.
    mask_token_id: the target's token whose embedding stands in masked slots;
      None for an embedding of the drafter's own.
    feature_layers: the target's layers whose *input* is read, counted from 0,
      ascending; with n layers, n stands for the output of the last.
    feature_norms: whether each stream has its own norm before they are joined.
    cross_layers: for each layer, the layer of the target whose keys and values
      of the encoder it attends to; empty if there is no encoder to read.
    cross_num_heads: query heads of that attention, a multiple of the target's.
    cross_head_dim: the width of the target's heads.
    markov_rank: width of the Markov head's token embeddings; 0 for none.
    markov_head: 'vanilla', `gated` by the hidden state, or `rnn`, with a state
      that is carried along the block.
    has_confidence: whether a head tells how likely each slot is accepted.
    is_causal: whether a slot sees only those before it.
    windows: positions that each layer attends to, as in `LlamaConfig`.
    has_causal_windows: whether a slot sees only those before it in layers with
      a window.
    window_from_anchor: whether each slot of a block sees the last positions
      before the anchor, as speculators trains them; otherwise a window ends at
      the slot itself.
  """

  vocab_size: int
  draft_vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  block_size: int
  feature_layers: tuple[int, ...]
  sample_from_anchor: bool = True
  mask_token_id: int | None = None
  feature_norms: bool = False
  cross_layers: tuple[int, ...] = ()
  cross_num_heads: int = 0
  cross_head_dim: int = 0
  markov_rank: int = 0
  markov_head: str = 'vanilla'
  has_confidence: bool = False
  is_causal: bool = False
  windows: tuple[int, ...] = ()
  has_causal_windows: bool = False
  window_from_anchor: bool = False
  rope_base: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-6
  max_positions: int = 2048
  has_qk_norm: bool = False
  mlp_activations: tuple[str, ...] = ('silu', 'linear')
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    attention.check_sizes(self)
    if not 1 <= self.draft_vocab_size <= self.vocab_size:
      raise ValueError(
        f'draft_vocab_size {self.draft_vocab_size} should be 1 to vocab_size '
        f'{self.vocab_size}'
      )
    least = 1 if self.sample_from_anchor else 2
    if self.block_size < least:
      raise ValueError(
        f'block_size must be at least {least}, got {self.block_size}'
      )
    last_id = self.vocab_size - 1
    if self.mask_token_id is not None and not (
      0 <= self.mask_token_id <= last_id
    ):
      raise ValueError(
        f'mask_token_id {self.mask_token_id} should be a token of the target, '
        f'0 to {last_id}'
      )
    if self.markov_head not in MARKOV_HEADS:
      heads = ', '.join(MARKOV_HEADS)
      raise ValueError(
        f'markov_head is {self.markov_head!r}; there are {heads}'
      )
    ascending = sorted(set(self.feature_layers))
    if not self.feature_layers or list(self.feature_layers) != ascending:
      raise ValueError(
        f'feature layers must ascend, got {list(self.feature_layers)}'
      )
    if self.cross_layers and len(self.cross_layers) != self.num_layers:
      raise ValueError(
        f'cross_layers names {len(self.cross_layers)} layers of the target for '
        f'{self.num_layers} layers: give one for each, or none'
      )

  @property
  def num_drafts(self) -> int:
    """How many tokens a block drafts."""
    return self.block_size if self.sample_from_anchor else self.block_size - 1

  @property
  def state_size(self) -> int:
    """Width of the state that the Markov head carries along a block."""
    return self.markov_rank if self.markov_head == 'rnn' else 0


class Sight(NamedTuple):
  """Which positions the slots of a block see in a layer, of the text before
  the anchor and of the block.

  Attributes:
    window: how many; 0 for all.
    is_causal: whether a slot sees only those before it, and itself.
    is_from_anchor: see `BlockDrafterConfig.window_from_anchor`.
  """

  window: int
  is_causal: bool
  is_from_anchor: bool

  def sees(self, slots: Array, keys: Array, anchors: Array) -> Array:
    """Tells, by positions that broadcast, which slots see which keys."""
    # Anchor 5, slot 7, a window of 3: keys 5, 6, 7 and, with a causal block, no
    # later ones. From the anchor: 2, 3, 4 and the block.
    is_seen = (keys <= slots) if self.is_causal else jnp.ones((), jnp.bool_)
    if not self.window:
      return is_seen
    if self.is_from_anchor:
      return is_seen & (keys >= anchors - self.window)
    return is_seen & (keys > slots - self.window)


def layer_sights(config: BlockDrafterConfig) -> list[Sight]:
  """Lists what slots see in each layer."""
  return [
    Sight(
      window=window,
      is_causal=config.is_causal or (window > 0 and config.has_causal_windows),
      is_from_anchor=config.window_from_anchor,
    )
    for window in attention.layer_windows(config)
  ]


class BlockAttention(nn.Module):
  """Attends from the block to the text before it and to the block itself."""

  config: BlockDrafterConfig

  def setup(self):
    config = self.config
    dense = functools.partial(Dense, dtype=config.dtype)
    self.query = dense(config.num_heads * config.head_dim)
    self.key = dense(config.num_kv_heads * config.head_dim)
    self.value = dense(config.num_kv_heads * config.head_dim)
    self.out = dense(config.embed_dim)
    if config.has_qk_norm:
      norm = functools.partial(RMSNorm, config.norm_epsilon, config.dtype)
      self.query_norm = norm()
      self.key_norm = norm()

  def keys_values(self, x: Array, positions: Array) -> tuple[Array, Array]:
    """Projects `[B, T, embed]` to keys, rotated by int32 `[B, T]`, and values
    `[B, KV, T, D]`."""
    config = self.config
    keys = by_head(self.key(x), config.head_dim)
    if config.has_qk_norm:
      keys = self.key_norm(keys)
    return self._rotate(keys, positions), by_head(
      self.value(x), config.head_dim
    )

  def __call__(
    self,
    x: Array,
    keys: Entries,
    values: Entries,
    lengths: Array,
    placement: Placement,
    mix: MixFn | None = None,
  ) -> tuple[Array, Entries, Entries]:
    """Writes the keys and values of the block `[B, T, embed]` behind the text
    in the cache and attends as `placement` says; see `llama.SelfAttention`."""
    config = self.config
    queries = by_head(self.query(x), config.head_dim)
    if config.has_qk_norm:
      queries = self.query_norm(queries)
    queries = self._rotate(queries, placement.positions)
    new_keys, new_values = self.keys_values(x, placement.positions)
    if mix is not None:
      mixed = mix(queries, new_keys, new_values)
      return self.out(mixed), new_keys, new_values
    keys = kv_cache.append(keys, new_keys, lengths)
    values = kv_cache.append(values, new_values, lengths)
    mixed = attention.attend(
      queries,
      keys,
      values,
      placement.mask,
      scale=config.head_dim**-0.5,
      used_only=True,
    )
    return self.out(mixed), keys, values

  def _rotate(self, x: Array, positions: Array) -> Array:
    config = self.config
    return rotate(
      x, positions, base=config.rope_base, scaling=config.rope_scaling
    )


class CrossAttention(nn.Module):
  """Attends to the source, with keys and values of a layer of the target."""

  config: BlockDrafterConfig

  @nn.compact
  def __call__(self, x: Array, cross: Cross) -> Array:
    """Attends from `[B, T, embed]` to the keys, values and mask of an encoder,
    `[B, H, E, D]` and bool `[B, T or 1, E]`."""
    config = self.config
    width = config.cross_num_heads * config.cross_head_dim
    queries = Dense(width, config.dtype, name='query')(x)
    queries = by_head(queries, config.cross_head_dim)
    # The scale of scores is in the query's kernel, as in T5.
    mixed = attention.attend(queries, *cross, scale=1.0)
    return Dense(config.embed_dim, config.dtype, name='out')(mixed)


class BlockLayer(nn.Module):
  """One pre-norm layer."""

  config: BlockDrafterConfig

  def setup(self):
    config = self.config
    norm = functools.partial(RMSNorm, config.norm_epsilon, config.dtype)
    self.pre_attention_layer_norm = norm()
    self.attention = BlockAttention(config)
    if config.cross_layers:
      self.pre_cross_attention_layer_norm = norm()
      self.cross_attention = CrossAttention(config)
    self.pre_mlp_layer_norm = norm()
    self.mlp = Mlp(config.mlp_dim, config.mlp_activations, config.dtype)

  def __call__(
    self,
    x: Array,
    keys: Entries,
    values: Entries,
    lengths: Array,
    placement: Placement,
    cross: Cross | None = None,
    mix: MixFn | None = None,
  ) -> tuple[Array, Entries, Entries]:
    """Applies the layer to a block `[B, T, embed]`."""
    h = self.pre_attention_layer_norm(x)
    h, keys, values = self.attention(h, keys, values, lengths, placement, mix)
    x = x + h
    if cross is not None:
      x = x + self.cross_attention(
        self.pre_cross_attention_layer_norm(x), cross
      )
    return x + self.mlp(self.pre_mlp_layer_norm(x)), keys, values
