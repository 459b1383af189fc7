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


@pytest.mark.parametrize(
  ('binding', 'sentence'),
  [
    (
      'TEMPERATURE=1.0',
      'none of the files uses TEMPERATURE; did you mean '
      'decoding.Decoding.temperature?',
    ),
    (
      'BATCH_SIZE=4',
      'none of the files uses BATCH_SIZE; did you mean '
      'decoding.Decoding.batch_size?',
    ),
    (
      "CHECKPOINTPATH='model'",
      'none of the files uses CHECKPOINTPATH; did you mean CHECKPOINT_PATH?',
    ),
  ],
)
def test_a_macro_that_nothing_uses(binding, sentence):
  with pytest.raises(ValueError, match=re.escape(f'gin: {sentence}')):
    parse(binding)


def test_a_macro_that_a_file_uses():
  files = ('models/as_stored.gin', 'runs/infer.gin')
  binding = "DRAFTER_CHECKPOINT_PATH='model'"
  with pytest.raises(ValueError, match='none of the files uses DRAFTER'):
    parse(binding, files=files)
  parse(binding, files=(*files, 'drafters/model.gin'))


def test_no_macro_is_within_a_text():
  parse(r'''INFER_OUTPUT_DIR = "it's \"x\" %FOO"''')


@pytest.mark.parametrize('value', ['/data/model', 'model', 'gs://b/model', ''])
def test_a_text_without_quotes(value):
  sentence = f'is not a value for CHECKPOINT_PATH: .*=\'"{re.escape(value)}"\''
  with pytest.raises(ValueError, match=sentence):
    parse(f'CHECKPOINT_PATH={value}')


def test_a_bracket_without_its_other():
  with pytest.raises(ValueError, match='not a value for TASK_FEATURE_LENGTHS'):
    parse("TASK_FEATURE_LENGTHS={'inputs': 3")


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
