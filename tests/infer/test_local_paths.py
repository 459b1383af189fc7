"""Every door refuses the paths of other systems, before it makes a folder."""

import argparse
import json
import os
import sys

import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from specdec_jax.checkpoints import loading, t5x
from specdec_jax.cli import outputs
from specdec_jax.files import replacing
from specdec_jax.files.paths import user_path
from specdec_jax.training import run_checkpoints
from tests.checkpoints.tiny_t5 import make_config
from tests.cli.tiny import assert_refused
from tests.infer.infer_runs import ROOT, argv

BUCKET = 's3://bucket/name'


@pytest.mark.parametrize(
  'path',
  [BUCKET, 'https://host/name', 'file:///name', 'GS://bk/name', 'S3://bk/name'],
)
def test_a_path_that_is_not_local(path):
  for each in (path, path.replace('//', '/')):
    with pytest.raises(ValueError, match='local disk'):
      user_path(each)


def test_a_local_path():
  assert str(user_path('a:b/c')) == 'a:b/c'
  assert user_path('~/a').is_absolute()
  with pytest.raises(ValueError, match=r'~no-one/a.*home'):
    user_path('~no-one/a')


def test_an_output_below_home(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  path = tmp_path / 'a.json'
  for number in range(2):  # A new file, and one that is replaced.
    outputs.check({'--json': '~/a.json'}, {})
    args = argparse.Namespace(json='~/a.json', color='never')
    outputs.report(args, {'number': number})
    assert json.loads(path.read_text()) == {'number': number}
  with pytest.raises(ValueError, match=r'--costs.*--json.*both'):
    outputs.check({'--json': '~/a.json'}, {'--costs': str(path)})


INFER = {
  'output folder': {'INFER_OUTPUT_DIR': BUCKET},
  'checkpoint': {'CHECKPOINT_PATH': BUCKET, 'MODEL': None},
  'vocabulary': {'CHECKPOINT_PATH': 'ende-mini', 'VOCABULARY': BUCKET},
  'task': {'MIXTURE_OR_TASK_NAME': f'{BUCKET}.jsonl'},
  'drafter': {
    'CHECKPOINT_PATH': 'ende-mini',
    'DRAFTER_CHECKPOINT_PATH': BUCKET,
  },
  'profile': {'infer.profile_dir': BUCKET},
}


@pytest.mark.parametrize('bindings', INFER.values(), ids=INFER)
def test_infer(run, tmp_path, monkeypatch, bindings):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'task.txt').write_text('a\n')
  files = ['--gin.MODEL="t5_1_1_small"']
  if 'DRAFTER_CHECKPOINT_PATH' in bindings:
    files.append(f'--gin_file={ROOT / "gin_configs/drafters/model.gin"}')
  command = argv('nowhere', 'task.txt', tmp_path / 'out', *files)
  if bindings.get('CHECKPOINT_PATH') == 'ende-mini':
    bindings = {**bindings, 'MODEL': None}
  command += [f'--gin.{name}={value!r}' for name, value in bindings.items()]
  assert_refused(run(*command), BUCKET, 'local disk')
  assert [path.name for path in tmp_path.iterdir()] == ['task.txt']


COMMANDS = {
  'generate --model': ('generate', '--prompt=a', '--model', BUCKET),
  'generate --prompts': ('generate', '--prompts', BUCKET),
  'generate --json': ('generate', '--prompt=a', '--json', BUCKET),
  'convert from': ('convert', BUCKET, 'out', '--to=safetensors'),
  'convert to': ('convert', 'ende-mini', BUCKET, '--to=safetensors'),
  'eval': ('eval', BUCKET),
  'merge': ('merge', BUCKET),
  'plan': ('plan', '--costs', BUCKET, '--alpha=0.5'),
  'train': (
    *('train', f'--gin_file={ROOT / "gin_configs/train/overfit_200.gin"}'),
    *(f'--gin.TOKENS="{BUCKET}"', '--gin.MODEL_DIR="out"'),
  ),
  'trace': ('trace', BUCKET),
  'data prepare': (
    *('data', 'prepare', '--inputs', BUCKET),
    *('--vocabulary', 'a', '--out', 'out'),
  ),
  'data vocabulary': ('data', 'vocabulary', '--inputs=a', '--out', BUCKET),
  'data rewrite': (
    *('data', 'rewrite', '--tokens', BUCKET),
    *('--model', 'ende-mini', '--out', 'out'),
  ),
}


@pytest.mark.parametrize('command', COMMANDS.values(), ids=COMMANDS)
def test_commands(run, tmp_path, monkeypatch, command):
  monkeypatch.chdir(tmp_path)
  assert_refused(run(*command), BUCKET, 'local disk')
  assert not list(tmp_path.iterdir())


def test_what_another_run_wrote_meanwhile_stays(tmp_path):
  final = tmp_path / 'model'

  def write_twice():
    # Hosts of a pod have equal process ids.
    with replacing.new_folder(final) as mine:
      (mine / 'weights').write_text('mine')
      with replacing.new_folder(final) as theirs:
        (theirs / 'weights').write_text('theirs')

  with pytest.raises(ValueError, match='meanwhile'):
    write_twice()
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  assert (final / 'weights').read_text() == 'theirs'


def test_a_folder_is_flushed_and_a_link_stays(tmp_path, monkeypatch):
  real, link = tmp_path / 'real', tmp_path / 'link'
  real.mkdir()
  link.symlink_to(real)
  flushed = []
  monkeypatch.setattr(
    os, 'fsync', lambda number: flushed.append(os.fstat(number).st_ino)
  )
  with replacing.new_folder(link, overwrite=True) as begun:
    (begun / 'params').mkdir()
    (begun / 'params' / 'weights').write_text('new')
  assert flushed == [(real / 'params' / 'weights').stat().st_ino]
  assert link.readlink() == real
  assert {path.name for path in tmp_path.iterdir()} == {'real', 'link'}


def test_the_library(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  runs = lambda: run_checkpoints.open_run(BUCKET, make_config(), keep=1)
  folders = lambda: replacing.new_folder(BUCKET)
  for door in (loading.locate, t5x.find):
    with pytest.raises(ValueError, match='local disk'):
      door(BUCKET)
  for context in (runs, folders):
    with pytest.raises(ValueError, match='local disk'), context():
      pass
  patterns = run_checkpoints.open_run('run[1]', make_config(), keep=1)
  with pytest.raises(ValueError, match='as patterns'):
    patterns.__enter__()
  assert not list(tmp_path.iterdir())


def test_buckets_need_their_extra(run, monkeypatch):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  assert_refused(
    run('merge', 'gs://bucket/out'),
    'gs://bucket/out',
    "pip install -e '.[gcs]' in the clone of specdec_jax",
  )
