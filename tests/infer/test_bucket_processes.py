"""Runs to a bucket that are killed, and pods whose hosts change."""

import time

import pytest

pytest.importorskip('gcsfs')
pytest.importorskip('gin')
pytest.importorskip('sentencepiece')

import gcsfs

from specdec_jax.cli.main import main
from tests import children
from tests.checkpoints import tiny_t5
from tests.files import door as doors
from tests.files import server as servers
from tests.files.pods import assert_done, assert_killed, pod
from tests.files.test_bucket_failures import told
from tests.infer import infer_runs
from tests.infer.infer_runs import argv

NUM_CHUNKS = 5


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
  folder = tmp_path_factory.mktemp('inputs')
  tiny_t5.write_model(folder / 't5')
  num_examples = NUM_CHUNKS * infer_runs.BATCH_SIZE
  infer_runs.write_task(folder / 'task.jsonl', 2 * num_examples)
  return folder


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


def assert_same_results(server, out, folder) -> None:
  found = server.objects(out)
  final = infer_runs.result(folder, shard='00001-of-00002')
  for path in (final, final.with_name(f'{final.name}.COMPLETED')):
    assert found.pop(path.name) == path.read_bytes()
  assert set(found) == {'config.gin'}


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
def test_a_killed_run_goes_on(
  server, bucket, start_limited, inputs, tmp_path, capfd
):
  """Killed before the mark of a chunk, and before the last mark of all."""
  assert main(flags(inputs, tmp_path)) == 0
  out = f'{bucket}/out'
  # Settings, config.gin, a chunk and its mark, a chunk.
  assert_killed(start_limited(5, *flags(inputs, out)))
  assert chunks(server, out) == ['0', '0.COMPLETED', '1']
  # config.gin, four chunks and their marks, the whole.
  assert_killed(start_limited(10, *flags(inputs, out)))
  assert infer_runs.result('', shard='00001-of-00002').name in server.times(out)
  capfd.readouterr()
  assert main(flags(inputs, out)) == 0
  assert 'examples decoded' not in capfd.readouterr().err
  assert_same_results(server, out, tmp_path)


@pytest.mark.slow
def test_a_pod_that_loses_a_host(
  server, bucket, start_limited, inputs, tmp_path
):
  """Two hosts of four devices. The one that writes is lost, the other one is
  ended; then both begin again."""
  mesh = {
    'device_mesh__num_devices': 'None',
    'device_mesh__num_partitions': 2,
  }
  assert main(flags(inputs, tmp_path, **mesh)) == 0
  out = f'{bucket}/out'

  first, second = pod(start_limited, 7, flags(inputs, out, **mesh))
  assert_killed(first)
  second.kill()
  assert chunks(server, out) == ['0', '0.COMPLETED', '1', '1.COMPLETED', '2']
  assert_done(pod(start_limited, 100, flags(inputs, out, **mesh)))
  assert_same_results(server, out, tmp_path)


@pytest.mark.slow
def test_infer_loses_nothing(door, server, bucket, impatient, tmp_path, capfd):
  """Refused its second chunk, then hung up on at its third; the rest is decoded
  through a door that is slow."""
  tiny_t5.write_model(tmp_path / 'in' / 't5')
  task = tmp_path / 'in' / 'task.jsonl'
  infer_runs.write_task(task, 3 * infer_runs.BATCH_SIZE)
  assert main(infer_runs.argv(tmp_path / 'in/t5', task, tmp_path / 'out')) == 0
  inputs = server.upload(tmp_path / 'in', f'{bucket}/in')
  out = f'{bucket}/out'
  command = infer_runs.argv(f'{inputs}/t5', f'{inputs}/task.jsonl', out)
  capfd.readouterr()
  for index, answer, reason, status in (
    (1, 403, 'no permission: ', 2),
    (2, 0, 'the server', 75),
  ):
    door.refusal = doors.writes_of(f'chunk0000{index}', answer)
    place = f'{out}/tmp-task-predict-00000-of-00001/'
    place += f'task-predict.jsonl-00000-of-00001-chunk0000{index}'
    found = told(capfd, *command, status=status)
    assert found.startswith(f'cannot write {place}: {reason}')
    marks = [name for name in server.times(out) if '.COMPLETED' in name]
    assert len(marks) == index
  assert door.num_refused == 1 + gcsfs.GCSFileSystem.retries
  door.refusal, door.seconds = lambda *_: None, 0.001
  assert main(command) == 0
  name = infer_runs.result('').name
  assert server.objects(out)[name] == (tmp_path / 'out' / name).read_bytes()
