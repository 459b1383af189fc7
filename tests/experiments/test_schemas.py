"""Texts by schemas of a folder: what is counted, and what is decoded again."""

import json

import pytest

pytest.importorskip('jsonschema')

from experiments.grammar import schemas
from specdec_jax.checkpoints import loading


def test_texts_that_break_a_schema_are_seen():
  schema = json.dumps({'type': 'object', 'required': ['name']})
  assert schemas.follows('{"name": 1}', schema)
  assert not schemas.follows('{"names": 1}', schema)
  assert not schemas.follows('{"name": 1', schema)


def test_numbers_are_read_exactly():
  schema = json.dumps({'multipleOf': 0.01})
  assert schemas.follows('2.32', schema)
  assert schemas.follows('1' * 60 + '.01', schema)
  assert not schemas.follows('2.325', schema)
  huge = '-5.3e' + '9' * 40
  assert schemas.follows(huge, json.dumps({'type': 'number', 'maximum': 0}))
  assert not schemas.follows(huge, json.dumps({'minimum': 0}))
  schema = json.dumps({'type': 'integer'})
  assert schemas.follows('2.0', schema)
  assert schemas.follows('1e3', schema)
  assert not schemas.follows('2.5', schema)


def test_circles_are_told_from_long_texts():
  verse = 'the cat sat on the mat, and '
  assert schemas.is_in_circles('{"text": "Once ' + verse * 30)
  assert not schemas.is_in_circles(' '.join(map(str, range(400))))
  # The same first and last word.
  assert not schemas.is_in_circles('cats like cats')


def example(temperature: float, end: str, text: str) -> tuple[dict, dict]:
  """A line of a task with a schema of numbers, and its prediction."""
  line = {
    'inputs': f'{temperature} {text[:5]}',
    'schema': 'number.json',
    'temperature': temperature,
    'json_schema': '{"type": "number"}',
  }
  prediction = {
    'inputs': {'inputs_pretokenized': line['inputs']},
    'prediction': text,
    'aux': {'tokens': 8, 'target_runs': 2, 'end': end},
  }
  return line, prediction


@pytest.fixture
def files(tmp_path):
  """A task and its predictions: one is cut, and one breaks its schema."""
  pairs = [
    example(0.0, 'eos', '1'),
    example(0.0, 'length', '1' * 500),
    example(1.0, 'eos', '"one"'),
    example(1.0, 'length', ' '.join(map(str, range(300)))),
  ]
  paths = tmp_path / 'task.jsonl', tmp_path / 'predictions.jsonl'
  for path, lines in zip(paths, zip(*pairs, strict=True), strict=True):
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return [f'--task={paths[0]}', f'--predictions={paths[1]}']


def test_each_kind_of_end_is_counted(files, tmp_path, capsys):
  assert schemas.main(['judge', *files, f'--output={tmp_path}']) == 0
  counts = {
    'texts': 2,
    'tokens': 16,
    'target runs': 4,
    'ended': 1,
    'met the limit': 1,
  }
  greedy = {'follow their schema': 1, 'of these in circles': 1}
  drawn = {'follow their schema': 0, 'of these in circles': 0}
  assert json.loads((tmp_path / 'schemas.json').read_text())['rows'] == [
    {'task': 'task', 'temperature': '0', **counts, **greedy},
    {'task': 'task', 'temperature': '1', **counts, **drawn},
  ]
  assert 'NOT VALID number.json "one"' in capsys.readouterr().err


@pytest.mark.smollm2
def test_what_was_cut_is_to_close_its_strings(files, tmp_path):
  cut = tmp_path / 'cut.jsonl'
  argv = ['judge', *files, f'--output={tmp_path}', f'--cut={cut}']
  assert schemas.main(argv) == 0
  lines = [json.loads(line) for line in cut.read_text().splitlines()]
  assert [line['inputs'] for line in lines] == ['0.0 11111', '1.0 0 1 2']
  tokens = loading.load('smollm2-135m').vocabulary.tokens()
  biases = {tokens[int(i)]: x for i, x in lines[0]['logit_bias'].items()}
  assert biases['"}'] > biases['"'] > biases['}'] > biases[','] > 0
  # What opens something, or may be a part of a text.
  assert not {'{', '[', ',"', '."', 'a', ' '} & biases.keys()


def test_predictions_of_another_task_are_refused(files, tmp_path, capsys):
  task, predictions = files
  path = tmp_path / 'task.jsonl'
  path.write_text(path.read_text().partition('\n')[2])
  argv = ['judge', task, predictions, f'--output={tmp_path}']
  assert schemas.main(argv) == 2
  assert 'has not the inputs of' in capsys.readouterr().err
  # A task is none either.
  assert schemas.main(['judge', task, f'--predictions={path}']) == 2
  assert 'has not the inputs of' in capsys.readouterr().err


@pytest.mark.smollm2
def test_a_task_has_what_are_schemas_alone(tmp_path, capsys):
  folder, task = tmp_path / 'schemas', tmp_path / 'task.jsonl'
  folder.mkdir()
  (folder / 'one.json').write_text('{"const": "yes"}')
  (folder / 'two.json').write_text('{"type": "things"}')
  argv = ['write', f'--schemas={folder}', f'--task={task}']
  some = ['--num_schemas=1', '--temperatures', '0', '1', '1']
  assert schemas.main([*argv, *some]) == 0
  lines = [json.loads(line) for line in task.read_text().splitlines()]
  assert [line['schema'] for line in lines] == ['one.json'] * 3
  assert [line['temperature'] for line in lines] == [0, 1, 1]
  assert schemas.main([*argv, '--num_schemas=2']) == 2
  assert 'has 1 usable schemas, not 2' in capsys.readouterr().err
