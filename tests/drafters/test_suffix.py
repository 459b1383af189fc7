"""Suffix drafts against their rule, written out in plain Python."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters
from specdec_jax.assembly.drafters import Suffix
from specdec_jax.assembly.drafters.choice import Target
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Context
from specdec_jax.drafters import text_pool
from specdec_jax.drafters.suffix import MAX_MATCH
from tests import toy

GAMMA, CAPACITY, POOL = 4, 24, 256
SUFFIX = drafters.suffix(gamma=GAMMA)
PROPOSE = jax.jit(SUFFIX.propose)


def matches(text, context) -> dict[int, int]:
  """How many tokens before each position of a text end the context."""
  found = {}
  for end in range(1, len(text) + 1):
    size = 0
    while (
      size < min(end, len(context), MAX_MATCH)
      and text[end - 1 - size] == context[-1 - size]
    ):
      size += 1
    found[end] = size
  return found


def reference(texts, context):
  """Drafts that the stated rule allows: of places that agree as much, any."""
  own = matches(context[:-1], context)
  size = max(own.values(), default=0)
  places = [
    (found, text[end:])
    for text in texts
    for end, found in matches(text, context).items()
  ]
  in_pool = max((found for found, _ in places), default=0)
  if max(size, in_pool) < 2:
    return [[]]
  if size >= in_pool:
    # The one with the most to copy, up to gamma, then the latest.
    ends = [end for end, found in own.items() if found == size]
    start = max(ends, key=lambda end: (min(len(context) - end, GAMMA), end))
    return [np.resize(context[start:], GAMMA).tolist()]
  following = [ids[:GAMMA] for found, ids in places if found == in_pool]
  padded = [ids + [-1] * (GAMMA - len(ids)) for ids in following]
  shared = lambda a, b: int(np.cumprod(np.equal(a, b)).sum())
  votes = [sum(shared(a, b) for b in padded) for a in padded]
  assert len(votes) <= 8  # Else not all would be asked.
  return [f for f, v in zip(following, votes, strict=True) if v == max(votes)]


def propose(pool, contexts, encoder_rows=None):
  tokens = np.zeros((len(contexts), CAPACITY), np.int32)
  for row, ids in enumerate(contexts):
    tokens[row] = np.resize(ids, CAPACITY)  # The rest must not matter.
  context = Context(
    tokens=jnp.asarray(tokens),
    lengths=jnp.asarray([len(ids) for ids in contexts], jnp.int32),
  )
  prompt = toy.prompt([[0]] * len(contexts), encoder_rows=encoder_rows)
  state = SUFFIX.init(pool, prompt, CAPACITY)
  draft, _ = PROPOSE(pool, None, context, state)
  return [
    draft.tokens[row, : int(draft.lengths[row])].tolist()
    for row in range(len(contexts))
  ]


def random_texts(rng, count, vocab_size=6):
  return [
    rng.integers(0, vocab_size, rng.integers(1, CAPACITY)).tolist()
    for _ in range(count)
  ]


def differences(drafter_pool, texts, contexts) -> int:
  found = propose(drafter_pool, contexts)
  return sum(
    draft not in reference(texts, context)
    for draft, context in zip(found, contexts, strict=True)
  )


def test_drafts_what_the_rule_says():
  rng = np.random.default_rng(0)
  texts = random_texts(rng, 12)
  # A text of the pool, cut and with noise in front: long matches.
  contexts = random_texts(rng, 200) + [
    [5, *ids[: rng.integers(1, len(ids) + 1)]] for ids in texts * 10
  ]
  pool = text_pool.remember(text_pool.empty(POOL), texts)
  assert differences(pool, texts, contexts) == 0
  # Controls: a pool out of order, and one of other texts.
  mixed = pool.replace(order=pool.order[::-1].copy())
  assert differences(mixed, texts, contexts) > 0
  assert differences(pool, texts[1:], contexts) > 0


def test_the_draft_is_what_most_places_agree_on_and_ends_with_their_text():
  texts = [[7, 1, 2, 3, 3], [8, 1, 2, 4, 4, 5], [9, 1, 2, 4, 4, 6]]
  pool = text_pool.remember(text_pool.empty(POOL), texts)
  [draft] = propose(pool, [[0, 1, 2]])
  assert draft in ([4, 4, 5], [4, 4, 6])
  # A longer match is another place; none, and a match of one token, no draft.
  assert propose(pool, [[7, 1, 2], [0, 2], [11]]) == [[3, 3], [], []]


def test_what_is_remembered_displaces_the_oldest_and_compiles_nothing():
  rng = np.random.default_rng(1)
  texts = random_texts(rng, 40)
  pool = text_pool.empty(POOL)
  propose(pool, [[1, 2]])
  before = PROPOSE._cache_size()
  for text in texts:
    pool = text_pool.remember(pool, [text])
  at_once = text_pool.remember(text_pool.empty(POOL), texts)
  assert (pool.tokens == at_once.tokens).all()
  last = [token for ids in texts for token in (*ids, -1)][1 - POOL :]
  assert pool.tokens[1:].tolist() == last
  contexts = [ids[:9] for ids in texts[-5:] if len(ids) > 9]
  assert propose(pool, contexts) == propose(at_once, contexts)
  assert PROPOSE._cache_size() <= before + 1  # Of another number of rows.


def test_what_the_encoder_reads_is_looked_up_with_the_context():
  pool = text_pool.remember(text_pool.empty(POOL), [[5, 6, 7, 0, 8, 9]])
  found = propose(pool, [[0], [0]], encoder_rows=[[5, 6, 7], [5, 6, 4]])
  assert found == [[8, 9], []]


def test_a_text_has_no_tokens_that_the_model_lacks(tmp_path):
  """A tokenizer may have more of them, such as those of other models."""
  path = tmp_path / 'text'
  path.write_text('abc')
  words = types.SimpleNamespace(
    vocab_size=200, eos_ids=(), encode=lambda text, **_: list(text.encode())
  )

  def pool(num_logits: int):
    config = toy.llama_config(num_logits)
    target = Target(
      name='', config=config, vocabulary=words, sampling=TextSettings()
    )
    return Suffix(suffix_text=str(path)).make(target, Fixed(2)).join(None, ())

  assert pool(100).tokens[-4:].tolist() == [97, 98, 99, -1]
  with pytest.raises(ValueError, match='text has tokens that the model lacks'):
    pool(99)


def test_sizes_that_nothing_can_be_done_with():
  with pytest.raises(ValueError, match='at least 2 tokens'):
    text_pool.empty(1)
  with pytest.raises(ValueError, match='min_ngram'):
    drafters.suffix(gamma=1, min_ngram=MAX_MATCH + 1)
