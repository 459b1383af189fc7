"""Logits that depend on the text before them: biases, penalties, and n-grams
that must not come again.

The formulas, and the order, are those of transformers' `LogitsProcessorList`;
presence and frequency penalty are OpenAI's. They are applied before temperature
and all limits. In a block each position sees the committed text and the drafts
before it, in a tree those above it, as plain decoding would.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, trees
from specdec_jax.base import Array, Context, Processors, Tree

# Ids that no token has: NONE beyond a text, ANY where a biased sequence is
# padded.
NONE, ANY = -2, -1


class _Texts(NamedTuple):
  """T texts of each row: the context, and what was drafted after it.

  Attributes:
    drafted: int32 `[B, T, D]`, and `NONE` behind it.
    tokens: int32 `[B, T, S]`, the whole texts, and `NONE` behind them.
    lengths: int32 `[B, T]`, theirs.
    starts: int32 `[B]`, where new tokens begin.
    source: int32 `[B, T, E]`, what the encoder read, or else the prompt.
  """

  drafted: Array
  tokens: Array
  lengths: Array
  starts: Array
  source: Array


def text_of(context: Context) -> Context | None:
  """The text that a drafter goes on with, token by token; None if no row has
  processors, so that none is carried along."""
  return None if context.processors is None else context


def followed_by(text: Context | None, tokens: Array) -> Context | None:
  """A text of `text_of` with int32 `[B]` behind it; those that would fall
  outside the buffer are dropped."""
  if text is None:
    return None
  ones = jnp.ones_like(text.lengths)
  return dataclasses.replace(
    text,
    tokens=arrays.write_block(text.tokens, tokens[:, None], text.lengths, ones),
    lengths=text.lengths + 1,
  )


def checked(logits: Array, processed: Array, num_ids: int | None) -> Array:
  """Returns the logits `[B, T, V]`, -inf where processors left none of the
  first `num_ids` tokens; those behind are padding, None for none."""
  if processed is logits:
    return logits
  # Not NaN, of which jax 0.10 may compile a logsumexp to finite numbers.
  best = jnp.max(processed[..., :num_ids], axis=-1, keepdims=True)
  return jnp.where(best == -jnp.inf, -jnp.inf, logits)


def after_text(logits: Array, text: Context | None) -> Array:
  """Processed logits `[B, V]` of what follows a text."""
  if text is None:
    return logits
  return after_drafts(logits[:, None], text)[:, 0]


def after_drafts(
  logits: Array,
  context: Context,
  *tokens: Array,
  tree: Tree | None = None,
  first: int = 0,
) -> Array:
  """Processed logits `[B, T, V]` of what follows the context and each draft.

  Args:
    logits: float32 `[B, T, V]`, as they were computed.
    context: the committed text; without processors the logits stay as they are.
    *tokens: int32 `[B, N]` in all, drafted; none for plain decoding.
    tree: the shape of the draft; None for a chain.
    first: the node that the first logits follow, others those after it; node 0
      is the context's last token, and in a chain node i the draft's token i.
  """
  if context.processors is None:
    return logits
  num_rows, num_texts, _ = logits.shape
  nodes = depths = np.arange(first, first + num_texts, dtype=np.int32)
  root = jnp.zeros((num_rows, 1), jnp.int32)
  with_root = jnp.concatenate([root, *tokens], axis=1)
  if tree is None:
    drafted = jnp.repeat(with_root[:, None, 1:], num_texts, axis=1)
  else:
    # Of the tree (0, 0, 1) node 3 stands on the path [1, 3], node 2 on [2].
    drafted = with_root[:, trees.path_of(tree, jnp.asarray(nodes))]
    depths = trees.depths(tree)[nodes]
  return _process(
    logits, context.processors, context, drafted, jnp.asarray(depths)
  )


def _process(
  logits: Array,
  rows: Processors,
  context: Context,
  drafted: Array,
  depths: Array,
) -> Array:
  """All processors; what no row asks for takes no time."""
  texts = _texts(context, rows, drafted, depths)
  logits = _biased(logits, rows, texts)
  size, encoder_size = rows.ngram_size, rows.encoder_ngram_size
  rewards = 1 / rows.encoder_repetition
  is_counted = (rows.presence != 0) | (rows.frequency != 0)
  is_due = texts.lengths[:, :, None] == rows.forced_at[:, None, :]
  for is_used, process, *args in (
    (rewards != 1, _scaled, rewards, texts.source),
    (rows.repetition != 1, _scaled, rows.repetition, texts.tokens),
    (is_counted, _penalized, rows, context, texts),
    (size > 0, _without_repeats, size, texts.tokens, texts),
    (encoder_size > 0, _without_repeats, encoder_size, texts.source, texts),
    (is_due, _forced, rows.forced, is_due),
  ):
    logits = jax.lax.cond(
      jnp.any(is_used), process, lambda x, *_: x, logits, *args
    )
  return logits


def _texts(
  context: Context, rows: Processors, drafted: Array, depths: Array
) -> _Texts:
  assert context.starts is not None  # There are processors.
  num_rows, num_texts, width = drafted.shape
  capacity = context.tokens.shape[1]
  tokens = jnp.repeat(context.tokens, num_texts, axis=0)
  lengths = context.lengths[:, None] + depths[None, :]
  if width:
    tokens = arrays.write_block(
      tokens,
      drafted.reshape(-1, width),
      jnp.repeat(context.lengths, num_texts),
      jnp.tile(depths, num_rows),
    )
  is_text = arrays.is_within(lengths.reshape(-1), capacity)
  tokens = jnp.where(is_text, tokens, NONE)
  source = rows.encoder_tokens
  is_read = arrays.is_within(context.starts, capacity)
  if source is None:
    source = jnp.where(is_read, context.tokens, NONE)
  return _Texts(
    drafted=jnp.where(arrays.is_within(depths, width), drafted, NONE),
    tokens=tokens.reshape(num_rows, num_texts, capacity),
    lengths=lengths,
    starts=context.starts,
    source=jnp.repeat(source[:, None], num_texts, axis=1),
  )


def _biased(logits: Array, rows: Processors, texts: _Texts) -> Array:
  """Adds a bias to the last id of sequences whose other ids end the text."""
  if not rows.biases.shape[1]:
    return logits
  *before, last = jnp.moveaxis(rows.sequences, -1, 0)
  num_new = texts.lengths - texts.starts[:, None]
  applies = num_new[:, :, None] < rows.until[:, None, :]
  # Of sequence [5, 6, 7], the last but one is compared with the text's last.
  for distance, ids in enumerate(reversed(before), start=1):
    seen = _nth_last(texts, distance)[:, :, None]
    applies = applies & ((ids[:, None, :] == seen) | (ids[:, None, :] == ANY))
  biases = jnp.where(applies, rows.biases[:, None, :], 0.0)
  ids = jnp.where(last == ANY, logits.shape[-1], last)
  add = lambda logits, ids, biases: logits.at[ids].add(biases, mode='drop')
  return jax.vmap(jax.vmap(add, in_axes=(0, None, 0)))(logits, ids, biases)


def _scaled(logits: Array, penalties: Array, ids: Array) -> Array:
  """Divides positive and multiplies negative logits of ids `[B, T, W]` by
  penalties `[B]`."""
  values = _gathered(logits, ids)
  penalties = penalties[:, None, None]
  values = jnp.where(values < 0, values * penalties, values / penalties)
  return _put(logits, ids, values)


def _penalized(
  logits: Array, rows: Processors, context: Context, texts: _Texts
) -> Array:
  """Subtracts the penalties of ids that are among the new tokens."""
  is_old = arrays.is_within(texts.starts, context.tokens.shape[1])
  ids = jnp.where(is_old[:, None], NONE, texts.tokens)
  # The context is counted once, not once for each of its drafts.
  is_text = arrays.is_within(context.lengths, context.tokens.shape[1])
  counted = jnp.where(is_text & ~is_old, context.tokens, logits.shape[-1])
  nothing = jnp.zeros(logits.shape[-1], jnp.int32)
  counts = jax.vmap(lambda ids: nothing.at[ids].add(1, mode='drop'))(counted)
  # NONE equals NONE, but `_put` drops it.
  is_drafted = texts.drafted[:, :, None, :] == ids[..., None]
  nums = _gathered(counts[:, None], ids)
  nums = nums + jnp.sum(is_drafted, axis=-1, dtype=jnp.int32)
  column = lambda values: values[:, None, None]
  repeated = column(rows.frequency) * nums.astype(jnp.float32)
  penalized_logits = _gathered(logits, ids) - repeated - column(rows.presence)
  return _put(logits, ids, penalized_logits)


def _without_repeats(
  logits: Array, sizes: Array, tokens: Array, texts: _Texts
) -> Array:
  """Rules out the ids that would complete an n-gram of `tokens[B, T, W]` behind
  a text; n is `sizes[B]`, 0 for any."""
  size = sizes[:, None, None]
  positions = jnp.arange(tokens.shape[-1], dtype=jnp.int32)[None, None, :]
  is_banned = (tokens != NONE) & (size > 0) & (positions >= size - 1)

  def compare(distance: Array, is_banned: Array) -> Array:
    # Of n-grams of 3 ids, those are 1 and 2 before the last one.
    before = jnp.roll(tokens, distance, axis=-1)
    is_same = before == _nth_last(texts, distance)[..., None]
    return is_banned & (is_same | (distance >= size))

  most = jnp.max(sizes)
  is_banned = jax.lax.fori_loop(jnp.ones_like(most), most, compare, is_banned)
  return _put(logits, jnp.where(is_banned, tokens, NONE), -jnp.inf)


def _forced(logits: Array, forced: Array, is_due: Array) -> Array:
  """Rules out all others where an id of `forced[B, F]` is due, bool `[B, T,
  F]`; a `NONE` that is due leaves no id."""
  ids = jnp.where(is_due, forced[:, None, :], NONE)
  only = _put(jnp.full_like(logits, -jnp.inf), ids, 0.0)
  return jnp.where(jnp.any(is_due, axis=-1, keepdims=True), only, logits)


def _gathered(values: Array, ids: Array) -> Array:
  """What `[B, T or 1, V]` has at ids `[B, T, W]`; anything, if negative."""
  return jnp.take_along_axis(values, jnp.maximum(ids, 0), axis=-1)


def _put(logits: Array, ids: Array, values: Array | float) -> Array:
  """Logits `[B, T, V]` with values at ids `[B, T, W]`, if not negative."""
  ids = jnp.where(ids < 0, logits.shape[-1], ids)
  put = lambda logits, ids, values: logits.at[ids].set(values, mode='drop')
  values = jnp.broadcast_to(values, ids.shape)
  return jax.vmap(jax.vmap(put))(logits, ids, values)


def _nth_last(texts: _Texts, distance: int | Array) -> Array:
  """The token so far from the end of each text, int32 `[B, T]`; 1 is last."""
  places = texts.lengths - distance
  inside = jnp.clip(places, 0, texts.tokens.shape[-1] - 1)
  return jnp.where(places < 0, NONE, arrays.pick(texts.tokens, inside))
