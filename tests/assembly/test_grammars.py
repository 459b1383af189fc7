"""Regular expressions and JSON schemas: what is compiled of them, and texts."""

import calendar
import functools
import json
import re

import numpy as np
import pytest

pytest.importorskip('outlines_core')
pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')
pytest.importorskip('tokenizers')
pytest.importorskip('jsonschema')

import jsonschema

import specdec_jax
from specdec_jax.assembly import constraints
from specdec_jax.assembly.constraints import Constraint
from specdec_jax.text import grammars, json_schemas
from tests.cli import tiny

SCHEMA = {
  'type': 'object',
  'properties': {
    'the': {'enum': ['in', 'ab', 'é"']},
    'is_it': {'type': 'boolean'},
    'text': {'type': 'string', 'maxLength': 3},
    'more': {'type': 'array', 'items': {'$ref': '#/$defs/n'}, 'maxItems': 2},
  },
  'required': ['the', 'is_it', 'text'],
  '$defs': {'n': {'anyOf': [{'type': 'null'}, {'const': 7}]}},
}
REGEX = r'(the|[a-c]{2,3}é?) (in){1,2}\.'


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
  return tiny.write_model(tmp_path_factory.mktemp('grammars') / 'tiny')


@pytest.fixture(scope='module')
def decoder(folder):
  return specdec_jax.load(folder, drafter='prompt_lookup', gamma=3)


def _vocabularies(decoder):
  pair = specdec_jax.load('ende-mini', drafter='none')
  return decoder.vocabulary, pair.vocabulary


@pytest.mark.parametrize(
  'pattern', [REGEX, r'\{"Wort":"[a-zäöü ]{1,9}"\}', r'[0-9]{1,2}( Uhr)?']
)
def test_texts_end_where_they_match_and_only_there(decoder, pattern):
  rng = np.random.default_rng(0)
  for vocabulary in _vocabularies(decoder):
    made = grammars.compiled(pattern, vocabulary)
    num_ends = 0
    for _ in range(60):
      state, ids = 1, []
      for _ in range(40):
        allowed = np.flatnonzero(made.next[state, made.classes] != 0)
        # No state is left without a way on.
        assert allowed.size
        text = vocabulary.decode(ids)
        ends = set(allowed) & set(vocabulary.eos_ids)
        assert bool(ends) == bool(re.fullmatch(pattern, text)), text
        # Ends are few among the tokens that may come.
        if ends and rng.random() < 0.5:
          num_ends += 1
          break
        token = rng.choice(allowed)
        if token in vocabulary.eos_ids:
          num_ends += 1
          break
        ids.append(int(token))
        state = made.next[state, made.classes[token]]
    assert num_ends == 60


def test_every_spelling_of_a_text_may_come(decoder):
  for vocabulary in _vocabularies(decoder):
    for pattern, *texts in (
      (REGEX, 'the in.', 'ab inin.', 'abc in.'),
      # A text of it goes on where another one ends.
      ('the|the in|the in .', 'the', 'the in', 'the in é'),
      ('in(, in)*', 'in', 'in, in, in'),
    ):
      made = grammars.compiled(pattern, vocabulary)
      for text in texts:
        state = 1
        for token in vocabulary.encode(text, add_special_tokens=False):
          state = made.next[state, made.classes[token]]
          assert state, text
        assert made.next[state, made.classes[vocabulary.eos_ids[0]]], text


def test_guesses_spell_the_only_text_as_usual(decoder):
  own, pair = _vocabularies(decoder)
  # Behind a, a text may end: ab is one of two.
  assert grammars.compiled('a|ab', own).guesses[1] == -1
  made = grammars.compiled('(in|the): ', pair)
  [token] = pair.encode('in', add_special_tokens=False)
  guess = made.guesses[made.next[1, made.classes[token]]]
  # Not the byte, which is a token as well.
  assert pair.tokens()[guess] == ':'


@pytest.mark.parametrize(
  ('schema', 'texts', 'others'),
  [
    ({'enum': [1, 12]}, ['1', '12'], ['']),
    ({'type': 'string', 'pattern': '^a|b$'}, ['"a"', '"b"'], ['"a', '"ab"']),
    (
      {'type': 'object', 'properties': {'a"b': {'type': 'null'}}},
      ['{}', '{"a\\"b":null}'],
      ['{"a"b":null}'],
    ),
  ],
)
def test_schemas_as_regular_expressions(schema, texts, others):
  pattern = json_schemas.to_regex(json.dumps(schema))
  assert all(re.fullmatch(pattern, text) for text in texts)
  assert not any(re.fullmatch(pattern, text) for text in others)


@pytest.mark.parametrize(
  ('form', 'rest'), [('date', ''), ('date-time', 'T23:59:59.5+01:00')]
)
def test_dates_are_days_that_exist(form, rest):
  schema = {'type': 'string', 'format': form}
  pattern = json_schemas.to_regex(json.dumps(schema))
  for year in (1600, 1900, 1904, 1999, 2000, 2004, 2016, 2023, 2100, 9996):
    for month in range(14):
      last = calendar.monthrange(year, month)[1] if 0 < month < 13 else 0
      for day in range(33):
        text = f'"{year}-{month:02}-{day:02}{rest}"'
        assert bool(re.fullmatch(pattern, text)) == (0 < day <= last), text


@pytest.mark.parametrize(
  ('pattern', 'texts', 'others'),
  [
    (r'\d+', ['12'], ['٣']),
    (r'[\d.-]{2}', ['1.', '-0'], ['٣.']),
    (r'[^\W0-9]', ['a', '_'], ['1', 'é', '-']),
    (r'[^\D1]\w', ['2a'], ['1a', '2é']),
    ('^a$', ['a'], ['^a', 'a$']),
    (r'[a\]^]\^', ['a^', ']^', '^^'], ['a', 'b^']),
    ('[[:digit:]^]', ['1', '^'], ['a', ':']),
  ],
)
def test_classes_of_a_pattern_are_of_ascii(pattern, texts, others):
  schema = json.dumps({'type': 'string', 'pattern': pattern})
  steps, is_end = grammars._byte_automaton(json_schemas.to_regex(schema))

  def matches(text):
    go = lambda state, byte: steps[state, byte]
    return is_end[functools.reduce(go, f'"{text}"'.encode(), 1)]

  assert all(map(matches, texts))
  assert not any(map(matches, others))


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_rows_of_one_batch_follow_their_own_grammars(decoder, temperature):
  texts = ['the in ab', 'ab', 'in the the', 'the']
  ways = {
    'json_schema': [SCHEMA, None, json.dumps(SCHEMA), None],
    'regex': [None, REGEX, None, None],
  }
  how = {'max_new_tokens': 80, 'temperature': temperature}
  run = lambda texts, **more: list(
    specdec_jax.generate(decoder, texts, **how, **more)
  )
  together = run(texts, batch_size=4, seed=[1, 2, 3, 4], **ways)
  for i, found in enumerate(together):
    own = {name: values[i : i + 1] for name, values in ways.items()}
    [alone] = run(texts[i : i + 1], seed=[i + 1], **own)
    assert alone.text == found.text
  for i in (0, 2):
    assert together[i].finish_reason == 'stop'
    jsonschema.validate(json.loads(together[i].text), SCHEMA)
  assert re.fullmatch(REGEX, together[1].text)


def test_what_is_forced_takes_fewer_runs(folder, decoder):
  # `{"the":"` and more is one text, whatever the drafter knows.
  forced = specdec_jax.load(folder, drafter='grammar', gamma=7)
  plain = specdec_jax.load(folder, drafter='none')
  found = [
    next(
      specdec_jax.generate(each, ['ab'], json_schema=SCHEMA, max_new_tokens=80)
    )
    for each in (plain, forced)
  ]
  assert found[0].text == found[1].text
  runs = [each.statistics['target_runs'] for each in found]
  assert runs[1] * 1.3 < runs[0]


@pytest.mark.slow
@pytest.mark.parametrize(
  'more',
  [{'min_new_tokens': 6}, {'suppress_tokens': [0, 2], 'temperature': [0, 1]}],
)
def test_settings_that_leave_no_token_are_told(decoder, more):
  texts = specdec_jax.generate(
    decoder, ['in', 'ab'], regex=[None, '(ab){2}'], max_new_tokens=8, **more
  )
  assert next(texts).tokens
  with pytest.raises(ValueError, match='prompt 2: after'):
    next(texts)


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_processors_that_leave_no_token_are_told_too(decoder, temperature):
  most = [i for i in range(decoder.target.vocab_size) if i not in (5, 2)]
  once = {'no_repeat_ngram_size': 1, 'min_new_tokens': 4, 'max_new_tokens': 6}
  texts = specdec_jax.generate(
    decoder, ['in'], suppress_tokens=most, temperature=temperature, **once
  )
  with pytest.raises(ValueError, match=r'after 1 new tokens .* left no token'):
    next(texts)


@pytest.mark.slow
def test_adaptive_drafts_do_not_depend_on_neighbours(folder):
  # Guesses lengthen short drafts by what the draft model has not read.
  guessed = specdec_jax.load(
    folder, draft_model=folder, gamma=8, temperature=1.0, min_prob=0.9
  )
  run = lambda texts, seeds: [
    (each.tokens, each.statistics['target_runs'])
    for each in specdec_jax.generate(
      guessed,
      texts,
      batch_size=len(texts),
      seed=seeds,
      max_new_tokens=60,
      regex=r'\{"name":"[a-z]{2,6}","colour of it":"[a-z]{2,6}"\}',
    )
  ]
  for seed in range(3):
    [alone] = run(['the in ab'], [seed])
    assert run(['the in ab', 'ab ab in the'], [seed, 7])[0] == alone


@pytest.mark.parametrize(
  ('way', 'message'),
  [
    ({'regex': 'a(?=b)'}, r"regex 'a\(.*': this grammar cannot be compiled"),
    ({'regex': 'a', 'json_schema': SCHEMA}, 'exclude each other'),
    ({'regex': 5}, 'should be a regular expression'),
    ({'json_schema': '{"type": '}, 'no JSON'),
    ({'json_schema': 'no/such/file'}, 'json_schema: cannot read no/such'),
    ({'json_schema': '{"anyOf":[' * 400 + '1' + ']}' * 400}, 'too deeply'),
    ({'json_schema': '{"a":' * 99999 + '1' + '}' * 99999}, 'no JSON'),
    ({'json_schema': {'type': 'integer', 'minimum': 3}}, '#: minimum is not'),
    ({'json_schema': {'oneOf': [SCHEMA]}}, 'type should be one of'),
    ({'json_schema': {'type': 'object'}}, 'needs properties'),
    (
      {'json_schema': {'type': 'array', 'items': {'type': 'x'}}},
      '#/items: type should',
    ),
    (
      {'json_schema': {'type': 'string', 'pattern': '.*'}},
      'allows a quote',
    ),
    ({'json_schema': {'type': 'string', 'format': 'email'}}, 'format should'),
    ({'json_schema': {'type': {}}}, 'type should be one of'),
    ({'json_schema': {'enum': []}}, 'enum should be a list'),
    ({'json_schema': {'const': float('nan')}}, 'NaN is no number of JSON'),
    ({'json_schema': {'enum': [1, [-1e999]]}}, '-Infinity is no number'),
    ({'json_schema': '{"const": 1e999}'}, 'Infinity is no number of JSON'),
    (
      {'json_schema': {'type': 'string', 'enum': ['a', 1]}},
      'enum has 1, not of type',
    ),
    (
      {'json_schema': {'type': ['integer', 'null'], 'const': True}},
      'const has True, not of type',
    ),
    ({'json_schema': {'type': 'string', 'maxLength': -1}}, 'from 0 to 65535'),
    (
      {'json_schema': {'type': 'string', 'minLength': 2, 'maxLength': 1}},
      'minLength 2 exceeds maxLength 1',
    ),
    ({'json_schema': {**SCHEMA, 'required': ['x']}}, 'list of properties'),
    ({'json_schema': {'$ref': '#/x'}}, 'should name a part'),
    (
      {'json_schema': {'anyOf': [{'$ref': '#'}]}},
      '#/anyOf/0: # contains itself',
    ),
    ({'regex': '^a$'}, 'write it without anchors'),
    ({'regex': '(^yes)|no'}, r'anchors.*has the anchor \^'),
    ({'regex': r'yes|\Ano'}, r'anchors.*has the anchor \\A'),
    (
      {'json_schema': {'type': 'string', 'pattern': '^foo|^bar'}},
      r'has the anchor \^',
    ),
    ({'regex': 'a)|(b'}, 'write it without anchors'),
    ({'regex': r'[\x00-\x08]漢{22000}'}, 'states'),
  ],
)
def test_what_would_not_be_heeded_is_refused(decoder, way, message):
  with pytest.raises(ValueError, match=message):
    specdec_jax.generate(decoder, ['ab'], max_new_tokens=8, **way)


@pytest.mark.parametrize(
  'pattern', [r'"([^"\\]|\\.){0,400}"', r'[\s\S]{0,400}', 'a|(b|bb){400}']
)
def test_long_texts_take_no_longer_to_compile(decoder, pattern):
  """A search that may begin anywhere would take years."""
  made = grammars.compiled(pattern, decoder.vocabulary)
  assert len(made.next) > 400


def test_tables_of_one_size_share_a_program(decoder):
  num_logits = decoder.target.vocab_size
  made = []
  for regex in ('(the|in)', 'ab{3}'):
    own = constraints.compiled(Constraint(regex=regex), decoder.vocabulary)
    made.append(constraints.of_rows([own], [0], 2, num_logits))
  shapes = [[leaf.shape for leaf in vars(each).values()] for each in made]
  assert shapes[0] == shapes[1]
  # The second row is nobody's.
  assert made[0].states.tolist() == [1, 0]
