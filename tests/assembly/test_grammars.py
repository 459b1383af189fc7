"""Texts that match a grammar: options, rows of one batch, and refusals."""

import json
import re

import pytest

pytest.importorskip('llguidance')
pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')
pytest.importorskip('tokenizers')
pytest.importorskip('jsonschema')

import jsonschema

import specdec_jax
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
  'additionalProperties': False,
  '$defs': {'n': {'anyOf': [{'type': 'null'}, {'const': 7}]}},
}
REGEX = r'(the|[a-c]{2,3}é?) (in){1,2}\.'
LARK = 'start: "ab" start? "in"'
# A text of LARK, which may be cut.
_NESTED = re.compile(r'(ab)+(in)*')


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
  return tiny.write_model(tmp_path_factory.mktemp('grammars') / 'tiny')


@pytest.fixture(scope='module')
def decoder(folder):
  return specdec_jax.load(folder, drafter='prompt_lookup', gamma=3)


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_rows_of_one_batch_follow_their_own_grammars(decoder, temperature):
  texts = ['the in ab', 'ab', 'in the the', 'the']
  ways = {
    'json_schema': [SCHEMA, None, None, None],
    'regex': [None, REGEX, None, None],
    'grammar': [None, None, LARK, None],
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
  assert together[0].finish_reason == 'stop'
  jsonschema.validate(json.loads(together[0].text), SCHEMA)
  assert re.fullmatch(REGEX, together[1].text)
  assert _NESTED.match(together[2].text)


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
    ({'regex': 'a(?=b)'}, r"regex 'a\(.*': .*look-ahead"),
    ({'regex': 'a', 'json_schema': SCHEMA}, 'exclude each other'),
    ({'regex': 'a', 'grammar': LARK}, 'exclude each other'),
    ({'regex': 5}, 'should be a regular expression'),
    ({'regex': 'a^b'}, 'regex.*lookarounds not supported'),
    ({'json_schema': '{"type": '}, 'no JSON'),
    ({'json_schema': 'no/such/file'}, 'json_schema: cannot read no/such'),
    ({'json_schema': '{"anyOf":[' * 400 + '1' + ']}' * 400}, 'json_schema: '),
    ({'json_schema': '{"a":' * 99999 + '1' + '}' * 99999}, 'no JSON'),
    ({'json_schema': {'const': float('nan')}}, 'no JSON'),
    ({'json_schema': '{"const": 1e999}'}, 'no JSON'),
    ({'json_schema': {'not': {}}}, 'json_schema: Unimplemented keys: .*"not"'),
    ({'json_schema': {'type': 'x'}}, 'json_schema: Invalid type: x'),
    ({'json_schema': {'$ref': '#/x'}}, 'json_schema: '),
    ({'grammar': 'no/such/file'}, 'grammar: cannot read no/such'),
    ({'grammar': 'start: ab'}, 'grammar: .*unknown name: "ab"'),
    ({'regex': '漢{9}[\x00-\x08]', 'grammar_limits': {'max': 1}}, 'max'),
    (
      {'regex': '(a|b){200}', 'grammar_limits': {'initial_lexer_fuel': 9}},
      'limit for this grammar: 9',
    ),
  ],
)
def test_what_is_no_grammar_is_refused(decoder, way, message):
  with pytest.raises(ValueError, match=message):
    specdec_jax.generate(decoder, ['ab'], max_new_tokens=8, **way)


@pytest.mark.slow
def test_a_grammar_may_be_in_a_file(decoder, tmp_path):
  path = tmp_path / 'nested.lark'
  path.write_text(LARK)
  texts = []
  for grammar in (LARK, str(path)):
    [done] = specdec_jax.generate(
      decoder, ['the'], max_new_tokens=60, grammar=grammar, seed=3
    )
    texts.append(done.text)
  assert texts[0] == texts[1]
  assert _NESTED.match(texts[0])


def test_all_grammars_share_a_program(decoder):
  """A grammar is no constant of it."""
  run = lambda **grammar: list(
    specdec_jax.generate(decoder, ['the in'], max_new_tokens=9, **grammar)
  )
  run(regex='ab{3}')
  programs = {**decoder.programs}
  for grammar in ({'regex': REGEX}, {'json_schema': SCHEMA}, {'grammar': LARK}):
    run(**grammar)
    assert decoder.programs == programs
