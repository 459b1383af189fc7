"""Runs whose token files and whose folder are in a bucket."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')

from specdec_jax.checkpoints import loading
from specdec_jax.cli.main import main
from specdec_jax.files.paths import user_path
from specdec_jax.training import metrics_log
from tests.checkpoints.tiny_t5 import T5X
from tests.cli.tiny import run_well
from tests.files import door as doors
from tests.files.pods import assert_done, assert_killed, pod
from tests.training import tiny_runs
from tests.training.test_command import GIN


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
  folder = tmp_path_factory.mktemp('inputs')
  write_inputs(folder)
  return folder


def write_inputs(folder) -> None:
  tiny_runs.write_tokens(folder / 'tokens', train=120, validation=12)
  (folder / 'train.gin').write_text(GIN.format(base='train'))


def argv(inputs, out, steps: int) -> list[str]:
  return [
    'train',
    f'--gin_file={inputs}/train.gin',
    '--gin_remote_imports',
    f'--gin.TOKENS="{inputs}/tokens"',
    f'--gin.MODEL_DIR="{out}"',
    f'--gin.TRAIN_STEPS={steps}',
  ]


def train(inputs, out, steps: int) -> int:
  return main(argv(inputs, out, steps))


def contents(folder) -> dict:
  """The metrics but for the speed, and every array of the model."""
  folder = user_path(folder)
  lines = metrics_log.read_log(folder / metrics_log.NAME)
  for line in lines:
    line.pop('targets_per_second', None)
    line.pop('targets_per_processor_second', None)
  _, params = loading.read(folder / 'model')
  return {
    'lines': lines,
    'steps': sorted(each.name for each in (folder / 'checkpoints').iterdir()),
    'params': jax.tree.map(lambda x: np.asarray(x).tobytes(), params),
    'vocabulary': loading.read_vocabulary(folder / 'model').tokens(),
  }


@pytest.fixture(scope='module')
def whole(inputs, tmp_path_factory):
  """What six steps leave on a disk."""
  out = tmp_path_factory.mktemp('whole')
  assert train(inputs, out, 6) == 0
  return contents(out)


@pytest.mark.slow
def test_train(server, bucket, inputs, whole, capfd):
  """In two parts, of which the second begins with a damaged checkpoint and a
  half written one."""
  there = server.upload(inputs, f'{bucket}/inputs')
  out = f'{bucket}/runs/first'
  assert train(there, out, 4) == 0
  for name in list(server.objects(f'{out}/checkpoints/4')):
    if '/d/' in name:
      (user_path(out) / 'checkpoints' / '4' / name).unlink()
  source = user_path(out) / 'checkpoints' / '2'
  (source.with_name('5') / 'default' / '_METADATA').write_bytes(
    (source / 'default' / '_METADATA').read_bytes()
  )
  capfd.readouterr()
  assert train(there, out, 6) == 0
  said = capfd.readouterr().out
  assert 'the checkpoint of step 4 cannot be read' in said
  assert contents(out) == whole
  aside = server.objects(f'{out}/damaged_checkpoint_4')
  assert 'default/_METADATA' in aside
  assert json.loads(server.objects(out)['model.json'])['network'] == 't5'


@pytest.mark.slow
def test_a_server_that_refuses_is_no_damage(
  server, door, bucket, inputs, whole, capfd
):
  """A checkpoint that cannot be read for another reason stays in its place, and
  so do all when the next one cannot be written."""
  out = f'{bucket}/run'
  assert train(inputs, out, 4) == 0
  before = server.objects(f'{out}/checkpoints')
  for refusal in (
    doors.reads_of('checkpoints/4/default/d/', 403),
    doors.reads_of('checkpoints/4/default/_METADATA', 403),
    doors.writes_of('checkpoints/6/', 403),
  ):
    door.refusal = refusal
    capfd.readouterr()
    assert train(inputs, out, 6) == 2
    said = capfd.readouterr().err
    assert 'no permission' in said
    assert 'Traceback' not in said
    found = server.objects(f'{out}/checkpoints')
    assert {name: found[name] for name in before} == before
  door.refusal = lambda *_: None
  assert train(inputs, out, 6) == 0
  assert contents(out) == whole


@pytest.mark.slow
def test_a_pod_that_trains_loses_a_host(
  server, bucket, start_limited, tmp_path
):
  """Two hosts of four devices; the one that writes is lost between two
  checkpoints. A pod with a disk leaves the same bytes."""
  write_inputs(tmp_path)
  there = server.upload(tmp_path, f'{bucket}/inputs')
  out = f'{bucket}/run'
  assert_done(pod(start_limited, 100, argv(tmp_path, tmp_path / 'run', 4)))
  # Sizes, vocabulary, settings, config.gin, the lines of two steps; then more.
  first, second = pod(start_limited, 5, argv(there, out, 4))
  assert_killed(first)
  second.kill()
  second.wait()
  assert not server.objects(f'{out}/model')
  assert 'commit_success.txt' in server.objects(f'{out}/checkpoints/2')
  assert_done(pod(start_limited, 100, argv(there, out, 4)))
  assert contents(out) == contents(tmp_path / 'run')


def test_data_in_a_bucket(server, bucket, tmp_path, capfd):
  """Token files are those that are made on a disk, and no others go."""
  text, words = tmp_path / 'text.jsonl', T5X / 'tiny_sp.model'
  lines = [
    json.dumps({'inputs': f'two over {i}.', 'targets': 'echo.'})
    for i in range(40)
  ]
  text.write_text('\n'.join(lines) + '\n')
  there = server.upload(text, f'{bucket}/text.jsonl')
  words_there = server.upload(words, f'{bucket}/words.model')
  other = server.upload(text, f'{bucket}/tokens1/a')
  for inputs, vocabulary, target in (
    (text, words, tmp_path),
    (there, words_there, bucket),
  ):
    run_well(capfd, 'data', 'prepare', '--inputs', inputs, '--vocabulary',
        vocabulary, '--out', f'{target}/tokens[1]')  # fmt: skip
  files = {p.name: p.read_bytes() for p in (tmp_path / 'tokens[1]').iterdir()}
  assert server.objects(f'{bucket}/tokens[1]') == files
  assert user_path(other).is_file()
