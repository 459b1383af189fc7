"""N-gram tables as drafters: the cheapest models there are (Leviathan et al.,
Sec. 4.3, with unigrams and bigrams)."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, distributions
from specdec_jax.base import (
  Array,
  Context,
  Draft,
  Drafter,
  LogitsToProbsFn,
  Prompt,
)
from specdec_jax.drafters.gamma import check_gamma


@flax.struct.dataclass(kw_only=True)
class NGramTable:
  """A bigram law with back-off to unigrams; order 1 has no bigrams.

  q(x | y) is `successor_probs[y, k]` where x is `successors[y, k]`, plus
  `backoff[y] * unigram[x]`.

  Attributes:
    unigram: float32 `[V]`, positive, normalised.
    successors: int32 `[V, K]`, the tokens seen most often after each token.
    successor_probs: float32 `[V, K]`, their discounted probabilities; 0 fills
      rows with fewer than K.
    backoff: float32 `[V]`, the mass left to unigrams.
    most_likely: int32 `[V]`, argmax of q(x | y).
  """

  unigram: Array
  successors: Array
  successor_probs: Array
  backoff: Array
  most_likely: Array


def estimate_ngram(
  tokens: np.ndarray,
  *,
  vocab_size: int,
  order: int = 2,
  max_successors: int = 32,
  discount: float = 0.5,
  smoothing: float = 1.0,
) -> NGramTable:
  """Counts a token stream.

  Absolute discounting: each seen pair gives up `discount` of a count to the
  unigrams, and so do the pairs beyond the `max_successors` most frequent.

  Args:
    tokens: int `[N]`, at least one.
    vocab_size: V; ids are below it.
    order: 1 for unigrams, 2 for bigrams that back off to them.
    max_successors: K.
    discount: in [0, 1).
    smoothing: added to each unigram count; positive, so that no token is
      impossible.

  Raises:
    ValueError: if the stream is empty, an id is out of range, or a setting is.
  """
  tokens = np.asarray(tokens)
  if tokens.ndim != 1 or not tokens.size:
    raise ValueError(
      f'an n-gram table needs a stream of tokens, got shape {tokens.shape}'
    )
  if tokens.min() < 0 or tokens.max() >= vocab_size:
    raise ValueError(
      f'token ids {tokens.min()} to {tokens.max()} do not fit a vocabulary of '
      f'{vocab_size}'
    )
  if order not in (1, 2):
    raise ValueError(f'order must be 1 or 2, got {order}')
  if not 0 <= discount < 1 or smoothing <= 0 or max_successors < 1:
    raise ValueError(
      'discount must lie in [0, 1), smoothing be positive and max_successors '
      f'at least 1, got {discount}, {smoothing} and {max_successors}'
    )
  unigram = np.bincount(tokens, minlength=vocab_size) + smoothing
  unigram = (unigram / unigram.sum()).astype(np.float32)
  if order == 1:
    successors = np.zeros((vocab_size, 1), np.int32)
    successor_probs = np.zeros((vocab_size, 1), np.float32)
  else:
    successors, successor_probs = _successors(
      tokens, vocab_size, max_successors, discount
    )
  backoff = np.maximum(1.0 - successor_probs.sum(axis=1), 0.0)
  backoff = backoff.astype(np.float32)
  return NGramTable(
    unigram=jnp.asarray(unigram),
    successors=jnp.asarray(successors),
    successor_probs=jnp.asarray(successor_probs),
    backoff=jnp.asarray(backoff),
    most_likely=jnp.asarray(
      _most_likely(unigram, successors, successor_probs, backoff)
    ),
  )


def ngram(
  table: NGramTable,
  *,
  gamma: int,
  logits_to_probs: LogitsToProbsFn | None = None,
) -> Drafter:
  """Drafts gamma tokens from an n-gram table on the device.

  Args:
    table: see `estimate_ngram`.
    gamma: tokens an iteration.
    logits_to_probs: how the table's log-probabilities are sampled. None takes
      the most likely token each time: a deterministic drafter, whose one-hot
      law is never materialised.

  Raises:
    ValueError: if `gamma` is less than 1.
  """
  check_gamma(gamma)

  def init(params: Any, prompt: Prompt, max_len: int) -> tuple[()]:
    del params, prompt, max_len
    return ()

  def propose(
    params: Any, row_keys: Array, context: Context, state: tuple[()]
  ) -> tuple[Draft, tuple[()]]:
    del params
    with jax.named_scope('draft'):
      last = arrays.read_block(context.tokens, context.lengths - 1, 1)[:, 0]
      if logits_to_probs is None:
        tokens, probs = _follow(table, last, gamma), None
      else:
        tokens, probs = _draw(table, row_keys, last, gamma, logits_to_probs)
    lengths = jnp.full_like(context.lengths, gamma)
    return Draft(tokens=tokens, probs=probs, lengths=lengths), state

  return Drafter(gamma, init, propose)


def law(table: NGramTable, previous: Array) -> Array:
  """q(. | previous), float32 `[B, V]` for int32 `[B]`."""
  backoff = jnp.take(table.backoff, previous, mode='clip')
  probs = backoff[:, None] * table.unigram[None, :]
  successors = jnp.take(table.successors, previous, axis=0, mode='clip')
  seen = jnp.take(table.successor_probs, previous, axis=0, mode='clip')
  add_row = lambda probs, ids, more: probs.at[ids].add(more)
  return jax.vmap(add_row)(probs, successors, seen)


def _follow(table: NGramTable, last: Array, gamma: int) -> Array:
  """The most likely chain after `last` `[B]`: int32 `[B, gamma]`."""

  def advance(token, _):
    token = jnp.take(table.most_likely, token, mode='clip')
    return token, token

  _, tokens = jax.lax.scan(advance, last, length=gamma)
  return tokens.T


def _draw(
  table: NGramTable,
  row_keys: Array,
  last: Array,
  gamma: int,
  logits_to_probs: LogitsToProbsFn,
) -> tuple[Array, Array]:
  """A random chain after `last`: int32 `[B, G]`, float32 `[B, G, V]`."""

  def advance(token, keys):
    probs = logits_to_probs(jnp.log(law(table, token)))
    token = distributions.sample(keys, probs)
    return token, (token, probs)

  split = lambda key: jax.random.split(key, gamma)
  step_keys = jax.vmap(split, out_axes=1)(row_keys)
  _, (tokens, probs) = jax.lax.scan(advance, last, step_keys)
  return tokens.T, jnp.moveaxis(probs, 0, 1)


def _successors(
  tokens: np.ndarray, vocab_size: int, max_successors: int, discount: float
) -> tuple[np.ndarray, np.ndarray]:
  """The K most frequent successors of each token and their discounted law."""
  pairs = tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]
  pairs, counts = np.unique(pairs, return_counts=True)
  previous, following = pairs // vocab_size, pairs % vocab_size
  totals = np.bincount(previous, weights=counts, minlength=vocab_size)
  # By previous token, then most frequent first, then lowest id.
  order = np.lexsort((following, -counts, previous))
  previous, following, counts = previous[order], following[order], counts[order]
  first = np.searchsorted(previous, previous)
  rank = np.arange(previous.size) - first
  kept = rank < max_successors
  previous, following, counts, rank = (
    a[kept] for a in (previous, following, counts, rank)
  )
  width = int(rank.max(initial=0)) + 1
  successors = np.zeros((vocab_size, width), np.int32)
  probs = np.zeros((vocab_size, width), np.float32)
  successors[previous, rank] = following
  probs[previous, rank] = (counts - discount) / totals[previous]
  return successors, probs


def _most_likely(
  unigram: np.ndarray,
  successors: np.ndarray,
  successor_probs: np.ndarray,
  backoff: np.ndarray,
) -> np.ndarray:
  """Argmax of q(x | y) for each y, int32 `[V]`."""
  mass = successor_probs + backoff[:, None] * unigram[successors]
  mass = np.where(successor_probs > 0, mass, 0.0)
  best_seen = mass.argmax(axis=1)
  rows = np.arange(len(successors))
  favourite = int(unigram.argmax())
  use_seen = mass[rows, best_seen] >= backoff * unigram[favourite]
  return np.where(use_seen, successors[rows, best_seen], favourite).astype(
    np.int32
  )
