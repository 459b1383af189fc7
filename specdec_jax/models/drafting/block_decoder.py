"""The network of the Spec-Drafter (Xia et al., arXiv 2203.16487): an encoder,
and a decoder that fills a block of masks in one pass.

The decoder reads `[y_1 .. y_p, mask x k]`, unshifted, and attends in both
directions. As in the paper, a mask is embedded as a soft copy of the source,
learned positions are added again at every layer, and norms follow residual
additions. The encoder is a T5's, under T5X's names, so that a target's weights
fit, while the paper's targets and drafters are all of BERT's kind.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array
from specdec_jax.drafters.spec_drafter import BlockModel
from specdec_jax.models import kv_cache, layers
from specdec_jax.models.kv_cache import Cross, CrossCache
from specdec_jax.models.networks import Bound, Network
from specdec_jax.models.t5 import Encoder
from specdec_jax.models.t5_layers import Attention, T5Config
from specdec_jax.sharding import rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDecoderConfig:
  """Sizes of a Spec-Drafter, named as in `T5Config`.

  Attributes:
    vocab_size: the target's.
    num_encoder_layers: cheap, as the encoder runs once per decode.
    num_decoder_layers: costly, as the decoder runs once per iteration.
    max_positions: rows of the position tables, which limit sources, and texts
      with their block.
    mlp_activations: the encoder's, as are relative positions; the decoder's is
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

  @property
  def is_tied(self) -> bool:
    """Always true: logits reuse the embeddings."""
    return True


@base.value
class BlockMemory:
  """Everything that depends on the source alone, computed once per decode.

  Attributes:
    copies: `[B, N, embed]`, the embedding of a mask at each position.
    copy_keys_values: `[B, H, N, D]` each, of masks in the first layer.
    source: each layer's cross-attention keys and values.
  """

  copies: Array
  copy_keys_values: tuple[Array, Array]
  source: CrossCache


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
    self.mlp = layers.Mlp(
      config.mlp_dim, ('gelu',), config.dtype, config.dropout_rate
    )
    self.mlp_layer_norm = norm()
    self.dropout = layers.Dropout(config.dropout_rate)

  def __call__(
    self, queries: Array, keys: Array, values: Array, mask: Array, cross: Cross
  ) -> Array:
    """Applies the layer: `[R, T, embed]` attends to `[R, H, S, D]` under a mask
    `[R, 1 or T, S]`, and to the source under the mask `[B, 1, E]` in `cross`; R
    is a multiple of B."""
    h = self.self_attention(queries, keys, values, mask)
    x = self.self_attention_layer_norm(queries + self.dropout(h))
    # Blocks of a text share its source: 6 rows of T, 3 blocks of each of 2
    # texts, become 2 rows of 3 T.
    by_source = x.reshape(len(cross[0]), -1, x.shape[-1])
    h = self.encoder_decoder_attention(by_source, *cross).reshape(x.shape)
    x = self.cross_attention_layer_norm(x + self.dropout(h))
    return self.mlp_layer_norm(x + self.dropout(self.mlp(x)))


class BlockDecoder(nn.Module):
  """The whole network; all its embeddings of tokens are one table."""

  config: BlockDecoderConfig

  def setup(self):
    config = self.config
    t5_config = encoder_config(config)
    embed = functools.partial(layers.Embed, dtype=config.dtype)
    self.token_embedder = embed(config.vocab_size, config.embed_dim)
    self.encoder = Encoder(t5_config)
    self.encoder_positions = embed(config.max_positions, config.embed_dim)
    self.decoder_positions = embed(config.max_positions, config.embed_dim)
    self.copy_query = layers.Dense(config.embed_dim, config.dtype)
    self.layers = [
      BlockLayer(t5_config) for _ in range(config.num_decoder_layers)
    ]
    self.dropout = layers.Dropout(config.dropout_rate)

  def encode(self, encoder_tokens: Array, num_positions: int) -> BlockMemory:
    """Encodes a source int32 `[B, E]`, 0 where padded, for texts of up to N =
    `num_positions`. Raises ValueError if E or N exceeds `max_positions`."""
    source_len, limit = encoder_tokens.shape[1], self.config.max_positions
    # Positions are learned: there are no more than the table has rows.
    if max(source_len, num_positions) > limit:
      raise ValueError(
        f'{source_len} source and {num_positions} text positions exceed the '
        f'{limit} that the drafter was trained with: give shorter ones'
      )
    source_mask = encoder_tokens > 0
    embedded = self.token_embedder(encoder_tokens)
    encoded = self.encoder(embedded, source_mask[:, None])
    source = kv_cache.crossed(self.config, self.layers, encoded, source_mask)
    # A mask's embedding knows its position and, softly, the source there.
    copies = self._copies(embedded, source_mask, num_positions)
    copies = self.dropout(copies)
    keys_values = self._text_keys_values(copies)
    return BlockMemory(
      copies=copies, copy_keys_values=keys_values, source=source
    )

  def hidden(
    self,
    tokens: Array,
    is_known: Array,
    starts: Array,
    memory: BlockMemory,
    *,
    width: int,
  ) -> Array:
    """Computes the hidden states of C blocks of each text, which do not see
    each other. In training, use the random key named `dropout` that `encode`
    had, so that tokens and masks have the same dropout.

    Args:
      tokens: int32 `[B, N]`; only known ones are read.
      is_known: bool `[B, C, N]`: the prefix, and the revealed part of a block.
      starts: int32 `[B, C]`, the first position of each block.
      memory: from `encode`, with room for N positions; ValueError otherwise.
      width: positions of a block, at most N.

    Returns:
      `[B, C, width, embed]`, the input of `project`.
    """
    (num_texts, num_blocks), num_positions = starts.shape, tokens.shape[1]
    if num_positions > (room := memory.copies.shape[1]):
      raise ValueError(
        f'{num_positions} positions do not fit in {room}: encode for as many'
      )
    # [texts, blocks, ...] as rows: by text for what all blocks share, such as
    # the source, and by block for what they do not.
    by_text = lambda x: x.reshape(num_texts, -1, x.shape[-1])
    by_block = lambda x: x.reshape(num_texts * num_blocks, -1, x.shape[-1])
    block = arrays.block_positions(starts.reshape(-1), width)
    ends = starts.reshape(-1) + width
    # The block's own positions, except those revealed in training: start 2,
    # width 3, with position 2 revealed, masks 3 and 4.
    is_masked = arrays.is_within(ends, num_positions).reshape(is_known.shape)
    is_masked &= ~is_known
    embedded = self.dropout(self.token_embedder(tokens))
    copies = memory.copies[:, :num_positions]
    positions = self.decoder_positions(_ids(num_positions))
    x = jnp.where(is_known[..., None], embedded[:, None], copies[:, None])
    x = by_block(x)
    for i, layer in enumerate(self.layers):
      # Positions are added again at every layer, as in the paper.
      x = queries = x + positions
      if i + 1 == len(self.layers):
        # The last layer's outputs at the prefix would not be used.
        queries = jnp.take_along_axis(x, block[..., None], axis=1, mode='clip')
      if i == 0:
        keys, values = self._first_keys_values(embedded, memory)
        mask = jnp.concatenate([is_known, is_masked], axis=-1)
        mask = jnp.repeat(mask, queries.shape[1], axis=1)
        queries = by_text(queries)
      else:
        keys, values = layer.self_attention.keys_values(x)
        mask = by_block(is_known | is_masked)
      x = layer(queries, keys, values, mask, memory.source.by_layer[i])
      x = rules.constrain(by_block(x), 'batch', 'length', 'embed')
    return x.reshape(num_texts, num_blocks, width, -1)

  def project(self, x: Array) -> Array:
    """Projects hidden states `[B, T, embed]` to float32 logits `[B, T, V]`."""
    logits = self.token_embedder.attend(x) * self.config.embed_dim**-0.5
    return rules.constrain(logits, 'batch', 'length', 'vocab')

  def _first_keys_values(
    self, embedded: Array, memory: BlockMemory
  ) -> tuple[Array, Array]:
    """Computes the first layer's keys and values for all blocks, `[B, H, 2 N,
    D]`."""
    # They do not depend on the block: a position has one entry as a token and
    # one as a mask, and a block's attention mask shows one of the two.
    token_entries = self._text_keys_values(embedded)
    mask_entries = memory.copy_keys_values
    num_positions = embedded.shape[1]
    keys, values = (
      jnp.concatenate([of_token, of_mask[:, :, :num_positions]], axis=2)
      for of_token, of_mask in zip(token_entries, mask_entries, strict=True)
    )
    return keys, values

  def _text_keys_values(self, x: Array) -> tuple[Array, Array]:
    """Computes the first layer's keys and values of `[B, N, embed]`."""
    x = x + self.decoder_positions(_ids(x.shape[1]))
    return self.layers[0].self_attention.keys_values(x)

  def __call__(
    self,
    encoder_tokens: Array,
    tokens: Array,
    is_known: Array,
    starts: Array,
    *,
    width: int,
  ) -> Array:
    """Fills the block of positions `starts[b]` to `starts[b] + width - 1`:
    float32 logits `[B, width, V]`. Arguments are those of `encode` and, for one
    block of each text, of `hidden`: bool `[B, N]` and int32 `[B]`."""
    memory = self.encode(encoder_tokens, tokens.shape[1])
    of_one = is_known[:, None], starts[:, None]
    x = self.hidden(tokens, *of_one, memory, width=width)
    return self.project(x[:, 0])

  def _copies(
    self, embedded: Array, source_mask: Array, num_positions: int
  ) -> Array:
    """Attends from N positions to the source's embeddings: `[B, E, embed]` to
    `[B, N, embed]`."""
    # Position n asks the source for what it may be a translation of.
    queries = self.copy_query(self.decoder_positions(_ids(num_positions)))[0]
    source = embedded + self.encoder_positions(_ids(embedded.shape[1]))
    scores = jnp.einsum(
      'nd,bed->bne', queries, source, preferred_element_type=jnp.float32
    )
    # Scaled, as T5's embeddings are larger than the paper's; padding of the
    # source is masked.
    scores = scores * self.config.embed_dim**-0.5
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(source_mask[:, None, :], scores, lowest)
    weights = jax.nn.softmax(scores, axis=-1).astype(embedded.dtype)
    return jnp.einsum('bne,bed->bnd', weights, embedded)


def _ids(count: int) -> Array:
  """Makes position ids `[1, count]`."""
  return jnp.arange(count, dtype=jnp.int32)[None]


def encoder_config(config: BlockDecoderConfig) -> T5Config:
  """Makes the sizes of a T5 with the drafter's encoder."""
  # All fields but one have the names of `T5Config`.
  sizes = dataclasses.asdict(config)
  del sizes['max_positions']
  return T5Config(**sizes)


def init_params(config: BlockDecoderConfig, rng_key: Array) -> layers.Weights:
  """Initialises float32 parameters."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  return BlockDecoder(config).init(
    rng_key, tokens, tokens, tokens > 0, tokens[0], width=1
  )['params']


def block_model(config: BlockDecoderConfig) -> BlockModel:
  """Makes the functions of a Spec-Drafter; its params are those of
  `BlockDecoder`. They raise ValueError while tracing if a text and its block
  exceed `max_positions`."""
  apply = layers.applied(BlockDecoder(config))

  def init(params, encoder_tokens: Array, num_positions: int) -> BlockMemory:
    room = min(num_positions, config.max_positions)
    return apply(params, encoder_tokens, room, method=BlockDecoder.encode)

  def predict(
    params, tokens: Array, lengths: Array, memory: BlockMemory, width: int
  ) -> Array:
    # The whole prefix is known, and the block behind it is masked.
    is_known = arrays.is_within(lengths, tokens.shape[1])
    args = params, tokens, is_known[:, None], lengths[:, None], memory
    x = apply(*args, width=width, method=BlockDecoder.hidden)
    return apply(params, x[:, 0], method=BlockDecoder.project)

  return BlockModel(init, predict, config.vocab_size)


def bind(target: Network, config: BlockDecoderConfig, *, width: int) -> Bound:
  """Makes the network for `drafters.spec_drafter`, which reads no target."""
  del target, width
  return Bound(model=block_model(config))
