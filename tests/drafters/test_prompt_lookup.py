"""Prompt lookup against its rule, written out in plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters
from specdec_jax.base import Context
from tests import toy


def reference(tokens, gamma: int, max_ngram: int, min_ngram: int):
  """The tokens that the stated rule copies.

  The longest suffix that occurs earlier wins; of its occurrences the one with
  the most to copy, up to gamma; of those the latest.
  """
  length = len(tokens)
  for size in range(min(max_ngram, length - 1), min_ngram - 1, -1):
    suffix = tokens[length - size :]
    best = None
    for end in range(size, length):
      if tokens[end - size : end] == suffix:
        room = min(length - end, gamma)
        if best is None or room >= best[0]:
          best = (room, end)
    if best is not None:
      room, end = best
      return tokens[end : end + room]
  return []


def _propose(rows, gamma, max_ngram, min_ngram, capacity=30, encoder_rows=None):
  drafter = drafters.prompt_lookup(
    gamma=gamma, max_ngram=max_ngram, min_ngram=min_ngram
  )
  tokens = np.zeros((len(rows), capacity), np.int32)
  for row, ids in enumerate(rows):
    # The rest of the buffer repeats the row: it must not be copied from.
    tokens[row] = np.resize(ids, capacity)
  context = Context(
    tokens=jnp.asarray(tokens),
    lengths=jnp.asarray([len(row) for row in rows], jnp.int32),
  )
  prompt = toy.prompt([[0]] * len(rows), encoder_rows=encoder_rows)
  state = drafter.init((), prompt, capacity)
  draft, _ = drafter.propose((), None, context, state)
  return [
    draft.tokens[row, : int(draft.lengths[row])].tolist()
    for row in range(len(rows))
  ]


@pytest.mark.parametrize(
  ('gamma', 'max_ngram', 'min_ngram'),
  [(1, 3, 1), (4, 1, 1), (4, 3, 1), (5, 3, 2), (3, 8, 1), (30, 2, 1)],
)
def test_copies_what_the_rule_says(gamma, max_ngram, min_ngram):
  rng = np.random.default_rng(gamma)
  rows = [rng.integers(0, 4, rng.integers(1, 30)).tolist() for _ in range(400)]
  found = _propose(rows, gamma, max_ngram, min_ngram)
  expected = [reference(row, gamma, max_ngram, min_ngram) for row in rows]
  assert found == expected
  lengths = [len(tokens) for tokens in expected]
  assert min(lengths) == 0
  assert gamma > 5 or max(lengths) == gamma


def test_copies_from_what_the_encoder_reads():
  rng = np.random.default_rng(0)
  # Id 0 is the encoder's padding, and the decoder's start token.
  sources = [
    rng.integers(1, 5, rng.integers(1, 12)).tolist() for _ in range(99)
  ]
  rows = [
    [0, *rng.integers(1, 5, rng.integers(0, 8)).tolist()] for _ in sources
  ]
  found = _propose(rows, 3, 2, 1, encoder_rows=sources)
  expected = [
    reference(source + row, 3, 2, 1)
    for source, row in zip(sources, rows, strict=True)
  ]
  assert found == expected
  without = _propose(rows, 3, 2, 1)
  assert sum(map(len, found)) > 2 * sum(map(len, without))


@pytest.mark.parametrize(
  ('row', 'copied'),
  [
    ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
    ([1, 2, 3, 4], []),
    ([5], []),
    ([5, 5], [5]),
    # The latest of two full continuations.
    ([1, 7, 7, 7, 1, 8, 8, 8, 1], [8, 8, 8]),
    # A longer suffix beats a later occurrence.
    ([2, 1, 7, 7, 3, 1, 8, 8, 2, 1], [7, 7, 3]),
    # More to copy beats later.
    ([1, 7, 7, 7, 1, 1], [7, 7, 7]),
  ],
)
def test_copies_what_the_eye_expects(row, copied):
  assert _propose([row], 3, 2, 1) == [copied]


def test_long_contexts_and_long_suffixes_do_not_overflow():
  """A match of 512 tokens in a context of 131,072, to be continued by 32."""
  rng = np.random.default_rng(0)
  row = rng.integers(0, 2**15, 131_072)
  row[-512:] = row[70_000:70_512]
  [found] = _propose([row.tolist()], 32, 512, 1, capacity=131_072)
  assert found == row[70_512:70_544].tolist()


def test_suffix_length_is_bounded_from_below():
  assert _propose([[1, 9, 2, 1]], 3, 3, 2) == [[]]
  assert _propose([[1, 9, 2, 1]], 3, 3, 1) == [[9, 2, 1]]


@pytest.mark.parametrize(('max_ngram', 'min_ngram'), [(0, 0), (2, 3), (2, 0)])
def test_bad_suffix_lengths_are_refused(max_ngram, min_ngram):
  with pytest.raises(ValueError, match='1 <= min_ngram <= max_ngram'):
    drafters.prompt_lookup(gamma=2, max_ngram=max_ngram, min_ngram=min_ngram)


def several(tokens, gamma: int, count: int, max_ngram: int, min_ngram: int):
  """The continuations that the stated rule takes, each of gamma tokens."""
  length, found = len(tokens), []

  def order(end: int):
    sizes = range(min(max_ngram, end), min_ngram - 1, -1)
    size = next(
      (n for n in sizes if tokens[end - n : end] == tokens[length - n :]), 0
    )
    return size, min(length - end, gamma), end

  for size, _, end in sorted(map(order, range(1, length)), reverse=True):
    if size and tokens[end] not in [first for first, *_ in found]:
      found.append((np.resize(tokens[end:], gamma)).tolist())
  return (found + found[:1] * count)[:count]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('gamma', 'count', 'max_ngram', 'min_ngram'),
  [(1, 4, 3, 1), (4, 2, 1, 1), (5, 3, 3, 2), (30, 2, 2, 1)],
)
def test_several_continuations_begin_differently(
  gamma, count, max_ngram, min_ngram
):
  rng = np.random.default_rng(gamma)
  rows = [rng.integers(0, 4, rng.integers(1, 30)).tolist() for _ in range(200)]
  drafter = drafters.continuations(
    gamma=gamma,
    max_ngram=max_ngram,
    min_ngram=min_ngram,
    num_continuations=count,
  )
  assert drafter.gamma == gamma * count == len(drafter.tree.parents)
  tokens = np.stack([np.resize(row, 30) for row in rows])
  context = Context(
    tokens=jnp.asarray(tokens, jnp.int32),
    lengths=jnp.asarray([len(row) for row in rows], jnp.int32),
  )
  draft, _ = drafter.propose((), None, context, ())
  expected = [several(row, gamma, count, max_ngram, min_ngram) for row in rows]
  assert {len(each) for each in expected} == {0, count}
  lengths = [gamma * count if each else 0 for each in expected]
  assert draft.lengths.tolist() == lengths
  # Node by node, from the root down each chain.
  chains = [
    [1 + i + count * depth for depth in range(gamma)] for i in range(count)
  ]
  for nodes in chains:
    assert [drafter.tree.parents[n - 1] for n in nodes] == [0, *nodes[:-1]]
  for row, each in zip(np.asarray(draft.tokens), expected, strict=True):
    if each:
      assert [[row[n - 1] for n in nodes] for nodes in chains] == each
  alone = _propose(rows, gamma, max_ngram, min_ngram)
  for first, each in zip(alone, expected, strict=True):
    assert first == (each[0][: len(first)] if each else [])


def test_no_continuation_is_none():
  with pytest.raises(ValueError, match='num_continuations must'):
    drafters.continuations(gamma=2, num_continuations=0)
