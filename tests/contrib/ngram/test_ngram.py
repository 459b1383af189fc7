"""N-gram tables against counts made in plain Python."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.base import Context
from specdec_jax.contrib.ngram import ngram_counts
from specdec_jax.contrib.ngram.drafter import next_probs, ngram
from specdec_jax.sampling import logits

VOCAB_SIZE = 6


def _stream(count: int = 300, seed: int = 0):
  rng = np.random.default_rng(seed)
  # Token 5 never occurs, and 4 only at the very end.
  return np.append(rng.choice(4, count, p=[0.5, 0.25, 0.15, 0.1]), 4)


def reference(tokens, order: int, max_successors: int, discount: float):
  """q(x | y) by the stated rule, float64 `[V, V]`."""
  unigram = np.ones(VOCAB_SIZE)
  for token in tokens:
    unigram[token] += 1
  unigram /= unigram.sum()
  if order == 1:
    return np.tile(unigram, (VOCAB_SIZE, 1))
  following = collections.defaultdict(collections.Counter)
  for before, after in itertools.pairwise(tokens):
    following[before][after] += 1
  probs = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
  for before in range(VOCAB_SIZE):
    counts = following[before]
    total = sum(counts.values())
    likeliest = sorted(counts, key=lambda token: (-counts[token], token))
    for token in likeliest[:max_successors]:
      probs[before, token] = (counts[token] - discount) / total
    probs[before] += (1 - probs[before].sum()) * unigram
  return probs


@pytest.mark.parametrize('order', [1, 2])
@pytest.mark.parametrize('max_successors', [1, 3, 32])
@pytest.mark.parametrize('discount', [0.0, 0.5])
def test_law_is_the_discounted_count(order, max_successors, discount):
  tokens = _stream()
  table = ngram_counts.estimate(
    tokens,
    vocab_size=VOCAB_SIZE,
    order=order,
    max_successors=max_successors,
    discount=discount,
  )
  every = jnp.arange(VOCAB_SIZE, dtype=jnp.int32)
  found = np.asarray(next_probs(table, every))
  expected = reference(tokens.tolist(), order, max_successors, discount)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
  np.testing.assert_array_equal(table.most_likely, expected.argmax(-1))
  if discount:
    assert (found[:4] > 0).all()


def test_likeliest_token_may_be_one_that_was_never_seen_to_follow():
  """After token 2, only token 3 was seen, once: the unigrams outweigh it."""
  tokens = np.array([0] * 50 + [2, 3])
  table = ngram_counts.estimate(
    tokens, vocab_size=VOCAB_SIZE, discount=0.9, smoothing=0.1
  )
  assert table.most_likely[2] == 0
  assert reference(tokens.tolist(), 2, 32, 0.9)[2].argmax() == 0


def _context(last):
  tokens = np.zeros((len(last), 4), np.int32)
  tokens[:, 1] = last
  return Context(
    tokens=jnp.asarray(tokens), lengths=jnp.full(len(last), 2, jnp.int32)
  )


def test_deterministic_draft_follows_the_likeliest_chain():
  table = ngram_counts.estimate(_stream(), vocab_size=VOCAB_SIZE)
  drafter = ngram(table, gamma=4)
  draft, _ = drafter.propose((), None, _context(range(VOCAB_SIZE)), ())
  best = reference(_stream().tolist(), 2, 32, 0.5).argmax(-1)
  for token in range(VOCAB_SIZE):
    chain = []
    current = token
    for _ in range(4):
      current = int(best[current])
      chain.append(current)
    assert draft.tokens[token].tolist() == chain


def test_sampled_draft_hands_over_the_law_it_draws_from():
  table = ngram_counts.estimate(_stream(), vocab_size=VOCAB_SIZE)
  drafter = ngram(
    table, gamma=3, logits_to_probs=logits.standardize(temperature=0.5)
  )
  last = np.arange(4000) % VOCAB_SIZE
  keys = jax.random.split(jax.random.key(0), 4000)
  draft, _ = drafter.propose((), keys, _context(last), ())
  sharpened = reference(_stream().tolist(), 2, 32, 0.5) ** 2
  sharpened /= sharpened.sum(-1, keepdims=True)
  before = np.concatenate([last[:, None], draft.tokens[:, :-1]], axis=1)
  np.testing.assert_allclose(draft.probs, sharpened[before], atol=1e-5)
  for i in range(3):
    # Counts of drawn tokens against the sum of the probs they were drawn from.
    counts = np.bincount(draft.tokens[:, i], minlength=VOCAB_SIZE)
    expected = np.asarray(draft.probs[:, i], np.float64).sum(0)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()


@pytest.mark.parametrize(
  ('tokens', 'settings', 'message'),
  [
    ([], {}, 'stream of tokens'),
    ([[1, 2]], {}, 'stream of tokens'),
    ([1, 6], {}, 'ids 1 to 6'),
    ([-1, 2], {}, 'ids -1 to 2'),
    ([1, 2], {'order': 3}, 'order.*got 3'),
    ([1, 2], {'discount': 1.0}, 'discount'),
    ([1, 2], {'smoothing': 0.0}, 'smoothing positive'),
    ([1, 2], {'max_successors': 0}, 'max_successors'),
  ],
)
def test_bad_settings_are_refused(tokens, settings, message):
  with pytest.raises(ValueError, match=message):
    ngram_counts.estimate(
      np.array(tokens, int), vocab_size=VOCAB_SIZE, **settings
    )


def test_one_token_stream_is_all_unigrams():
  table = ngram_counts.estimate(np.array([3]), vocab_size=VOCAB_SIZE)
  every = jnp.arange(VOCAB_SIZE, dtype=jnp.int32)
  np.testing.assert_allclose(
    next_probs(table, every), reference([3], 1, 1, 0), atol=1e-6
  )
