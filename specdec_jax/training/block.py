"""How a block drafter learns (DFlash, arXiv 2602.06036; DSpark, 2607.05147).

It learns from texts that its target wrote, and from the target's states along
them (`block_states`). Blocks after random anchors of a text run through the
network in one pass, none of which sees another.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Placement
from specdec_jax.checkpoints import loading
from specdec_jax.models import families, quantized
from specdec_jax.models.drafting.block_drafter import (
  MASK,
  BlockDrafter,
  head_rows,
  with_mask,
)
from specdec_jax.models.drafting.block_layers import (
  BlockDrafterConfig,
  Sight,
  layer_sights,
)
from specdec_jax.models.kv_cache import KVCache
from specdec_jax.models.layers import LOGITS, applied
from specdec_jax.training import block_states, chunked
from specdec_jax.training.block_states import TargetStates
from specdec_jax.training.eagle import lk_loss
from specdec_jax.training.losses import ArrayTree, Batch, LossFn, LossSums

POSITION_WEIGHTS = ('exponential', 'dpace')
# Blocks whose logits are computed at a time.
_BLOCKS_PER_PART = 32
# What `_loss_sums` reads of the parameters; Flax looks up the first always.
_HEADS = (
  MASK,
  'markov_embedder',
  'markov_dense',
  'markov_gate',
  'markov_step',
  'confidence_dense',
)


@dataclasses.dataclass(frozen=True)
class BlocksAttention:
  """The attention of A blocks in each row, for `BlockDrafter`'s `mixes`: each
  block sees the text before its anchor and itself.

  Attributes:
    keys: `[B, KV, T, D]`, a layer's, of the text; as `values`.
    anchors: int32 `[B, A]`, the anchors' positions in the row.
    starts: int32 `[B, A]`, where in the row the texts of the anchors begin.
    sight: what slots see in the layer.
  """

  keys: Array
  values: Array
  anchors: Array
  starts: Array
  sight: Sight

  def __call__(self, queries: Array, keys: Array, values: Array) -> Array:
    batch, num_heads, num_slots, head_dim = queries.shape
    num_kv_heads, num_anchors = keys.shape[1], self.anchors.shape[1]
    size, group = num_slots // num_anchors, num_heads // num_kv_heads
    queries = queries * jnp.asarray(head_dim**-0.5, queries.dtype)
    # Queries of one block that share keys stand together, `[B, KV, A, G * k]`.
    queries = queries.reshape(
      batch, num_kv_heads, group, num_anchors, size, head_dim
    ).transpose(0, 1, 3, 2, 4, 5)
    # XLA:CPU multiplies bfloat16 only in batches of two axes.
    by_head = (batch, num_kv_heads, -1, head_dim)
    by_block = (batch, num_kv_heads * num_anchors, -1, head_dim)
    keys, values = keys.reshape(by_block), values.reshape(by_block)
    of_text = _product('bhqd,bhsd->bhqs', queries.reshape(by_head), self.keys)
    of_block = _product('bnqd,bnud->bnqu', queries.reshape(by_block), keys)
    # One softmax over the text before the anchor and the block.
    sees_text, sees_block = self._masks(size)
    shape = batch, num_kv_heads, num_anchors, group, size, -1
    lowest = jnp.finfo(jnp.float32).min
    of_text = jnp.where(
      sees_text[:, None, :, None], of_text.reshape(shape), lowest
    )
    of_block = jnp.where(sees_block, of_block.reshape(shape), lowest)
    scores = jnp.concatenate([of_text, of_block], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    length = self.keys.shape[2]
    of_text, of_block = weights[..., :length], weights[..., length:]
    mixed = _product(
      'bhqs,bhsd->bhqd',
      of_text.reshape(batch, num_kv_heads, -1, length),
      self.values,
    ).reshape(queries.shape)
    mixed += _product(
      'bnqu,bnud->bnqd',
      of_block.reshape(batch, num_kv_heads * num_anchors, -1, size),
      values,
    ).reshape(queries.shape)
    # [B, KV, A, G, k, D] to slots, each with all of its heads.
    mixed = mixed.astype(values.dtype).transpose(0, 2, 4, 1, 3, 5)
    return mixed.reshape(batch, num_slots, num_heads * head_dim)

  def _masks(self, size: int) -> tuple[Array, Array]:
    """Marks what the slots see: bool `[B, A, k, T]` of the text and `[1, 1, 1,
    1, k, k]` of their block."""
    entries = jnp.arange(self.keys.shape[2], dtype=jnp.int32)
    entries = entries[None, None, None]
    slots = jnp.arange(size, dtype=jnp.int32)[:, None]
    # The target has read what is before the anchor: anchor 2 sees 0 and 1.
    anchors = self.anchors[:, :, None, None]
    sees_text = self.sight.sees(anchors + slots[None, None], entries, anchors)
    starts = self.starts[:, :, None, None]
    sees_text &= (starts <= entries) & (entries < anchors)
    sees_text = jnp.broadcast_to(
      sees_text, (*self.anchors.shape, size, entries.size)
    )
    start = jnp.zeros((1, 1), jnp.int32)
    sees_block = self.sight.sees(slots, slots.T, start)
    sees_block = jnp.broadcast_to(sees_block, (size, size))
    return sees_text, sees_block[None, None, None, None]


def _product(equation: str, *operands: Array) -> Array:
  return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)


def hidden_of_blocks(
  config: BlockDrafterConfig,
  params: ArrayTree,
  embedding: ArrayTree,
  tokens: Array,
  anchors: Array,
  states: TargetStates,
  segments: Array | None = None,
) -> Array:
  """Computes the hidden states of all slots that draft, `[B, A, D, embed]`.

  Args:
    config: the network's sizes.
    params: its parameters, `with_mask`, in the config's dtype.
    embedding: the parameters of the target's token embeddings.
    tokens: int32 `[B, T]`, as the target read them.
    anchors: int32 `[B, A]`, positions in the text.
    states: the target's, of the same texts.
    segments: int32 `[B, T]`, a number for each text of a row, in their order;
      by default a row has one text.
  """
  apply = applied(BlockDrafter(config))
  batch, num_anchors = anchors.shape
  starts = jnp.zeros_like(anchors)
  if segments is not None:
    of_anchors = jnp.take_along_axis(segments, anchors, axis=1)
    # Of segments [1, 1, 2, 2, 0], that of anchor 3 begins at 2.
    is_same = segments[:, None] == of_anchors[..., None]
    starts = jnp.argmax(is_same, axis=-1).astype(jnp.int32)
  size = config.block_size
  context = apply(params, states.features, method=BlockDrafter.join)
  positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  pairs = apply(params, context, positions, method=BlockDrafter.keys_values)
  mixes = [
    BlocksAttention(keys, values, anchors, starts, sight)
    for (keys, values), sight in zip(pairs, layer_sights(config), strict=True)
  ]
  anchor_tokens = jnp.take_along_axis(tokens, anchors, axis=1)
  rows = quantized.look_up(embedding, anchor_tokens, config.dtype)
  x = apply(params, rows, method=BlockDrafter.embed_block)
  offsets = jnp.arange(size, dtype=jnp.int32)
  slot_positions = anchors[..., None] + offsets[None, None]
  hidden, _ = apply(
    params,
    x.reshape(batch, num_anchors * size, config.embed_dim),
    _no_cache(config),
    _at(slot_positions.reshape(batch, -1)),
    states.crosses or None,
    mixes,
  )
  hidden = hidden.reshape(batch, num_anchors, size, config.embed_dim)
  return hidden[:, :, size - config.num_drafts :]


def _no_cache(config: BlockDrafterConfig) -> KVCache:
  """Makes what stands for the cache, which `mixes` replace."""
  nothing = (jnp.zeros((0, 0, 0, 0), config.dtype),) * config.num_layers
  lengths = jnp.zeros(0, jnp.int32)
  return KVCache(keys=nothing, values=nothing, lengths=lengths)


def _at(positions: Array) -> Placement:
  """Places slots, `[B, A * k]`, for their rotations; `mixes` have the masks."""
  nowhere = jnp.zeros((1, 0), jnp.int32)
  return Placement(
    positions=positions,
    key_positions=nowhere,
    mask=jnp.zeros((1, 1, 0), jnp.bool_),
  )


def random_anchors(key: Array | None, weights: Array, count: int) -> Array:
  """Picks up to `count` positions of each row after which the text goes on:
  int32 `[B, A]`. Without a key, as in validation, they are always the same. A
  row with fewer such positions gets others too, whose blocks do not count.

  `weights` are those of the tokens after each position, `[B, T]`, 0 for none.
  """
  key = jax.random.key(0) if key is None else key
  draws = jax.random.uniform(key, weights.shape)
  draws = jnp.where(weights > 0, draws, -1.0)
  _, anchors = jax.lax.top_k(draws, min(count, weights.shape[1]))
  return anchors.astype(jnp.int32)


def position_weights(
  log_q: Array, counted: Array, *, name: str, decay: float, smoothing: float
) -> Array:
  """Weighs the slots of blocks, float32 `[..., k]`.

  Args:
    log_q: `[..., k]`, the drafter's log-probabilities of the tokens written.
    counted: float32 `[..., k]`, 0 for slots beyond the text.
    name: 'exponential', exp(-i / `decay`) for slot i, or 'dpace'.
    decay: of 'exponential'.
    smoothing: of 'dpace': with s = (1 - smoothing) q + smoothing, slot i has
      the gradient of the expected number of accepted tokens by log s_i, the sum
      of s_0 .. s_j over all j from i on.
  """
  if name == 'exponential':
    slots = jnp.arange(counted.shape[-1], dtype=jnp.float32)
    return counted * jnp.exp(-slots / decay)[None]
  smooth = (1 - smoothing) * jnp.exp(log_q) + smoothing
  reached = jnp.cumprod(jnp.where(counted > 0, smooth, 1.0), axis=-1) * counted
  # Of [.8, .6, .3] the weights are [1.7, .9, .3].
  later = jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)
  return jax.lax.stop_gradient(later * counted)


def block_loss(
  config: BlockDrafterConfig,
  *,
  target: str,
  num_anchors: int = 12,
  weights: str = 'exponential',
  decay: float = 4.0,
  smoothing: float = 0.5,
  confidence_weight: float = 1.0,
) -> LossFn:
  """Makes a loss: per block, the weighted sum of `lk_loss` over its slots, each
  given the true token before it, and of the confidence head's cross entropy.

  It reports `nats`, the divergence of all slots; `accuracy`, how often a slot's
  likeliest token was written; `alpha_i`, the mean probability that slot i,
  counted from 1, is accepted once those before it are; `match_i`, how often its
  likeliest token was written, given that those before it were; `tokens`, the
  tokens per target run of greedy decoding from the anchors. ValueError for
  names and numbers out of range, or a target that cannot have such a drafter.

  The target reads the texts of a batch, unless they come with its streams, as
  `written_texts` have them: then its layers are not run.
  """
  if weights not in POSITION_WEIGHTS:
    names = ', '.join(POSITION_WEIGHTS)
    raise ValueError(f'weights is {weights!r}, expected one of {names}')
  if num_anchors < 1 or decay <= 0 or not 0 <= smoothing <= 1:
    raise ValueError(
      f'num_anchors {num_anchors}, decay {decay} and smoothing {smoothing} '
      'should be at least 1, more than 0, and 0 to 1'
    )
  path = loading.locate(target)
  target_config, target_params = loading.read(path, dtype=config.dtype)
  network = families.network(target_config)
  embedding = network.token_embedder(target_params)
  sums_of = functools.partial(
    _loss_sums,
    config,
    weights=weights,
    decay=decay,
    smoothing=smoothing,
    confidence_weight=confidence_weight,
  )

  def loss_fn(params, batch: Batch, key: Array | None) -> LossSums:
    ids = params['target_ids']
    rounded = jax.tree.map(lambda x: x.astype(config.dtype), params)
    rounded['target_ids'] = ids
    rounded = with_mask(config, rounded, embedding)
    states, batch = block_states.of_batch(
      target, network, target_params, config, ids, batch
    )
    counts = batch['decoder_loss_weights']
    anchors = random_anchors(key, counts, num_anchors)
    tokens = batch['decoder_input_tokens']
    hidden = hidden_of_blocks(
      *(config, rounded, embedding, tokens, anchors, states),
      segments=batch.get('decoder_segment_ids'),
    )
    slots = _slots(config, batch, anchors)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    table = states.log_probs
    return chunked.summed(
      sums_of,
      {name: rounded[name] for name in _HEADS if name in rounded},
      flat(hidden),
      jax.tree.map(flat, slots),
      {
        'log_probs': table.reshape(-1, table.shape[-1]),
        'head': head_rows(network, target_params, ids),
        'target_ids': ids,
      },
      is_needed=flat(slots['counted']).any(-1),
      size=_BLOCKS_PER_PART,
    )

  return loss_fn


def _slots(
  config: BlockDrafterConfig, batch: Batch, anchors: Array
) -> dict[str, Array]:
  """Describes the drafts of all blocks, by `[B, A, k]`: the token before each,
  the one written, whether it counts, and where the target's distribution is in
  a table `[B * T, V_draft]`."""
  counts = batch['decoder_loss_weights']
  num_rows, length = counts.shape
  offsets = jnp.arange(config.num_drafts, dtype=jnp.int32)
  # Draft i guesses what follows position anchor + i.
  places = anchors[..., None] + offsets[None, None]
  inside = jnp.minimum(places, length - 1)
  rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
  pick = lambda x: x[rows, inside]
  # A block ends with its text, whatever follows in the row.
  is_inside = (pick(counts) > 0) & (places < length)
  return {
    'previous': pick(batch['decoder_input_tokens']),
    'written': pick(batch['decoder_target_tokens']),
    'counted': jnp.cumprod(is_inside, axis=-1) > 0,
    'entries': rows * length + inside,
  }


def _loss_sums(
  config: BlockDrafterConfig,
  heads: ArrayTree,
  hidden: Array,
  slots: Mapping[str, Array],
  shared: Mapping[str, Any],
  *,
  weights: str,
  decay: float,
  smoothing: float,
  confidence_weight: float,
) -> LossSums:
  """Sums `block_loss` over N blocks: `hidden` is `[N, k, embed]`."""
  ids, counted = shared['target_ids'], slots['counted'].astype(jnp.float32)
  apply = applied(BlockDrafter(config))
  params = {**heads, LOGITS: shared['head'], 'target_ids': ids}
  logits = apply(params, hidden, method=BlockDrafter.project)
  logits = logits + _chained(config, params, slots['previous'], hidden)
  log_p = jnp.take(shared['log_probs'], slots['entries'], axis=0)
  loss, kl, alpha = lk_loss(log_p, logits)
  is_written = ids[None, None] == slots['written'][..., None]
  log_q = jax.nn.log_softmax(logits)
  # Minus infinity for a token that cannot be drafted.
  log_q = jnp.where(is_written, log_q, -jnp.inf).max(-1)
  of_slots = position_weights(
    jax.lax.stop_gradient(log_q),
    counted,
    name=weights,
    decay=decay,
    smoothing=smoothing,
  )
  total = (loss * of_slots).sum()
  figures = {}
  if config.has_confidence:
    confidence = apply(
      params, slots['previous'], hidden, method=BlockDrafter.confidence
    )
    accepted = jax.lax.stop_gradient(alpha)
    nats = _binary_cross_entropy(confidence, accepted)
    total = total + confidence_weight * (nats * of_slots).sum()
    gap = jnp.abs(jax.nn.sigmoid(confidence) - accepted) * counted
    figures['confidence_error'] = jnp.stack((gap.sum(), counted.sum()))
  likeliest = jnp.take(ids, arrays.argmax(logits))
  is_correct = jnp.where(likeliest == slots['written'], counted, 0.0)
  leading = jnp.cumprod(is_correct, axis=-1)
  reached = jnp.concatenate([counted[:, :1], leading[:, :-1]], -1) * counted
  for i in range(config.num_drafts):
    figures[f'alpha_{i + 1}'] = jnp.stack(
      ((alpha[:, i] * counted[:, i]).sum(), counted[:, i].sum())
    )
    figures[f'match_{i + 1}'] = jnp.stack(
      (leading[:, i].sum(), reached[:, i].sum())
    )
  num_blocks = counted[:, 0].sum()
  figures['tokens'] = jnp.stack((leading.sum() + num_blocks, num_blocks))
  return LossSums(
    loss=total,
    nats=(kl * counted).sum(),
    num_correct=is_correct.sum(),
    weight=counted.sum(),
    figures=figures,
  )


def _chained(
  config: BlockDrafterConfig,
  params: ArrayTree,
  previous: Array,
  hidden: Array,
) -> Array:
  """Computes what the Markov head adds to the logits of N blocks, `[N, k,
  V_draft]`, given the true tokens."""
  if not config.markov_rank:
    return jnp.zeros((), jnp.float32)
  apply = applied(BlockDrafter(config))
  state = jnp.zeros((len(hidden), 1, config.state_size), jnp.float32)
  if not config.state_size:
    state = jnp.zeros((*previous.shape, 0), jnp.float32)
    return apply(params, previous, hidden, state, method=BlockDrafter.bias)[0]
  added = []
  for i in range(config.num_drafts):
    slot = slice(i, i + 1)
    bias, state = apply(
      params,
      previous[:, slot],
      hidden[:, slot],
      state,
      method=BlockDrafter.bias,
    )
    added.append(bias)
  return jnp.concatenate(added, axis=1)


def _binary_cross_entropy(logits: Array, targets: Array) -> Array:
  positive = jax.nn.log_sigmoid(logits)
  negative = jax.nn.log_sigmoid(-logits)
  return -(targets * positive + (1 - targets) * negative)
