"""Grammars against `llguidance`, which parses texts as they come and makes no
automaton: along random texts the same tokens of SmolLM2 may come next."""

import functools
import json

import numpy as np
import pytest

pytest.importorskip('outlines_core')
pytest.importorskip('llguidance')

import llguidance

from specdec_jax.checkpoints import loading
from specdec_jax.text import grammars, json_schemas

pytestmark = pytest.mark.smollm2

REGEXES = [
  r'(yes|no), because [^.]+\.',
  # Texts that go on where another one ends.
  r'a|ab|abc+',
  r'[A-Z][a-z]+( [A-Z][a-z]+)*',
  r'[0-9]{1,2}( Uhr)?',
  r'(a|b)*abb',
  r'.{1,20}',
  r'\d{4}-\d{2}|\w+@\w+\.com',
  r'(?i)straße|日本+|[^\x00-\x7f]{1,3}',
]
_OBJECT = {'type': 'object', 'additionalProperties': False}
_BOOLEAN = {'type': 'boolean'}
SCHEMAS = [
  {'type': 'integer'},
  {'type': 'number'},
  {'type': ['string', 'null'], 'minLength': 2, 'maxLength': 4},
  {'enum': [1, 12, 'é"', None, 1.5, {'a': [True]}]},
  {'type': 'string', 'pattern': '^(a|ab[0-9]*)$'},
  {'type': 'array', 'items': {'type': 'number'}},
  {'type': 'array', 'items': _BOOLEAN, 'minItems': 2, 'maxItems': 3},
  {'type': 'array', 'items': _BOOLEAN, 'maxItems': 0},
  {
    **_OBJECT,
    'properties': {'a"b': _BOOLEAN, 'é': {'type': 'null'}, 'c': _BOOLEAN},
    'required': ['é'],
  },
  {
    **_OBJECT,
    'properties': {'a': _BOOLEAN, 'b': {'$ref': '#/$defs/n'}, 'c': _BOOLEAN},
    '$defs': {
      'n': {'anyOf': [{'$ref': '#/$defs/m'}, {'const': [1, 2]}]},
      'm': {'type': 'array', 'items': {'type': 'string'}, 'maxItems': 1},
    },
  },
]
# Where ours is one way of several: of writing a time, a UUID, and for a pattern
# without anchors, which others look for within a text. They know no leap year.
NARROWER = [
  {'type': 'string', 'format': 'date'},
  {'type': 'string', 'format': 'date-time'},
  {'type': 'string', 'format': 'uuid'},
  {'type': 'string', 'pattern': 'a|b+'},
]


@functools.cache
def vocabulary():
  try:
    path = loading.locate('smollm2-135m')
    return loading.vocabulary_of(path, loading.read_config(path), None)
  except (ImportError, ValueError) as error:
    pytest.skip(f'SmolLM2 is not installed: {error}')


@functools.cache
def _tokenizer(folder):
  path = folder / 'tokenizer.json'
  path.write_text(vocabulary().tokenizer.to_str(), encoding='utf-8')
  eos_ids = [*vocabulary().eos_ids]
  return llguidance.LLTokenizer(str(path), eos_token=eos_ids)


def _check(made, matcher, rng, is_narrower: bool) -> None:
  """Compares the tokens that may come along one text."""
  state = 1
  for _ in range(40):
    ours = made.next[state, made.classes] != 0
    bias = np.frombuffer(matcher.compute_logit_bias(), np.uint8)
    theirs = (bias != 0)[: ours.size]
    if matcher.compute_ff_bytes():
      # Where one text alone is left, it names its usual spelling alone.
      others = np.flatnonzero(ours & ~theirs)
      theirs = theirs.copy()
      theirs[others] = [matcher.validate_tokens([int(i)]) for i in others]
    assert not (ours & ~theirs).any()
    assert is_narrower or not (theirs & ~ours).any()
    # Short ones, which are the first of the vocabulary, as often as others.
    ids = np.flatnonzero(ours)
    token = int(rng.choice(ids[: 1 + len(ids) // rng.choice([1, 20])]))
    if token in vocabulary().eos_ids:
      break
    assert matcher.consume_token(token), matcher.get_error()
    state = made.next[state, made.classes[token]]


@pytest.mark.parametrize(
  ('given', 'is_narrower'),
  [
    *((each, False) for each in (*REGEXES, *SCHEMAS)),
    *((each, True) for each in NARROWER),
  ],
)
def test_the_same_tokens_may_come(given, is_narrower, tmp_path_factory):
  pattern, kind = given, llguidance.LLMatcher
  if isinstance(given, str):
    theirs = kind.grammar_from_regex(given)
  else:
    pattern = json_schemas.to_regex(json.dumps(given))
    theirs = kind.grammar_from_json_schema(
      given, overrides={'whitespace_flexible': False}
    )
  made = grammars.compiled(pattern, vocabulary())
  tokenizer = _tokenizer(tmp_path_factory.getbasetemp())
  rng = np.random.default_rng(0)
  for _ in range(12):
    _check(made, kind(tokenizer, theirs), rng, is_narrower)
