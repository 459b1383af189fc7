"""What the flags of gin say when they cannot be followed."""

import re

import pytest

pytest.importorskip('gin')

from specdec_jax.cli.main import main
from specdec_jax.launch import gin_launch
from tests.infer.infer_runs import ROOT

BINDINGS = (
  "MIXTURE_OR_TASK_NAME = 'task.txt'",
  "TASK_FEATURE_LENGTHS = {'inputs': 4, 'targets': 4}",
  "CHECKPOINT_PATH = 'model'",
  "INFER_OUTPUT_DIR = 'out'",
)


def parse(*bindings, files=('models/as_stored.gin', 'runs/infer.gin')) -> None:
  given = gin_launch.Configuration(files=files, bindings=[*BINDINGS, *bindings])
  gin_launch.parse(given)


def unused(name: str, meant: str) -> str:
  sentence = f'gin: none of the files uses {name}; did you mean {meant}?'
  return re.escape(sentence)


def unquoted(value: str) -> str:
  """What is said of a path without quotes, with the binding as it should be."""
  return f'is not a value for CHECKPOINT_PATH: .*=\'"{re.escape(value)}"\''


@pytest.mark.parametrize(
  ('binding', 'message'),
  [
    ('TEMPERATURE=1.0', unused('TEMPERATURE', 'decoding.Decoding.temperature')),
    ('BATCH_SIZE=4', unused('BATCH_SIZE', 'decoding.Decoding.batch_size')),
    ("CHECKPOINTPATH='model'", unused('CHECKPOINTPATH', 'CHECKPOINT_PATH')),
    ('CHECKPOINT_PATH=/data/model', unquoted('/data/model')),
    ('CHECKPOINT_PATH=model', unquoted('model')),
    ('CHECKPOINT_PATH=gs://b/model', unquoted('gs://b/model')),
    ('CHECKPOINT_PATH=', unquoted('')),
    (
      "TASK_FEATURE_LENGTHS={'inputs': 3",
      'not a value for TASK_FEATURE_LENGTHS',
    ),
  ],
)
def test_bindings_that_are_refused(binding, message):
  with pytest.raises(ValueError, match=message):
    parse(binding)


def test_a_macro_that_a_file_uses():
  files = ('models/as_stored.gin', 'runs/infer.gin')
  binding = "DRAFTER_CHECKPOINT_PATH='model'"
  with pytest.raises(ValueError, match='none of the files uses DRAFTER'):
    parse(binding, files=files)
  parse(binding, files=(*files, 'drafters/model.gin'))


def test_no_macro_is_within_a_text():
  parse(r'''INFER_OUTPUT_DIR = "it's \"x\" %FOO"''')


def test_help_has_the_macros_with_their_comments(capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '200')
  assert main(['infer', '--help']) == 0
  text = capsys.readouterr().out
  for name in ('models/as_stored', 'runs/infer', 'drafters/model'):
    path = ROOT / 'gin_configs' / f'{name}.gin'
    for line in path.read_text().splitlines():
      name, _, rest = line.partition(' = ')
      if name.isupper() and name.replace('_', '').isalpha():
        assert f'--gin.{name} VALUE' in text
        assert rest.split('  # ')[1] in text, line
  assert "(default: 'bfloat16')" in text
  for name in ('coordinator_address', 'process_count', 'process_index'):
    _, _, rest = text.rpartition(f'  --{name} ')
    assert len(rest.split('  --')[0].split()) > 5
