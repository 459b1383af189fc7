"""Runs to a bucket that are killed, and pods whose hosts change."""

import re
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')

from specdec_jax.cli.main import main
from tests import children
from tests.cli import infer_runs
from tests.cli.infer_runs import argv

NUM_CHUNKS = 8


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
  folder = tmp_path_factory.mktemp('inputs')
  infer_runs.write_model(folder / 't5')
  num_examples = NUM_CHUNKS * infer_runs.BATCH_SIZE
  infer_runs.write_task(folder / 'task.jsonl', 2 * num_examples)
  return folder


@pytest.fixture
def start():
  """Starts a command with some devices; what still runs in the end is
  killed."""
  started = []

  def call(*flags, num_devices=1):
    process = subprocess.Popen(
      [sys.executable, '-m', 'specdec_jax', *flags],
      env=children.environment(num_devices),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    started.append(process)
    return process

  yield call
  for process in started:
    process.kill()
    process.wait()
    process.stderr.close()


def flags(inputs, out, *more, **bindings):
  """One of two shards, eight chunks."""
  return argv(
    inputs / 't5',
    inputs / 'task.jsonl',
    out,
    '--shard_id=1',
    *more,
    infer__num_shards=2,
    **bindings,
  )


def wait_for_chunks(server, out, count: int, processes) -> None:
  """Until so many are complete."""
  until = time.monotonic() + 120
  while True:
    names = server.times(out)
    found = [name for name in names if re.search(r'chunk\d+\.COMPLETED$', name)]
    if len(found) >= count:
      return
    for process in processes:
      assert process.poll() is None, process.communicate()
    assert time.monotonic() < until
    time.sleep(0.002)


def assert_same_results(server, out, folder) -> None:
  found = server.objects(out)
  final = infer_runs.result(folder, shard='00001-of-00002')
  for path in (final, final.with_name(f'{final.name}.COMPLETED')):
    assert found.pop(path.name) == path.read_bytes()
  assert set(found) == {'config.gin'}


@pytest.mark.slow
def test_a_killed_run_goes_on(server, bucket, start, inputs, tmp_path):
  """Killed twice in the middle of its chunks."""
  assert main(flags(inputs, tmp_path)) == 0
  out = f'{bucket}/out'
  for count in (2, 5):
    process = start(*flags(inputs, out))
    wait_for_chunks(server, out, count, [process])
    process.kill()
    process.wait()
  process = start(*flags(inputs, out))
  said = process.communicate(timeout=120)[1]
  assert process.returncode == 0, said
  decoded = re.search(r'(\d+) examples decoded', said)
  assert decoded is None or int(decoded[1]) < NUM_CHUNKS * infer_runs.BATCH_SIZE
  assert_same_results(server, out, tmp_path)


@pytest.mark.slow
def test_a_pod_that_loses_a_host(server, bucket, start, inputs, tmp_path):
  """Two hosts of four devices; one is lost, the other ended. They begin again
  with their places changed, so that another one writes."""
  mesh = {
    'device_mesh__num_devices': 'None',
    'device_mesh__num_partitions': 2,
  }
  assert main(flags(inputs, tmp_path, **mesh)) == 0
  out = f'{bucket}/out'

  def pod():
    with socket.socket() as free:
      free.bind(('localhost', 0))
      port = free.getsockname()[1]
    return [
      start(
        *flags(
          inputs,
          out,
          '--multiprocess',
          f'--coordinator_address=localhost:{port}',
          '--process_count=2',
          f'--process_index={index}',
          **mesh,
        ),
        num_devices=4,
      )
      for index in range(2)
    ]

  hosts = pod()
  wait_for_chunks(server, out, 3, hosts)
  for host in reversed(hosts):
    host.kill()
    host.wait()
  before = server.times(out)
  for host in pod():
    said = host.communicate(timeout=180)[1]
    assert host.returncode == 0, said
  assert any('chunk' in name for name in before)
  assert_same_results(server, out, tmp_path)
