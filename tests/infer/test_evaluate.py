"""`specdec eval` on predictions as `infer` writes them."""

import json

import pytest

pytest.importorskip('sacrebleu')
pytest.importorskip('rouge_score')

from specdec_jax.infer import quality
from tests.cli.tiny import assert_refused

TARGETS = ['the cat sat on the mat', 'a dog barked at the old tree', 'yes']
PREDICTIONS = ['the cat sat on a mat', 'a dog barked at that old tree', 'no']
AUX = [
  {'tokens': 6, 'target_runs': 3, 'drafted': 8, 'tested': 5, 'accepted': 3},
  {'tokens': 7, 'target_runs': 2, 'drafted': 6, 'tested': 5, 'accepted': 5},
  {'tokens': 2, 'target_runs': 1, 'drafted': 4, 'tested': 2, 'accepted': 1},
]


@pytest.fixture
def predictions(tmp_path):
  path = tmp_path / 'predictions.jsonl'
  with path.open('w') as file:
    for target, prediction, aux in zip(TARGETS, PREDICTIONS, AUX, strict=True):
      inputs = {'inputs_pretokenized': 'x', 'targets_pretokenized': target}
      line = {'inputs': inputs, 'prediction': prediction, 'aux': aux}
      file.write(json.dumps(line) + '\n')
  return path


def test_figures(run, predictions):
  done = run('eval', predictions, '--json=-')
  assert done.status == 0, done
  figures = json.loads(done.out)
  expected = {'examples': 3, 'tokens': 15, 'target_runs': 6}
  expected |= {'drafted': 18, 'tested': 12, 'accepted': 9}
  expected |= {'block_efficiency': 15 / 6, 'alpha': 9 / 12}
  expected |= quality.bleu(TARGETS, PREDICTIONS)
  expected |= quality.rouge(TARGETS, PREDICTIONS)
  assert figures == expected
  assert f'{figures["bleu"]:.2f}' in run('eval', predictions).out


def test_other_targets(run, predictions, tmp_path):
  text, lines = tmp_path / 'targets.txt', tmp_path / 'targets.jsonl'
  text.write_text('\n'.join(PREDICTIONS))
  lines.write_text('\n'.join(json.dumps({'targets': t}) for t in PREDICTIONS))
  for path in (text, lines):
    done = run(
      'eval', predictions, '--targets', path, '--metrics=bleu', '--json=-'
    )
    assert json.loads(done.out)['bleu'] == pytest.approx(100)


def test_shards_have_no_targets_but_their_own(run, predictions, tmp_path):
  shards = []
  for i in range(2):
    shards.append(tmp_path / f'a-predict.jsonl-0000{i}-of-00002')
    shards[i].write_text(predictions.read_text())
  targets = tmp_path / 'targets.txt'
  targets.write_text('yes\n' * 6)
  refused = run('eval', *shards, '--targets', targets)
  assert_refused(refused, '-00000-of-00002 is a shard', '`specdec merge`')
  assert run('eval', *shards, '--metrics=exact_match').status == 0


def test_predictions_of_others_have_no_rates(run, tmp_path):
  path = tmp_path / 'theirs.jsonl'
  inputs = {'targets_pretokenized': 'yes'}
  path.write_text(json.dumps({'inputs': inputs, 'prediction': 'yes'}))
  done = run('eval', path, '--metrics=exact_match', '--json=-')
  assert json.loads(done.out) == {'examples': 1, 'exact_match': 100}


@pytest.mark.parametrize(
  ('before', 'between', 'after'),
  [
    (b'', b'\n', b'\n\n'),
    (b'\xef\xbb\xbf', b'\r\n', b' \r\n'),
    (b'', b'\n \n', b''),
  ],
)
def test_lines_are_those_of_jsonl(run, tmp_path, before, between, after):
  """Blank lines, a byte order mark, and separators that stand in a text."""
  text = 'yes\u2028\x85\u2029no'
  line = json.dumps(
    {'inputs': {'targets_pretokenized': text}, 'prediction': text},
    ensure_ascii=False,
  ).encode()
  path = tmp_path / 'predictions.jsonl'
  path.write_bytes(before + line + between + line + after)
  done = run('eval', path, '--metrics=exact_match', '--json=-')
  assert json.loads(done.out) == {'examples': 2, 'exact_match': 100}


def test_counters_that_are_no_numbers_are_no_rates(run, tmp_path):
  path = tmp_path / 'theirs.jsonl'
  inputs, aux = {'targets_pretokenized': 'a'}, AUX[0] | {'tokens': '6'}
  line = {'inputs': inputs, 'prediction': 'a', 'aux': aux}
  path.write_text(json.dumps(line))
  done = run('eval', path, '--metrics=exact_match', '--json=-')
  assert set(json.loads(done.out)) == {'examples', 'exact_match'}


@pytest.mark.parametrize(
  ('text', 'part'),
  [
    ('', 'no prediction'),
    ('{', 'line 1 is not JSON'),
    (
      '{"inputs": {}, "text": "a"}',
      """line 1 has no text under "prediction"; its keys: 'inputs', 'text'""",
    ),
    ('{"prediction": "\\ud800"}', 'line 1 is not valid Unicode text'),
    ('{"prediction": []}', 'line 1 has no text under "prediction"'),
    ('{"prediction": "a"}', 'the first has no object under "inputs"'),
    (
      '{"inputs": "a", "prediction": "a"}',
      '1 of 1 predictions have no text "targets_pretokenized" under "inputs"',
    ),
    (
      '{"inputs": {"targets": "b"}, "prediction": "a"}',
      """has "inputs"; its keys: 'targets': give --targets""",
    ),
  ],
)
def test_bad_lines(run, tmp_path, text, part):
  path = tmp_path / 'bad.jsonl'
  path.write_text(text)
  assert_refused(run('eval', path), part)


@pytest.mark.parametrize(
  ('flags', 'parts'),
  [
    (['--targets={folder}/short.txt'], ['3 predictions']),
    (
      ['--targets={folder}/pairs.tsv'],
      ['pairs.tsv also has inputs', '.txt of the targets'],
    ),
    (['--metrics=meteor'], ["'meteor'"]),
    (['--metrics=bleu', '--task=any'], ['--task', '--metrics']),
    (['{folder}/none'], ['cannot read']),
  ],
)
def test_bad_flags(run, predictions, tmp_path, flags, parts):
  (tmp_path / 'short.txt').write_text('a\n')
  (tmp_path / 'pairs.tsv').write_text('an input\ta target\n' * 3)
  flags = [flag.format(folder=tmp_path) for flag in flags]
  assert_refused(run('eval', predictions, *flags), *parts)


def test_of_several_decodes_the_last_is_judged(run, predictions, tmp_path):
  several = tmp_path / 'several.jsonl'
  with several.open('w') as file:
    for line in predictions.read_text().splitlines():
      record = json.loads(line)
      record['prediction'] = ['worse', record['prediction']]
      file.write(json.dumps(record) + '\n')
  found, expected = (
    json.loads(run('eval', path, '--metrics=bleu', '--json=-').out)
    for path in (several, predictions)
  )
  assert found == expected
