"""Rows of the core's tables of tests that are about this drafter."""

import numpy as np

from specdec_jax.base import Drafter
from specdec_jax.contrib.ngram import ngram_counts
from specdec_jax.contrib.ngram.drafter import ngram
from specdec_jax.sampling import logits
from tests.contracts.rows import VOCAB_SIZE, Row


def counted(order: int, *, vocab_size: int, num_tokens: int):
  """The table of counts of random tokens."""
  rng = np.random.default_rng(order)
  tokens = rng.integers(0, vocab_size, num_tokens)
  return ngram_counts.estimate(tokens, vocab_size=vocab_size, order=order)


def _contract(order: int, is_sampled: bool):
  table = counted(order, vocab_size=VOCAB_SIZE, num_tokens=200)
  to_probs = logits.standardize(top_k=3) if is_sampled else None
  return lambda gamma: ngram(table, gamma=gamma, logits_to_probs=to_probs)


# Rows of the contract of drafters, and those that are tested now.
DRAFTERS = (
  {
    'unigram': Row(_contract(1, False), is_one_hot=True),
    'bigram': Row(_contract(2, False), is_one_hot=True),
    'unigram, sampled': Row(_contract(1, True)),
    'bigram, sampled': Row(_contract(2, True)),
  },
  ['bigram, sampled'],
)


def in_the_loop(
  name: str, *, gamma: int, vocab_size: int, logits_to_probs
) -> Drafter:
  """The drafter of a row of the loop's tests: `unigram`, `bigram` or `argmax
  bigram`."""
  order = 1 if name == 'unigram' else 2
  table = counted(order, vocab_size=vocab_size, num_tokens=60)
  if name.startswith('argmax'):
    return ngram(table, gamma=gamma)
  return ngram(table, gamma=gamma, logits_to_probs=logits_to_probs)


# The options with which every door drafts; `{folder}` has the texts.
DRAFTER_OPTIONS = {
  'ngram': {'gamma': 2, 'ngram_text': '{folder}/counted.txt'},
}
