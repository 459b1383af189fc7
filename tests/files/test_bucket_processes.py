"""Runs to a bucket that are killed, and pods whose hosts change."""

import signal
import time

import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')

from specdec_jax.cli.main import main
from tests import children
from tests.files import door as doors
from tests.files import server as servers
from tests.files import test_bucket_training as test_training
from tests.infer import infer_runs
from tests.infer.infer_runs import argv

# The command, killed when it would write another object than the first N.
KILLED = """
import os, signal, sys
from specdec_jax.cli import main
from specdec_jax.files import buckets

left = int(sys.argv[1])

def counted(write):
  def call(*args):
    global left
    left -= 1
    if left < 0:
      os.kill(os.getpid(), signal.SIGKILL)
    return write(*args)
  return call

for name in ('upload', 'create'):
  write = getattr(buckets.BucketPath, name)
  setattr(buckets.BucketPath, name, counted(write))
sys.exit(main.main(sys.argv[2:]))
"""
NUM_CHUNKS = 5


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
  folder = tmp_path_factory.mktemp('inputs')
  infer_runs.write_model(folder / 't5')
  num_examples = NUM_CHUNKS * infer_runs.BATCH_SIZE
  infer_runs.write_task(folder / 'task.jsonl', 2 * num_examples)
  return folder


@pytest.fixture
def start():
  """Starts a command that can write so many objects; what still runs in the end
  is killed."""
  with children.starter() as start_python:

    def call(num_writes, *flags, num_devices=1):
      arguments = '-c', KILLED, str(num_writes), *flags
      return start_python(*arguments, num_devices=num_devices)

    yield call


def flags(inputs, out, *more, **bindings):
  """The second of two shards, in chunks of a batch."""
  return argv(
    inputs / 't5',
    inputs / 'task.jsonl',
    out,
    '--shard_id=1',
    *more,
    infer__num_shards=2,
    **bindings,
  )


def assert_killed(process) -> None:
  said = process.communicate(timeout=480)[1]
  assert process.returncode == -signal.SIGKILL, said


def assert_same_results(server, out, folder) -> None:
  found = server.objects(out)
  final = infer_runs.result(folder, shard='00001-of-00002')
  for path in (final, final.with_name(f'{final.name}.COMPLETED')):
    assert found.pop(path.name) == path.read_bytes()
  assert set(found) == {'config.gin'}


def pod(start, num_writes, command) -> list:
  """Two hosts of four devices."""
  places = [
    f'--coordinator_address=localhost:{servers.free_port()}',
    '--process_count=2',
  ]
  return [
    start(num_writes, *command, *places, f'--process_index={i}', num_devices=4)
    for i in range(2)
  ]


def assert_done(processes) -> None:
  for process in processes:
    said = process.communicate(timeout=480)[1]
    assert process.returncode == 0, said


# The command, with a gcsfs that asks again at once.
HASTY = """
import asyncio, sys
import gcsfs.retry
from specdec_jax.cli import main

async def no_time(seconds):
  pass

gcsfs.retry.asyncio.sleep = no_time
sys.exit(main.main(sys.argv[1:]))
"""
AWAY = {
  'at the start': (doors.writes_of('settings.json', 0), 2),
  'busy, in mid-run': (doors.writes_of('chunk00001', 503), 2),
  'for the second alone': (doors.everything_after(''), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(('refusal', 'num_refused'), AWAY.values(), ids=AWAY)
def test_a_process_that_fails_ends_the_others(
  door, server, bucket, inputs, monkeypatch, refusal, num_refused
):
  """With its own status, although they wait for it."""
  door.refusal = refusal
  ports = [server.port] * (2 - num_refused) + [door.port] * num_refused
  there = server.upload(inputs, f'{bucket}/in')
  command = argv(
    f'{inputs}/t5',
    f'{there}/task.jsonl',
    f'{bucket}/out',
    device_mesh__num_devices='None',
    device_mesh__num_partitions=2,
  )
  with children.starter() as start_python:

    def start(_, *arguments, num_devices):
      environment = servers.environment(ports.pop(0))
      for name, value in environment.items():
        monkeypatch.setenv(name, value)
      return start_python('-c', HASTY, *arguments, num_devices=num_devices)

    processes = pod(start, None, command)
    while not door.num_refused:
      assert [each.poll() for each in processes] == [None] * 2
      time.sleep(0.1)
    said = [each.communicate(timeout=180)[1] for each in processes]
  assert [each.returncode for each in processes] == [75] * 2, said
  assert any('does not answer' in each for each in said), said


def chunks(server, out) -> list[str]:
  """What there is of the chunks: `0` of the first, `0.COMPLETED` its mark."""
  names = [name for name in server.times(out) if '-chunk' in name]
  return sorted(name.rpartition('-chunk0000')[2] for name in names)


@pytest.mark.slow
def test_a_killed_run_goes_on(server, bucket, start, inputs, tmp_path, capfd):
  """Killed before the mark of a chunk, and before the last mark of all."""
  assert main(flags(inputs, tmp_path)) == 0
  out = f'{bucket}/out'
  # Settings, config.gin, a chunk and its mark, a chunk.
  assert_killed(start(5, *flags(inputs, out)))
  assert chunks(server, out) == ['0', '0.COMPLETED', '1']
  # config.gin, four chunks and their marks, the whole.
  assert_killed(start(10, *flags(inputs, out)))
  assert infer_runs.result('', shard='00001-of-00002').name in server.times(out)
  capfd.readouterr()
  assert main(flags(inputs, out)) == 0
  assert 'examples decoded' not in capfd.readouterr().err
  assert_same_results(server, out, tmp_path)


@pytest.mark.slow
def test_a_pod_that_loses_a_host(server, bucket, start, inputs, tmp_path):
  """Two hosts of four devices. The one that writes is lost, the other one is
  ended; then both begin again."""
  mesh = {
    'device_mesh__num_devices': 'None',
    'device_mesh__num_partitions': 2,
  }
  assert main(flags(inputs, tmp_path, **mesh)) == 0
  out = f'{bucket}/out'

  first, second = pod(start, 7, flags(inputs, out, **mesh))
  assert_killed(first)
  second.kill()
  assert chunks(server, out) == ['0', '0.COMPLETED', '1', '1.COMPLETED', '2']
  assert_done(pod(start, 100, flags(inputs, out, **mesh)))
  assert_same_results(server, out, tmp_path)


@pytest.mark.slow
def test_a_pod_that_trains_loses_a_host(server, bucket, start, tmp_path):
  """Two hosts of four devices; the one that writes is lost between two
  checkpoints. A pod with a disk leaves the same bytes."""
  test_training.write_inputs(tmp_path)
  there = server.upload(tmp_path, f'{bucket}/inputs')
  out = f'{bucket}/run'
  assert_done(
    pod(start, 100, test_training.argv(tmp_path, tmp_path / 'run', 4))
  )
  # Sizes, vocabulary, settings, config.gin, the lines of two steps; then more.
  first, second = pod(start, 5, test_training.argv(there, out, 4))
  assert_killed(first)
  second.kill()
  second.wait()
  assert not server.objects(f'{out}/model')
  assert 'commit_success.txt' in server.objects(f'{out}/checkpoints/2')
  assert_done(pod(start, 100, test_training.argv(there, out, 4)))
  assert test_training.contents(out) == test_training.contents(tmp_path / 'run')
