"""The network of a block drafter: DFlash (arXiv 2602.06036) with DSpark's heads
(arXiv 2607.05147), for decoders with and without an encoder.

`join` maps residual streams of the target at a committed position to one
vector, of which every layer makes keys and values, kept in a cache. Only the
block runs through the layers: the embedding of the anchor, the last committed
token, and masks. Its positions see the text before the anchor and each other,
in both directions. The output of slot i is projected by the target's own head
to the logits of the token i + 1 after the anchor (in DFlash i, so that the
anchor's slot drafts nothing); a Markov head adds what the token before it says.

Behind an encoder, layers also attend to the source, with keys and values that
layers of the target have in their cache already.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Placement
from specdec_jax.drafters.block import BlockNetwork
from specdec_jax.models import attention, kv_cache, quantized, taps
from specdec_jax.models.drafting.block_layers import (
  BlockDrafterConfig,
  BlockLayer,
  Sight,
  layer_sights,
)
from specdec_jax.models.drafting.draft_vocabulary import (
  check_target_ids,
  spread,
)
from specdec_jax.models.kv_cache import Cross, KVCache
from specdec_jax.models.layers import (
  LOGITS,
  Dense,
  Embed,
  RMSNorm,
  Weights,
  applied,
  parameter,
)
from specdec_jax.models.llama import MixFn
from specdec_jax.models.networks import Bound, Network

# The name of the embedding in masked slots.
MASK = 'mask_embedding'


class BlockDrafter(nn.Module):
  """The network; `init_params` makes its parameters.

  They include `target_ids`, int32 `[V_draft]`: the target's id of each token
  that can be drafted. Token embeddings and the projection to logits are the
  target's: `bind` adds the latter, as `logits_dense`, and with a
  `mask_token_id` the `mask_embedding`.
  """

  config: BlockDrafterConfig

  def setup(self):
    config = self.config
    norm = functools.partial(RMSNorm, config.norm_epsilon, config.dtype)
    if config.feature_norms:
      self.feature_norms = [norm() for _ in config.feature_layers]
    self.features_dense = Dense(config.embed_dim, config.dtype)
    self.context_norm = norm()
    normal = nn.initializers.normal(stddev=1.0)
    self.mask_embedding = parameter(self, MASK, normal, (config.embed_dim,))
    self.layers = [BlockLayer(config) for _ in range(config.num_layers)]
    self.decoder_norm = norm()
    self.logits_dense = Dense(config.draft_vocab_size)
    if config.markov_rank:
      self._setup_markov_head()
    if config.has_confidence:
      self.confidence_dense = Dense(1, use_bias=True)
    first_ids = lambda key, shape: jnp.arange(shape[0], dtype=jnp.int32)
    self.target_ids = parameter(
      self, 'target_ids', first_ids, (config.draft_vocab_size,)
    )

  def _setup_markov_head(self):
    config, rank = self.config, self.config.markov_rank
    self.markov_embedder = Embed(config.vocab_size, rank, config.dtype)
    self.markov_dense = Dense(config.draft_vocab_size)
    if config.markov_head == 'gated':
      self.markov_gate = Dense(rank, config.dtype, use_bias=True)
    if config.markov_head == 'rnn':
      # Gate, candidate and output, side by side.
      self.markov_step = Dense(3 * rank, config.dtype, use_bias=True)

  def join(self, features: Array) -> Array:
    """Maps the target's streams `[B, T, k * embed]`, lower layers first, to the
    context `[B, T, embed]`."""
    if self.config.feature_norms:
      parts = jnp.split(features, len(self.feature_norms), axis=-1)
      normed = [
        norm(part) for norm, part in zip(self.feature_norms, parts, strict=True)
      ]
      features = jnp.concatenate(normed, axis=-1)
    return self.context_norm(self.features_dense(features))

  def keys_values(
    self, context: Array, positions: Array
  ) -> list[tuple[Array, Array]]:
    """Makes each layer's keys and values `[B, KV, T, D]` of the context, at
    int32 `[B, T]`."""
    return [
      layer.attention.keys_values(context, positions) for layer in self.layers
    ]

  def embed_block(self, anchors: Array) -> Array:
    """Puts masks after the embeddings `[..., embed]` of anchors: `[..., k,
    embed]`."""
    config = self.config
    shape = *anchors.shape[:-1], config.block_size - 1, config.embed_dim
    masks = jnp.broadcast_to(self.mask_embedding.astype(config.dtype), shape)
    anchors = anchors.astype(config.dtype)[..., None, :]
    return jnp.concatenate([anchors, masks], axis=-2)

  def __call__(
    self,
    x: Array,
    cache: KVCache,
    placement: Placement,
    crosses: list[Cross] | None = None,
    mixes: list[MixFn] | None = None,
  ) -> tuple[Array, KVCache]:
    """Runs blocks `[B, T, embed]` of `embed_block` through the layers.

    Args:
      x: a block of each row; in training several, end to end.
      cache: keys and values of the text before the block.
      placement: positions of the block, and what it could see; layers narrow
        it to what theirs do.
      crosses: what each layer reads of the encoder, in a network that does.
      mixes: each layer's other attention, for training; see `SelfAttention`.

    Returns:
      The hidden states `[B, T, embed]` that the heads take, and the cache, with
      the block's keys and values behind its text.
    """
    all_keys, all_values = [], []
    sights = layer_sights(self.config)
    for i, layer in enumerate(self.layers):
      x, keys, values = layer(
        x,
        cache.keys[i],
        cache.values[i],
        cache.lengths,
        _narrowed(placement, sights[i]),
        crosses[i] if crosses else None,
        mixes[i] if mixes else None,
      )
      all_keys.append(keys)
      all_values.append(values)
    cache = dataclasses.replace(
      cache, keys=tuple(all_keys), values=tuple(all_values)
    )
    return self.decoder_norm(x), cache

  def project(self, hidden: Array) -> Array:
    """Projects hidden states `[..., embed]` to float32 logits `[..., V_draft]`,
    of the tokens `target_ids`, before the Markov head."""
    return self.logits_dense(hidden)

  def bias(
    self, tokens: Array, hidden: Array, state: Array
  ) -> tuple[Array, Array]:
    """Computes what the Markov head adds to the logits of slots.

    Args:
      tokens: int32 `[...]`, the token before each slot.
      hidden: `[..., embed]`, of the slots.
      state: float32 `[..., R]`, after the slots before; zeros at first.

    Returns:
      Float32 `[..., V_draft]`, and the state after these slots.
    """
    config = self.config
    embedded = self.markov_embedder(tokens)
    if config.markov_head == 'gated':
      both = jnp.concatenate([hidden, embedded], axis=-1)
      embedded = embedded * jax.nn.sigmoid(self.markov_gate(both))
    if config.markov_head == 'rnn':
      carried = state.astype(config.dtype)
      inputs = jnp.concatenate([carried, embedded, hidden], axis=-1)
      gate, candidate, output = jnp.split(self.markov_step(inputs), 3, axis=-1)
      gate = jax.nn.sigmoid(gate)
      carried = gate * carried + (1 - gate) * jnp.tanh(candidate)
      state, embedded = carried.astype(jnp.float32), jnp.tanh(output)
    return self.markov_dense(embedded), state

  def confidence(self, tokens: Array, hidden: Array) -> Array:
    """Computes the logit, float32 `[...]`, of the probability that a slot is
    accepted once those before it are; arguments as those of `bias`."""
    if self.config.markov_rank:
      embedded = self.markov_embedder(tokens)
      hidden = jnp.concatenate([hidden, embedded], axis=-1)
    return self.confidence_dense(hidden.astype(jnp.float32))[..., 0]


def init_params(config: BlockDrafterConfig, rng_key: Array) -> Weights:
  """Initialises float32 parameters; `target_ids` are the first token ids."""
  cross_shape = 1, max(config.cross_num_heads, 1), 1, config.cross_head_dim

  def use_all(network: BlockDrafter) -> Array:
    # Flax makes a parameter where it is first used, so all methods are called.
    num_features = len(config.feature_layers) * config.embed_dim
    context = network.join(jnp.zeros((1, 1, num_features)))
    token = jnp.zeros((1, 1), jnp.int32)
    network.keys_values(context, token)
    anchors = jnp.zeros((1, config.embed_dim))
    size = config.block_size
    cache = kv_cache.init(config, 1, size, config.num_layers)
    placement = block_placement(config, cache)
    source = jnp.zeros(cross_shape)
    cross = source, source, jnp.ones((1, 1, 1), jnp.bool_)
    crosses = [cross] * config.num_layers if config.cross_layers else None
    hidden, _ = network(network.embed_block(anchors), cache, placement, crosses)
    logits = network.project(hidden)
    first = hidden[:, :1]
    if config.markov_rank:
      state = jnp.zeros((1, 1, config.state_size))
      logits, _ = network.bias(token, first, state)
    if config.has_confidence:
      network.confidence(token, first)
    return logits

  network = BlockDrafter(config)
  params: Weights = network.init(rng_key, method=use_all)['params']
  # The target's: neither trained nor stored.
  absent = {LOGITS} if config.mask_token_id is None else {LOGITS, MASK}
  return {name: leaf for name, leaf in params.items() if name not in absent}


def check_params(config: BlockDrafterConfig, params: Weights) -> None:
  """Raises ValueError unless `target_ids` are distinct tokens of the target."""
  check_target_ids(params['target_ids'], config.vocab_size)


def block_placement(config: BlockDrafterConfig, cache: KVCache) -> Placement:
  """Places a block behind the text in the cache, all of which could see the
  text and the whole block."""
  size = config.block_size
  placement = attention.placed(cache.lengths, size, cache.capacity)
  is_seen = arrays.is_within(cache.lengths + size, cache.capacity)
  mask = jnp.broadcast_to(is_seen[:, None], placement.mask.shape)
  return dataclasses.replace(placement, mask=mask)


def _narrowed(placement: Placement, sight: Sight) -> Placement:
  """Narrows the placement of a block to what its slots see in a layer."""
  positions = placement.positions
  is_seen = sight.sees(
    positions[:, :, None],
    placement.key_positions[:, None, :],
    positions[:, :1, None],
  )
  return dataclasses.replace(placement, mask=placement.mask & is_seen)


def with_mask(
  config: BlockDrafterConfig, params: Weights, embedder: Weights
) -> Weights:
  """Adds the target's embedding of the token that stands in masked slots to
  the network's parameters, unless they have an embedding of their own."""
  if config.mask_token_id is None:
    return params
  ids = jnp.full((1, 1), config.mask_token_id, jnp.int32)
  return params | {MASK: quantized.look_up(embedder, ids, config.dtype)[0, 0]}


def head_rows(target: Network, params: Weights, ids: Array) -> Weights:
  """Takes the target's projection to the logits of the tokens `ids`, `[N]`, as
  the parameters of a `Dense`."""
  # Of packed weights too, which `look_up` and `unpacked` multiply out.
  dtype = target.config.dtype
  if target.config.is_tied:
    embedder = target.token_embedder(params)
    rows = quantized.look_up(embedder, ids[None], dtype)[0]
    return {'kernel': rows.T}
  head = params.get(LOGITS) or params['decoder'][LOGITS]
  kernel, scale = head['kernel'], head.get('kernel' + quantized.SCALE)
  if scale is not None:
    kernel = quantized.unpacked(kernel, scale, dtype)
  return {'kernel': jnp.take(kernel, ids, axis=1)}


@base.value
class BlockCache:
  """What a block drafter keeps between calls.

  Attributes:
    text: keys and values of the text that the target has read.
    hidden: `[B, D, embed]`, of the slots of the last block that draft.
    logits: float32 `[B, D, V_draft]`, theirs without the Markov head.
  """

  text: KVCache
  hidden: Array
  logits: Array

  @property
  def lengths(self) -> Array:
    return self.text.lengths

  @property
  def capacity(self) -> int:
    return self.text.capacity


def bind(target: Network, config: BlockDrafterConfig, *, width: int) -> Bound:
  """Binds the network to a target, for `drafters.block`; the target then keeps
  what the network reads at the first `width` tokens of a call.

  The drafter's params are `{'block': ..., 'token_embedder': ...}`: those of the
  network, with the target's projection to logits, and the target's token
  embeddings.
  Logits are of the target's vocabulary, those of tokens that are not in the
  draft vocabulary `NEVER`. Raises ValueError if the target's width, layers or
  encoder do not fit.
  """
  _check_fits(target, config)

  def join(params: Weights, block_params: Weights) -> Weights:
    def completed(params: Weights, block_params: Weights) -> Weights:
      rows = head_rows(target, params, block_params['target_ids'])
      embedder = target.token_embedder(params)
      return with_mask(config, {**block_params, LOGITS: rows}, embedder)

    # Trees of shapes are joined, too.
    if isinstance(block_params['target_ids'], jax.ShapeDtypeStruct):
      block = jax.eval_shape(completed, params, block_params)
    else:
      block = completed(params, block_params)
    return {'block': block, 'token_embedder': target.token_embedder(params)}

  return Bound(
    model=_model(config, target.config.vocab_size),
    target=taps.last_call(target, config.feature_layers, width=width),
    join=join,
  )


def _check_fits(target: Network, config: BlockDrafterConfig) -> None:
  """Raises ValueError unless the network was made for such a target."""
  embed_dim = target.config.embed_dim
  if embed_dim != config.embed_dim:
    raise ValueError(
      f'the drafter is for a width of {config.embed_dim}, not {embed_dim}: '
      'give the target that it was trained for'
    )
  taps.check(target, config.feature_layers)
  if not config.cross_layers:
    return
  if not target.has_encoder:
    raise ValueError(
      'the drafter attends to a source, and the target has no encoder: give '
      'the target that it was trained for'
    )
  if max(config.cross_layers) >= target.num_layers:
    raise ValueError(
      f'cross_layers {list(config.cross_layers)} are not layers of a target of '
      f'{target.num_layers}'
    )


def _model(config: BlockDrafterConfig, vocab_size: int) -> BlockNetwork:
  """Makes the functions of the network, with logits of `vocab_size` tokens."""
  apply = applied(BlockDrafter(config))
  size = config.block_size

  def init(params: Weights, batch_size: int, max_len: int) -> BlockCache:
    # A block is written behind the text, and needs room.
    text = kv_cache.init(config, batch_size, max_len + size, config.num_layers)
    shape = batch_size, config.num_drafts
    return BlockCache(
      text=text,
      hidden=jnp.zeros((*shape, config.embed_dim), config.dtype),
      logits=jnp.zeros((*shape, config.draft_vocab_size), jnp.float32),
    )

  def read(params: Weights, features: Array, cache: BlockCache) -> BlockCache:
    block_params = params['block']
    text = cache.text
    context = apply(block_params, features, method=BlockDrafter.join)
    positions = arrays.block_positions(text.lengths, context.shape[1])
    pairs = apply(
      block_params, context, positions, method=BlockDrafter.keys_values
    )
    append = functools.partial(kv_cache.append, lengths=text.lengths)
    keys, values = zip(*pairs, strict=True)
    text = dataclasses.replace(
      text,
      keys=tuple(map(append, text.keys, keys)),
      values=tuple(map(append, text.values, values)),
      lengths=text.lengths + context.shape[1],
    )
    return dataclasses.replace(cache, text=text)

  def fill(
    params: Weights, anchors: Array, cache: BlockCache, target_cache: KVCache
  ) -> BlockCache:
    block_params = params['block']
    rows = quantized.look_up(
      params['token_embedder'], anchors[:, None], config.dtype
    )
    x = apply(block_params, rows[:, 0], method=BlockDrafter.embed_block)
    sources = target_cache.crosses
    crosses = [sources[layer] for layer in config.cross_layers]
    placement = block_placement(config, cache.text)
    hidden, text = apply(block_params, x, cache.text, placement, crosses)
    hidden = hidden[:, size - config.num_drafts :]
    logits = apply(block_params, hidden, method=BlockDrafter.project)
    return BlockCache(text=text, hidden=hidden, logits=logits)

  def score(
    params: Weights,
    tokens: Array,
    slots: Array,
    state: Array,
    cache: BlockCache,
  ) -> tuple[Array, Array]:
    block_params = params['block']
    # A tree's nodes of one depth read the same slot.
    pick = functools.partial(
      jnp.take_along_axis, indices=slots[..., None], axis=1, mode='clip'
    )
    logits = pick(cache.logits)
    if config.markov_rank:
      bias, state = apply(
        block_params,
        tokens,
        pick(cache.hidden),
        state,
        method=BlockDrafter.bias,
      )
      logits = logits + bias
    return spread(logits, block_params['target_ids'], vocab_size), state

  confidence = None
  if config.has_confidence:
    confidence = functools.partial(_confidence, apply)
  return BlockNetwork(
    init, read, fill, score, confidence, config.state_size, _rewind
  )


def _confidence(
  apply: Callable[..., Array],
  params: Weights,
  tokens: Array,
  slots: Array,
  cache: BlockCache,
) -> Array:
  """Computes `BlockNetwork.confidence`, with the network's `applied`."""
  hidden = jnp.take_along_axis(
    cache.hidden, slots[..., None], axis=1, mode='clip'
  )
  method = BlockDrafter.confidence
  scores = apply(params['block'], tokens, hidden, method=method)
  return jax.nn.sigmoid(scores)


def _rewind(cache: BlockCache, lengths: Array) -> BlockCache:
  text = kv_cache.rewind(cache.text, lengths)
  return dataclasses.replace(cache, text=text)
