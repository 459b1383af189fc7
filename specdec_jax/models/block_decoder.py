"""The network of the Spec-Drafter (Xia et al., arXiv 2203.16487): an encoder,
and a decoder that fills a block of masks in one pass.

The decoder reads `[y_1 .. y_p, mask x k]`, unshifted and in both directions. A
mask is embedded as a soft copy of the source, learned positions are added anew
at every layer, and layers are normalised after they are added, all as in the
paper. Its encoder is a T5's, under T5X's names, so that a target's weights fit:
the paper's targets and drafters are of BERT's kind throughout.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array
from specdec_jax.drafters.spec_drafter import BlockModel
from specdec_jax.models.layers import Dense, Dropout, Embed, Mlp, applied
from specdec_jax.models.t5 import Encoder
from specdec_jax.models.t5_layers import Attention, T5Config
from specdec_jax.sharding import rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDecoderConfig:
  """Sizes of a Spec-Drafter, named as in `T5Config`.

  Attributes:
    vocab_size: that of the target.
    num_encoder_layers: cheap: the encoder runs once per decode.
    num_decoder_layers: costly: the decoder runs once per iteration.
    max_positions: rows of the position tables, the limit of sources and of
      texts with their block.
    mlp_activations: of the encoder, as are relative positions; the decoder's is
      GELU without a gate.
    dtype: of activations; norms, softmax and logits are float32.
  """

  vocab_size: int
  embed_dim: int
  num_encoder_layers: int
  num_decoder_layers: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  max_positions: int
  mlp_activations: tuple[str, ...] = ('gelu', 'linear')
  relpos_num_buckets: int = 32
  relpos_max_distance: int = 128
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32


@base.value
class BlockMemory:
  """What depends on the source alone, computed once per decode.

  Attributes:
    copies: `[B, N, embed]`, what a mask at each position is embedded as.
    cross_keys: one `[B, H, E, D]` per layer, of the encoder's output, as
      `cross_values`.
    source_mask: bool `[B, E]`, false for padding.
  """

  copies: Array
  cross_keys: tuple[Array, ...]
  cross_values: tuple[Array, ...]
  source_mask: Array


class BlockLayer(nn.Module):
  """One post-norm layer of the decoder."""

  config: T5Config

  def setup(self):
    config = self.config
    norm = functools.partial(nn.LayerNorm, dtype=config.dtype)
    self.self_attention = Attention(config)
    self.self_attention_layer_norm = norm()
    self.encoder_decoder_attention = Attention(config)
    self.cross_attention_layer_norm = norm()
    self.mlp = Mlp(config.mlp_dim, ('gelu',), config.dtype, config.dropout_rate)
    self.mlp_layer_norm = norm()
    self.dropout = Dropout(config.dropout_rate)

  def __call__(
    self,
    queries: Array,
    text: Array,
    mask: Array,
    cross: tuple[Array, Array, Array],
    *,
    is_training: bool,
  ) -> Array:
    """`[B, T, embed]` attends to `[B, N, embed]` under a mask `[B, 1, N]`, and
    to the source's keys and values under a mask `[B, 1, E]`."""
    drop = functools.partial(self.dropout, is_training=is_training)
    attend = functools.partial(self.self_attention, is_training=is_training)
    h = attend(queries, *self.self_attention.keys_values(text), mask)
    x = self.self_attention_layer_norm(queries + drop(h))
    h = self.encoder_decoder_attention(x, *cross, is_training=is_training)
    x = self.cross_attention_layer_norm(x + drop(h))
    h = self.mlp(x, is_training=is_training)
    return self.mlp_layer_norm(x + drop(h))


class BlockDecoder(nn.Module):
  """The whole network; all its embeddings of tokens are one table."""

  config: BlockDecoderConfig

  def setup(self):
    config = self.config
    t5_config = encoder_config(config)
    embed = functools.partial(Embed, dtype=config.dtype)
    self.token_embedder = embed(config.vocab_size, config.embed_dim)
    self.encoder = Encoder(t5_config)
    self.encoder_positions = embed(config.max_positions, config.embed_dim)
    self.decoder_positions = embed(config.max_positions, config.embed_dim)
    self.copy_query = Dense(config.embed_dim, config.dtype)
    self.layers = [
      BlockLayer(t5_config) for _ in range(config.num_decoder_layers)
    ]
    self.dropout = Dropout(config.dropout_rate)

  def encode(
    self,
    encoder_tokens: Array,
    num_positions: int,
    *,
    is_training: bool = False,
  ) -> BlockMemory:
    """int32 `[B, E]`, 0 where padded, and room for texts of N positions;
    ValueError if E or N exceeds `max_positions`."""
    source_len, limit = encoder_tokens.shape[1], self.config.max_positions
    if max(source_len, num_positions) > limit:
      raise ValueError(
        f'a source of {source_len} and a text of {num_positions} tokens need '
        f'as many positions; the drafter has {limit}'
      )
    source_mask = encoder_tokens > 0
    embedded = self.token_embedder(encoder_tokens)
    encoded = self.encoder(
      embedded, source_mask[:, None], is_training=is_training
    )
    pairs = [
      layer.encoder_decoder_attention.keys_values(encoded)
      for layer in self.layers
    ]
    return BlockMemory(
      copies=self._copies(embedded, source_mask, num_positions),
      cross_keys=tuple(keys for keys, _ in pairs),
      cross_values=tuple(values for _, values in pairs),
      source_mask=source_mask,
    )

  def predict(
    self,
    tokens: Array,
    is_known: Array,
    starts: Array,
    memory: BlockMemory,
    *,
    width: int,
    is_training: bool = False,
  ) -> Array:
    """Fills the block of positions `starts[b]` to `starts[b] + width - 1`.

    Args:
      tokens: int32 `[B, N]`; only known ones are read.
      is_known: bool `[B, N]`: the prefix, and the revealed part of the block.
      starts: int32 `[B]`.
      memory: of `encode`, with room for N positions at least.
      width: at most N.
      is_training: takes a random key named `dropout`.

    Returns:
      float32 logits `[B, width, V]`; ValueError if the memory has less room.
    """
    num_positions, room = tokens.shape[1], memory.copies.shape[1]
    if num_positions > room:
      raise ValueError(
        f'a text of {num_positions} positions, its block included, does not '
        f'fit in the {room} that the drafter was given'
      )
    block = arrays.block_positions(starts, width)
    is_visible = is_known | arrays.is_within(starts + width, num_positions)
    text_mask, source_mask = is_visible[:, None], memory.source_mask[:, None]
    positions = self.decoder_positions(_ids(num_positions))
    copies = memory.copies[:, :num_positions]
    x = jnp.where(is_known[..., None], self.token_embedder(tokens), copies)
    x = self.dropout(x, is_training=is_training)
    for i, layer in enumerate(self.layers):
      x = queries = x + positions
      if i + 1 == len(self.layers):
        # The last layer's outputs at the prefix are unused.
        queries = jnp.take_along_axis(x, block[..., None], axis=1, mode='clip')
      cross = memory.cross_keys[i], memory.cross_values[i], source_mask
      x = layer(queries, x, text_mask, cross, is_training=is_training)
      x = rules.constrain(x, 'batch', 'length', 'embed')
    logits = self.token_embedder.attend(x) * self.config.embed_dim**-0.5
    return rules.constrain(logits, 'batch', 'length', 'vocab')

  def __call__(
    self,
    encoder_tokens: Array,
    tokens: Array,
    is_known: Array,
    starts: Array,
    *,
    width: int,
    is_training: bool = False,
  ) -> Array:
    """`encode`, then `predict`."""
    mode = {'is_training': is_training}
    memory = self.encode(encoder_tokens, tokens.shape[1], **mode)
    return self.predict(tokens, is_known, starts, memory, width=width, **mode)

  def _copies(
    self, embedded: Array, source_mask: Array, num_positions: int
  ) -> Array:
    """Attention of N positions to the source's embeddings: `[B, E, embed]` to
    `[B, N, embed]`. T5's embeddings being larger than those of the paper, the
    scores are divided by sqrt(embed)."""
    queries = self.copy_query(self.decoder_positions(_ids(num_positions)))[0]
    source = embedded + self.encoder_positions(_ids(embedded.shape[1]))
    scores = jnp.einsum(
      'nd,bed->bne', queries, source, preferred_element_type=jnp.float32
    )
    scores = scores * self.config.embed_dim**-0.5
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(source_mask[:, None, :], scores, lowest)
    weights = jax.nn.softmax(scores, axis=-1).astype(embedded.dtype)
    return jnp.einsum('bne,bed->bnd', weights, embedded)


def _ids(count: int) -> Array:
  """Position ids `[1, count]`."""
  return jnp.arange(count, dtype=jnp.int32)[None]


def encoder_config(config: BlockDecoderConfig) -> T5Config:
  """The T5 whose encoder a drafter has."""
  sizes = dataclasses.asdict(config)
  del sizes['max_positions']
  return T5Config(**sizes)


def init_params(config: BlockDecoderConfig, rng_key: Array) -> Any:
  """Fresh float32 parameters."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  return BlockDecoder(config).init(
    rng_key, tokens, tokens, tokens > 0, tokens[0], width=1
  )['params']


def block_model(config: BlockDecoderConfig) -> BlockModel:
  """The network of a Spec-Drafter; its params are those of `BlockDecoder`. A
  text and block that exceed its positions raise ValueError while tracing."""
  apply = applied(BlockDecoder(config))

  def init(params, encoder_tokens: Array, num_positions: int) -> BlockMemory:
    room = min(num_positions, config.max_positions)
    return apply(params, encoder_tokens, room, method=BlockDecoder.encode)

  def predict(
    params, tokens: Array, lengths: Array, memory: BlockMemory, width: int
  ) -> Array:
    is_known = arrays.is_within(lengths, tokens.shape[1])
    args = params, tokens, is_known, lengths, memory
    return apply(*args, width=width, method=BlockDecoder.predict)

  return BlockModel(init, predict, config.vocab_size)
