"""N-gram tables counted from a token stream, for `contrib.ngram.drafter`."""

import jax.numpy as jnp
import numpy as np

from specdec_jax.contrib.ngram.drafter import NGramTable


def estimate(
  tokens: np.ndarray,
  *,
  vocab_size: int,
  order: int = 2,
  max_successors: int = 32,
  discount: float = 0.5,
  smoothing: float = 1.0,
) -> NGramTable:
  """Counts a token stream, int `[N]`, of ids below V.

  Absolute discounting: each seen pair gives up `discount`, in [0, 1), of a
  count to the unigrams, and so do the pairs beyond the `max_successors` most
  frequent. Order 1 is unigrams, 2 bigrams that back off to them. `smoothing` is
  added to each unigram count, so that no token is impossible. ValueError if the
  stream is empty, or an id or a setting out of range.
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
      'discount must be in [0, 1), smoothing positive and max_successors '
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
  # The mass that is left to unigrams; rounding may make it negative.
  backoff = np.maximum(1.0 - successor_probs.sum(axis=1), 0.0)
  backoff = backoff.astype(np.float32)
  most_likely = _most_likely(unigram, successors, successor_probs, backoff)
  return NGramTable(
    unigram=jnp.asarray(unigram),
    successors=jnp.asarray(successors),
    successor_probs=jnp.asarray(successor_probs),
    backoff=jnp.asarray(backoff),
    most_likely=jnp.asarray(most_likely, jnp.int32),
  )


def _most_likely(
  unigram: np.ndarray,
  successors: np.ndarray,
  successor_probs: np.ndarray,
  backoff: np.ndarray,
) -> np.ndarray:
  """Finds the argmax of q(x | y) for each y."""
  # It is a successor of y or the unigrams': else q is backoff times unigram.
  mass = successor_probs + backoff[:, None] * unigram[successors]
  mass = np.where(successor_probs > 0, mass, 0.0)
  best_seen = mass.argmax(axis=1)
  rows, favourite = np.arange(len(unigram)), unigram.argmax()
  use_seen = mass[rows, best_seen] >= backoff * unigram[favourite]
  return np.where(use_seen, successors[rows, best_seen], favourite)


def _successors(
  tokens: np.ndarray, vocab_size: int, max_successors: int, discount: float
) -> tuple[np.ndarray, np.ndarray]:
  """Finds the K most frequent successors of each token, and their q."""
  # A pair is one number: of V = 10, tokens [3, 7, 3, 7] are [37, 73, 37].
  pairs = tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]
  pairs, counts = np.unique(pairs, return_counts=True)
  # By previous token, then most frequent first, then lowest id.
  order = np.lexsort((pairs, -counts, pairs // vocab_size))
  previous, following = np.divmod(pairs[order], vocab_size)
  counts = counts[order]
  totals = np.bincount(previous, weights=counts, minlength=vocab_size)
  # Places among the pairs of a first token: of [3, 3, 3, 7], [0, 1, 2, 0].
  rank = np.arange(previous.size) - np.searchsorted(previous, previous)
  is_kept = rank < max_successors
  previous, following, counts, rank = (
    array[is_kept] for array in (previous, following, counts, rank)
  )
  width = int(rank.max(initial=0)) + 1
  successors = np.zeros((vocab_size, width), np.int32)
  probs = np.zeros((vocab_size, width), np.float32)
  successors[previous, rank] = following
  probs[previous, rank] = (counts - discount) / totals[previous]
  return successors, probs
