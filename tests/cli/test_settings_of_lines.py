"""`specdec generate`: a line of a file of prompts has settings of its own."""

import functools
import json
import re

import pytest

from tests.cli import tiny


def test_a_line_switches_a_limit_off(generate, tmp_path):
  path = tmp_path / 'own.jsonl'
  options = ('--json', '-', '--drafter', 'none', '--temperature', '1.5')
  own = {'prompt': 'ab', 'top_k': 0, 'top_p': 1.0, 'seed': 3}
  path.write_text(json.dumps(own))
  limits = ('--top_k', '1', '--top_p', '0.1')
  [record] = generate('--prompts', path, *options, *limits).records()
  path.write_text(json.dumps({'prompt': 'ab', 'seed': 3}))
  [free] = generate('--prompts', path, *options).records()
  [narrow] = generate('--prompts', path, *options, *limits).records()
  assert record['tokens'] == free['tokens'] != narrow['tokens']


def test_results_have_the_labels_of_their_lines(generate, tmp_path):
  path = tmp_path / 'labelled.jsonl'
  lines = [
    {'id': 'ü', 'prompt': 'the in ab', 'task': {'name': 'a'}},
    {'prompt': 'ab'},
    {'prompt': 'in', 'id': 7},
  ]
  path.write_text('\n'.join(map(json.dumps, lines)))
  options = ('--json', '-', '--drafter', 'none', '--batch_size', '2')
  drawn = ('--temperature', '1', '--num_return_sequences', '2')
  for more, count in ((), 1), (drawn, 2):
    records = generate('--prompts', path, *options, *more).records()
    expected = [line for line in lines for _ in range(count)]
    names = ('id', 'task', 'prompt')
    found = [{k: x[k] for k in names if k in x} for x in records]
    assert found == expected


def test_labels_that_json_cannot_say_are_refused(run, model, tmp_path):
  path = tmp_path / 'labelled.jsonl'
  for label in ('NaN', '"\\ud800"'):
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": "a", "id": {label}}}')
    result = run('generate', '--model', model, '--prompts', path)
    tiny.assert_refused(result, 'line 2')


def test_a_line_has_settings_of_its_own(generate, tmp_path):
  path, options = tmp_path / 'own.jsonl', ('--json', '-', '--drafter', 'none')
  own = {
    **{'temperature': 1.5, 'top_k': 9, 'seed': 3, 'max_new_tokens': 5},
    **{'presence_penalty': 2.5, 'logit_bias': {5: 1.5}, 'min_new_tokens': 2},
  }
  lines = [{'prompt': 'the in ab'}, {'prompt': 'ab', **own}]
  path.write_text('\n'.join(map(json.dumps, lines)))
  first, second = generate('--prompts', path, *options).records()
  flags = [each for name, x in own.items() for each in (f'--{name}', x)]
  [alone] = generate('--prompt', 'ab', *options, *flags).records()
  assert tiny.but_for_rounding(alone) == second
  [greedy] = generate('--prompt', 'the in ab', *options).records()
  assert tiny.but_for_rounding(greedy) == first
  lines[0]['stop'] = [first['text'][2]]
  path.write_text('\n'.join(map(json.dumps, lines)))
  stopped, _ = generate('--prompts', path, *options).records()
  assert stopped['stop'] == first['text'][2]
  assert stopped['finish_reason'] == 'stop'


def test_flags_and_lines_bind_texts_to_grammars(generate, tmp_path):
  pytest.importorskip('llguidance')
  regex = r'(the|[a-c]{2,3}) (in){1,2}\.'
  schema = {'type': 'object', 'properties': {'is_it': {'type': 'boolean'}}}
  schema |= {'required': ['is_it'], 'additionalProperties': False}
  lines, schema_file = tmp_path / 'own.jsonl', tmp_path / 'schema.json'
  schema_file.write_text(json.dumps(schema))
  lark = 'start: "in" "." | "the" "."'
  own = {'regex': regex}, {'json_schema': schema}, {'grammar': lark}, {}
  lines.write_text('\n'.join(json.dumps({'prompt': 'ab'} | x) for x in own))
  run = functools.partial(
    generate, '--json', '-', '--gamma', '3', **{'--max_new_tokens': 40}
  )
  bound, of_schema, of_lark, free = run('--prompts', lines).records()
  assert re.fullmatch(regex, bound['text'])
  assert [*json.loads(of_schema['text'])] == ['is_it']
  assert of_lark['text'] in ('in.', 'the.')
  assert not re.fullmatch(regex, free['text'])
  # A flag is for all lines, and a schema may lie in a file.
  for flag, found in (
    (('--regex', regex), bound),
    (('--json_schema', schema_file), of_schema),
    (('--grammar', lark), of_lark),
  ):
    [alone] = run('--prompt', 'ab', *flag).records()
    assert alone['text'] == found['text']
    assert alone['finish_reason'] == 'stop'


@pytest.mark.parametrize(
  ('own', 'words'),
  [
    ({'temprature': 1}, ("'temprature'", 'mean temperature?')),
    ({'temperature': 'hot'}, ('temperature', "'hot'")),
    ({'temperature': [1]}, ('line 2',)),
    ({'top_k': 2}, ('top_k 2', 'temperature 0')),
    ({'stop': 'ab'}, ('stop is a string',)),
    ({'seed': 1.5}, ('seed', '1.5')),
    ({'max_new_tokens': 0}, ('max_new_tokens', '0')),
    ({'repetition_penalty': -1}, ('repetition_penalty', '-1')),
    ({'bad_words_ids': [5]}, ('bad_words_ids', '[5]')),
    ({'regex': 'a', 'json_schema': {}}, ('exclude each other',)),
  ],
)
def test_wrong_settings_of_a_line_are_refused(run, model, tmp_path, own, words):
  path = tmp_path / 'own.jsonl'
  lines = [{'prompt': 'ab'}, {'prompt': 'ab', **own}]
  path.write_text('\n'.join(map(json.dumps, lines)))
  result = run('generate', '--model', model, '--prompts', path)
  tiny.assert_refused(result, 'own.jsonl, line 2', *words)
