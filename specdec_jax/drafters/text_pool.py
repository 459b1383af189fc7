"""Texts to copy from, sorted on the host for `drafters.suffix`."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specdec_jax.drafters.suffix import APART, MAX_MATCH, Pool


def empty(size: int) -> Pool:
  """Returns an empty pool for `size` tokens; ValueError if that is below 2."""
  if size < 2:
    raise ValueError(f'a pool needs room for at least 2 tokens, got {size}')
  return of_tokens(np.full(size, APART, np.int32))


def remember(pool: Pool, texts: Iterable[Sequence[int]]) -> Pool:
  """Adds the token ids of texts, which replace the oldest ones if the pool is
  full. Every call sorts the whole pool: add many texts at a time."""
  return of_tokens(joined(pool.tokens, texts))


def joined(tokens: Any, texts: Iterable[Sequence[int]]) -> np.ndarray:
  """Adds the ids of texts to `Pool.tokens`, which are not sorted."""
  parts = [np.asarray([*ids, APART], np.int32) for ids in texts]
  newest = np.concatenate([np.asarray(tokens), *parts])[-tokens.size :]
  newest[0] = APART
  return newest


def of_tokens(tokens: Any) -> Pool:
  """Sorts `Pool.tokens`; ten million take about a minute."""
  used = tokens[np.argmax(tokens >= 0) :]
  # Ranks by the last token, then by the last 2, 4, ...: of texts 5 7 | 3 7, the
  # second 7 comes before the first, since 3 comes before 5.
  ranks = used.astype(np.int64) + 1
  width = 1
  while width < MAX_MATCH:
    before = np.concatenate([np.zeros(width, np.int64), ranks])[: used.size]
    ranks = ranks * (ranks.max() + 1) + before
    ranks = np.unique(ranks, return_inverse=True)[1]
    width *= 2
  # Unused positions sort first.
  num_free = tokens.size - used.size
  order = np.zeros_like(tokens)
  order[num_free:] = np.argsort(ranks, kind='stable') + num_free
  return Pool(tokens=tokens, order=order)
