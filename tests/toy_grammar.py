"""Small vocabularies, and grammars of their texts."""

import functools

import numpy as np
import pytest

from specdec_jax.base import Grammar
from specdec_jax.text import grammars
from specdec_jax.text.vocabularies import Vocabulary

# Of `pairs`.
V, EOS = 4, 3


@functools.cache
def pairs() -> Vocabulary:
  """Token 2, 'ab', is also spelled by tokens 0 and 1."""
  return _vocabulary({'a': 0, 'b': 1, 'ab': 2, '</s>': EOS}, [('a', 'b')])


def _vocabulary(
  tokens: dict[str, int], merges: list[tuple[str, str]]
) -> Vocabulary:
  tokenizers = pytest.importorskip('tokenizers')
  pytest.importorskip('llguidance')
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab=tokens, merges=merges)
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(['</s>'])
  return Vocabulary(tokenizer=tokenizer, eos_ids=(tokens['</s>'],))


@functools.cache
def letters(vocab_size: int) -> Vocabulary:
  """Token 0 ends texts, the others are b, c, and so on."""
  names = ['</s>', *(chr(ord('a') + i) for i in range(1, vocab_size))]
  return _vocabulary({name: i for i, name in enumerate(names)}, [])


def of_rows(
  *sources: str | None, vocabulary: Vocabulary | None = None
) -> Grammar:
  """The grammars of rows; None allows any text."""
  vocabulary = vocabulary or pairs()
  read = grammars.reader_of(vocabulary, vocabulary.vocab_size)
  numbers = [
    0 if source is None else read.number_of(source) for source in sources
  ]
  return Grammar(numbers=np.array(numbers, np.int32), read=read)


@functools.cache
def may_come(source: str | None, text: tuple[int, ...]) -> np.ndarray:
  """Tells, bool `[V]`, which tokens may follow a text: of a matcher that has
  read nothing else. All, behind a text that is none of the grammar."""
  if source is None:
    return np.ones(V, bool)
  import llguidance

  read = grammars.reader_of(pairs(), V)
  matcher = llguidance.LLMatcher(read._tokenizer, source)
  for token in text:
    if not np.unpackbits(_bits(matcher), bitorder='little')[token]:
      return np.ones(V, bool)
    matcher.try_consume_tokens([token])
  return np.unpackbits(_bits(matcher), bitorder='little')[:V] == 1


def _bits(matcher) -> np.ndarray:
  return np.frombuffer(matcher.compute_bitmask(), np.uint8)
