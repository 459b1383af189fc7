"""What the flags of gin say when they cannot be followed."""

import re

import pytest

pytest.importorskip('gin')

from specdec_jax.cli.main import main
from specdec_jax.launch import gin_launch
from tests.cli.infer_runs import ROOT

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
      'no file that was given uses TEMPERATURE; did you mean '
      'decoding.Decoding.temperature?',
    ),
    (
      'BATCH_SIZE=4',
      'no file that was given uses BATCH_SIZE; did you mean '
      'decoding.Decoding.batch_size?',
    ),
    (
      "CHECKPOINTPATH='model'",
      'no file that was given uses CHECKPOINTPATH; did you mean '
      'CHECKPOINT_PATH?',
    ),
    (
      "DRAFTER_CHECKPOINT_PATH='model'",
      'no file that was given uses DRAFTER_CHECKPOINT_PATH; '
      'drafters/block_heads.gin and drafters/eagle.gin and drafters/model.gin '
      'would: add --gin_file=drafters/block_heads',
    ),
  ],
)
def test_a_macro_that_nothing_uses(binding, sentence):
  with pytest.raises(ValueError, match=re.escape(f'gin: {sentence}')):
    parse(binding)
  if 'DRAFTER' in binding:
    files = ('models/as_stored.gin', 'runs/infer.gin', 'drafters/model.gin')
    parse(binding, files=files)


@pytest.mark.parametrize('value', ['/data/model', 'model', 'gs://b/model', ''])
def test_a_text_without_quotes(value):
  sentence = (
    f'gin: {value or "nothing"} is no value for CHECKPOINT_PATH: a text has '
    "quotes of gin's inside those of the shell: "
    f'--gin.CHECKPOINT_PATH=\'"{value}"\''
  )
  with pytest.raises(ValueError, match=re.escape(sentence)):
    parse(f'CHECKPOINT_PATH={value}')


def test_a_bracket_without_its_other():
  with pytest.raises(ValueError, match='brackets'):
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
