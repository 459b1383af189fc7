"""How a Spec-Drafter learns to fill blocks (Xia et al., arXiv 2203.16487).

Glancing (Qian et al., arXiv 2008.07905): the network first fills the block
without learning from it, some of the masks are then replaced by the truth, more
of them the more it got wrong, and it learns to fill the others.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.base import Array
from specdec_jax.models import products, quantized
from specdec_jax.models.drafting import block_decoder
from specdec_jax.models.drafting.block_decoder import (
  BlockDecoder,
  BlockDecoderConfig,
)
from specdec_jax.models.layers import applied
from specdec_jax.training import chunked, losses
from specdec_jax.training.data.datasets import Dataset
from specdec_jax.training.losses import ArrayTree, Batch, LossFn, LossSums

# Feature of a batch, float32 `[B]`: r, what share of the mistakes is given
# away. It falls as training goes on, and a batch knows its position.
RATIO = 'glancing_ratio'
# Positions whose logits are computed at once, on a CPU and elsewhere: on two
# cores, 256 with 8,192 tokens took a twelfth less time than 128, and 512 no
# less; an accelerator reads the embeddings from its memory for every part.
_PART, _LARGE_PART = 256, 4096


def block_loss(
  config: BlockDecoderConfig,
  *,
  gamma: int,
  num_blocks: int = 1,
  label_smoothing: float = 0.1,
  decay: float = 1.0,
  has_random_prefix: bool = True,
  is_glancing: bool = True,
  shares_dropout: bool = True,
) -> LossFn:
  """Makes a loss: the cross entropy of the block positions that have a target
  and stay masked.

  The prefix of a row has a random length below its text's, 0 to L - 1; gamma
  masks follow it, past the end of the text too, where there is no target. Rows
  hold one example each; `with_ratio` sees to that. Without a key, as in
  validation, prefixes are always the same and nothing is given away.

  Args:
    gamma: k, masks of a block.
    num_blocks: of every text in one step, each after a prefix of its own; what
      depends on the source alone is computed once.
    label_smoothing: see `losses.cross_entropy`.
    decay: position i of a block, from 0, has the weight decay**i in training: a
      draft counts only if all before it are right.
    has_random_prefix: False always learns the first block.
    is_glancing: False gives nothing away and saves the first pass.
    shares_dropout: whether both passes drop out the same features.
  """

  def loss_fn(params, batch: Batch, key: Array | None) -> LossSums:
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
    prefix_key, glance_key, *dropout_keys = jax.random.split(
      jax.random.key(0) if key is None else key, 4
    )
    count = 1 if key is None else num_blocks
    blocks = _draw_blocks(batch, prefix_key, gamma, count, has_random_prefix)
    _, is_target, _, gold, is_known = blocks
    keys = dropout_keys if key is not None and config.dropout_rate else [None]
    apply = functools.partial(apply_network, config, params)
    encode, hidden = _passes(apply, batch, blocks)
    table = {'token_embedder': _to_attend(params['token_embedder'])}
    size = _PART if jax.default_backend() == 'cpu' else _LARGE_PART
    memory = encode(keys[0])
    is_revealed = jnp.zeros_like(is_target)
    if is_glancing and key is not None and RATIO in batch:
      first_key = keys[0] if shares_dropout else keys[-1]
      first_memory = memory if shares_dropout else encode(first_key)
      is_correct = _each(
        functools.partial(_is_correct, config, table),
        (hidden(first_memory, is_known, first_key), gold.reshape(-1)),
        is_needed=is_target.reshape(-1),
        size=size,
      )
      is_revealed, is_known = _glance(
        glance_key, blocks, is_correct, batch[RATIO]
      )
    is_learned = (is_target & ~is_revealed).reshape(-1)
    rate = jnp.float32(decay if key is not None else 1.0)
    by_position = rate ** jnp.arange(gamma, dtype=jnp.float32)
    weights = jnp.tile(by_position, len(is_target))
    return chunked.summed(
      functools.partial(_loss_sums, config, label_smoothing),
      table,
      hidden(memory, is_known, keys[0]),
      (gold.reshape(-1), jnp.where(is_learned, weights, 0.0)),
      None,
      is_needed=is_learned,
      size=size,
    )

  return loss_fn


def apply_network(
  config: BlockDecoderConfig,
  params: ArrayTree,
  key: Array | None,
  *args: ArrayTree,
  **options: Any,
) -> ArrayTree:
  """Applies the network, which drops out when given a key."""
  rngs = None if key is None else {'dropout': key}
  return applied(BlockDecoder(config))(params, *args, rngs=rngs, **options)


def _each(
  fn: Callable[[ArrayTree], Array],
  inputs: ArrayTree,
  *,
  is_needed: Array,
  size: int,
) -> Array:
  """Computes `fn` of the positions that are needed, `[N]`, `size` at a time;
  others are undefined. As `chunked.summed`, without gradients."""
  inputs = jax.lax.stop_gradient(inputs)
  if chunked.is_on_mesh():
    return fn(inputs)
  order = jnp.argsort(~is_needed, stable=True)
  inputs = chunked.padded(inputs, order, size)

  def put(i: Array, made: Array) -> Array:
    found = fn(chunked.part(inputs, i, size))
    return jax.lax.dynamic_update_slice_in_dim(made, found, i * size, axis=0)

  shape = jax.eval_shape(fn, inputs)
  made = jnp.zeros(shape.shape, shape.dtype)
  count = chunked.num_parts(is_needed, size)
  made = jax.lax.fori_loop(0, count, put, made)
  # Row i of `made` belongs to position `order[i]`.
  made = made[: is_needed.size]
  return jnp.zeros_like(made).at[order].set(made, unique_indices=True)


class _Blocks(NamedTuple):
  """N blocks of B texts: where each begins, `[N]`; which of its positions have
  a target, `[N, G]`; the texts, `[B, T + G]`; the blocks' tokens, `[N, G]`; and
  what stands before each, bool `[N, T + G]`."""

  starts: Array
  is_target: Array
  text: Array
  gold: Array
  is_known: Array


def _to_attend(params: products.Weights) -> products.Weights:
  """The parameters of an `Embed` for many calls of `attend` in training: on a
  CPU with a transpose, whose gradient needs no transposed copy per call."""
  embedding = params['embedding']
  if not products.is_cpu_alone() or embedding.dtype != jnp.bfloat16:
    return params
  return {**params, quantized.TRANSPOSED: products.row_major(embedding.T)}


def _draw_blocks(
  batch: Batch, key: Array, gamma: int, count: int, has_random_prefix: bool
) -> _Blocks:
  """Draws so many blocks of every text."""
  # They are rows beside each other: of texts a, b and 2 blocks of each, rows
  # are a, a, b, b.
  weights = jnp.repeat(batch['decoder_loss_weights'], count, axis=0)
  lengths = jnp.sum(weights > 0, axis=1, dtype=jnp.int32)
  starts = draw_prefixes(key, lengths)
  if not has_random_prefix:
    starts = jnp.zeros_like(starts)
  # `weights` are 1 throughout a text, and a block without a target is 0.
  is_target = arrays.block_positions(starts, gamma) < lengths[:, None]
  # Room for a block that begins at the last token.
  text = jnp.pad(batch['decoder_target_tokens'], ((0, 0), (0, gamma)))
  gold = arrays.read_block(jnp.repeat(text, count, axis=0), starts, gamma)
  is_known = arrays.is_within(starts, text.shape[1])
  return _Blocks(starts, is_target, text, gold, is_known)


def _passes(
  apply: Callable[..., ArrayTree], batch: Batch, blocks: _Blocks
) -> tuple[Callable[..., ArrayTree], Callable[..., Array]]:
  """Makes the two halves of a pass of the network, each with a key for dropout
  or None: `encode(key)`, of the source alone, and `hidden(encoded, is_known,
  key)`, the hidden states of all positions of all blocks."""
  starts, _, text, gold, _ = blocks

  def encode(key: Array | None) -> ArrayTree:
    source, size = batch['encoder_input_tokens'], text.shape[1]
    return apply(key, source, size, method=BlockDecoder.encode)

  def hidden(memory: ArrayTree, is_known: Array, key: Array | None) -> Array:
    # To the network, [N, ...] is [B, blocks of a text, ...].
    by_text = lambda x: x.reshape(len(text), -1, *x.shape[1:])
    given = (text, by_text(is_known), by_text(starts), memory)
    x = apply(key, *given, width=gold.shape[1], method=BlockDecoder.hidden)
    return x.reshape(-1, x.shape[-1])

  return encode, hidden


def _glance(
  key: Array,
  blocks: _Blocks,
  is_correct: Array,
  ratios: Array,
) -> tuple[Array, Array]:
  """Draws what is given away of blocks, `[N, G]`, after a first pass; with it,
  the tokens that are known then, `[N, T + G]`."""
  starts, is_target, _, gold, is_known = blocks
  is_correct = is_correct.reshape(gold.shape)
  # Texts have one ratio, and their blocks the same.
  ratios = jnp.repeat(ratios, len(gold) // len(ratios), axis=0)
  is_revealed = reveal(key, is_target, is_correct, ratios)
  lengths = jnp.full_like(starts, gold.shape[1])
  return is_revealed, arrays.write_block(is_known, is_revealed, starts, lengths)


def _project(
  config: BlockDecoderConfig, table: ArrayTree, hidden: Array
) -> Array:
  """Computes logits `[N, V]` of hidden states `[N, embed]`."""
  apply = applied(BlockDecoder(config))
  # Rows, which a mesh splits.
  logits: Array = apply(table, hidden[:, None], method=BlockDecoder.project)
  return logits[:, 0]


def _is_correct(
  config: BlockDecoderConfig, table: ArrayTree, at: tuple[Array, Array]
) -> Array:
  """Tells, bool `[N]`, whether the guess is the token; of hidden states and
  tokens."""
  hidden, gold = at
  table = jax.lax.stop_gradient(table)
  return arrays.argmax(_project(config, table, hidden)) == gold


def _loss_sums(
  config: BlockDecoderConfig,
  label_smoothing: float,
  table: ArrayTree,
  hidden: Array,
  target: tuple[Array, Array],
  shared: ArrayTree,
) -> LossSums:
  del shared
  logits = _project(config, table, hidden)
  return losses.cross_entropy(logits, *target, label_smoothing=label_smoothing)


def draw_prefixes(key: Array, lengths: Array) -> Array:
  """Draws a prefix length for texts of int32 `[B]` tokens: uniform in 0 .. L -
  1, and 0 for a row without a text."""
  uniforms = jax.random.uniform(key, lengths.shape)
  starts = jnp.floor(uniforms * lengths.astype(jnp.float32)).astype(jnp.int32)
  # A draw just below 1 may round up to the length.
  return jnp.clip(starts, 0, jnp.maximum(lengths - 1, 0))


def reveal(
  key: Array, is_masked: Array, is_correct: Array, ratios: Array
) -> Array:
  """Draws which masks are given away: per row floor((masked - correct) r), at
  random.

  `is_masked` are the masks that have a target, `is_correct` where the first
  pass guessed it, both bool `[B, G]`; `ratios` is r, float32 `[B]`. The result,
  bool `[B, G]` within `is_masked`, is of right and of wrong guesses.
  """
  num_wrong = jnp.sum(is_masked & ~is_correct, axis=1, dtype=jnp.int32)
  num_revealed = jnp.floor(num_wrong.astype(jnp.float32) * ratios)
  # The rank of every mask in a random order, which others end: scores
  # [.7, .2, 2, .5] sort to places [1, 3, 0, 2] and have ranks [2, 0, 3, 1]. To
  # reveal two, take the ranks below 2.
  scores = jax.random.uniform(key, is_masked.shape)
  order = jnp.argsort(jnp.where(is_masked, scores, 2.0), axis=1)
  ranks = jnp.argsort(order, axis=1)
  return is_masked & (ranks < num_revealed.astype(jnp.int32)[:, None])


def with_ratio(
  dataset: Dataset, *, first: float = 0.5, last: float = 0.3, train_steps: int
) -> Dataset:
  """Adds r to batches, which goes from `first` to `last` in a straight line;
  ValueError if it leaves [0, 1], or, at the batch, if rows are packed."""
  if not (0 <= first <= 1 and 0 <= last <= 1):
    raise ValueError(
      f'glancing ratios must lie in [0, 1], got {first} and {last}'
    )

  def batch(position: int) -> Mapping[str, np.ndarray]:
    features = dataset.batch(position)
    packed = int(features['decoder_segment_ids'].max())
    if packed > 1:
      raise ValueError(
        f'a row holds {packed} examples; a Spec-Drafter is trained on one a '
        'row: `batches.from_length_buckets`, or max_examples_per_row=1'
      )
    progress = min(position / max(train_steps - 1, 1), 1.0)
    ratio = first + (last - first) * progress
    num_rows = len(features['decoder_target_tokens'])
    return {**features, RATIO: np.full(num_rows, ratio, np.float32)}

  return dataset._replace(batch=batch)


def init_params(
  config: BlockDecoderConfig, rng_key: Array, target_params: ArrayTree = None
) -> ArrayTree:
  """Draws parameters, with the encoder and the embeddings of the target's.

  `target_params` are a T5's, or None to draw everything. Of an encoder with
  other layers, those that both have are taken, from the bottom; ValueError if
  their sizes differ.
  """
  # One program instead of hundreds of small ones.
  params = jax.jit(block_decoder.init_params, static_argnums=0)(config, rng_key)
  if target_params is None:
    return params
  for part in ('token_embedder', 'encoder'):
    for name in params[part].keys() & target_params[part].keys():
      ours, theirs = params[part][name], target_params[part][name]
      shapes = [jax.tree.map(jnp.shape, tree) for tree in (ours, theirs)]
      if shapes[0] != shapes[1]:
        raise ValueError(
          f'the target does not fit the drafter: {part}/{name} is {shapes[1]} '
          f'there and {shapes[0]} here'
        )
      in_float32 = lambda x: jnp.asarray(x, jnp.float32)
      params[part][name] = jax.tree.map(in_float32, theirs)
  return params
