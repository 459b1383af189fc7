"""`specdec infer` as processes: killed and restarted, and two together."""

import functools
import pathlib
import random
import re
import signal
import socket
import time

import jax
import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from specdec_jax.launch import processes
from specdec_jax.training import metrics_log
from tests import children
from tests.checkpoints import tiny_t5
from tests.cli import tiny
from tests.infer import infer_runs
from tests.infer.infer_runs import argv, predictions, result
from tests.training import tiny_runs
from tests.training.test_command import GIN

NUM_EXAMPLES = 160


@pytest.fixture(scope='module')
def task(tmp_path_factory):
  path = tmp_path_factory.mktemp('task') / 'task.jsonl'
  infer_runs.write_task(path, NUM_EXAMPLES)
  return path


@pytest.fixture(scope='module')
def t5(tmp_path_factory):
  return tiny_t5.write_model(tmp_path_factory.mktemp('t5'))


@pytest.fixture
def start():
  """Starts the command; what is still running at the end is killed."""
  with children.starter() as start_python:
    yield functools.partial(start_python, '-m', 'specdec_jax')


def finish(process) -> str:
  """Waits for a process that should end well; what it said."""
  _, text = process.communicate(timeout=180)
  assert process.returncode == 0, text
  return text


def wait_for(path: pathlib.Path, process) -> None:
  deadline = time.monotonic() + 120
  while not path.exists():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.0005)


@pytest.mark.slow
@pytest.mark.parametrize('drafter', ['none', 'suffix'])
def test_a_run_killed_three_times_ends_in_the_same_bytes(
  drafter, start, t5, task, tmp_path
):
  """Twenty chunks; it is killed after the fourth, tenth and sixteenth at the
  soonest, wherever it then is. What suffix drafts, on which sampled tokens
  depend, is from the chunks before."""
  gin_file = infer_runs.gin_file(f'drafters/{drafter}.gin')
  sampling = {'Decoding__temperature': 1.0}
  if drafter == 'suffix':
    sampling['drafters__Suffix__gamma'] = 8
  flags = argv(t5, task, tmp_path / 'whole', gin_file, **sampling)
  finish(start(*flags))
  flags = argv(t5, task, tmp_path / 'killed', gin_file, **sampling)
  chunks = tmp_path / 'killed' / 'tmp-task-predict-00000-of-00001'
  rng = random.Random(0)
  for index in (4, 10, 16):
    process = start(*flags)
    mark = f'task-predict.jsonl-00000-of-00001-chunk{index:05}.COMPLETED'
    wait_for(chunks / mark, process)
    time.sleep(rng.uniform(0, 0.02))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not result(tmp_path / 'killed').exists()
  text = finish(start(*flags))
  assert f'{NUM_EXAMPLES} examples decoded' not in text
  names = [result(tmp_path / each) for each in ('whole', 'killed')]
  assert names[0].read_bytes() == names[1].read_bytes()
  assert not chunks.exists()


IMPATIENT = """
import sys
from specdec_jax.cli import main
from specdec_jax.launch import processes
from specdec_jax.training import metrics_log
processes._JOIN_SECONDS = int(sys.argv[1])
processes._NOTICE_SECONDS = 0.2
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_processes_that_nobody_joins(tmp_path):
  """One that nobody answers, which says so in time; one that is interrupted
  while it waits; and one whose port is taken."""
  with socket.socket(socket.AF_INET6) as taken:
    taken.bind(('::', 0))
    taken.listen()
    port = taken.getsockname()[1]
    with children.starter() as start:
      alone, waiting, second = (
        start(
          *('-c', IMPATIENT, seconds),
          *argv('nowhere', 'nothing.txt', tmp_path, '--process_count=2'),
          f'--coordinator_address=localhost:{at}',
          f'--process_index={index}',
        )
        for seconds, index, at in (
          ('1', 1, 9),
          ('3600', 1, 9),
          ('3600', 0, port),
        )
      )
      said = waiting.stderr.readline()
      assert '3600 s for 1 other process at localhost:9' in said
      waiting.send_signal(signal.SIGINT)
      assert waiting.communicate(timeout=180)[1] == 'specdec: interrupted\n'
      assert waiting.returncode == 130
      said = alone.communicate(timeout=180)[1]
      assert alone.returncode == 75, said
      assert 'have not met at localhost:9 within 1 s' in said
      said = second.communicate(timeout=180)[1]
      assert second.returncode == 2, said
      assert f'port {port} of this host is taken' in said


@pytest.mark.parametrize('family', [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_is_taken_is_refused(family):
  taken = socket.create_server(('', 0), family=family)
  with taken, pytest.raises(ValueError, match='is taken'):
    processes._check_free(taken.getsockname()[1])


def test_processes_on_cpus_run_no_programs_from_the_cache(monkeypatch):
  """Also where it is jax that chooses the CPUs."""
  monkeypatch.setattr(processes, '_join', lambda meeting: None)
  before = jax.config.jax_platforms, jax.config.jax_enable_compilation_cache
  jax.config.update('jax_platforms', None)
  jax.config.update('jax_enable_compilation_cache', True)
  try:
    with processes.joined(processes.Meeting(None, None, None)):
      assert not jax.config.jax_enable_compilation_cache
  finally:
    jax.config.update('jax_platforms', before[0])
    jax.config.update('jax_enable_compilation_cache', before[1])


@pytest.mark.slow
def test_two_processes_on_one_shard(start, run, t5, task, tmp_path):
  """One writes; the other is told of it, and changes nothing."""
  flags = argv(t5, task, tmp_path)
  process = start(*flags)
  wait_for(tmp_path / 'tmp-task-predict-00000-of-00001', process)
  process.send_signal(signal.SIGSTOP)  # So that it is not done too soon.
  tiny.assert_refused(run(*flags), f'process {process.pid} on ', 'is writing')
  process.send_signal(signal.SIGCONT)
  finish(process)
  assert [line['inputs'] for line in infer_runs.records(result(tmp_path))] == [
    {f'{name}_pretokenized': text for name, text in example.items()}
    for example in infer_runs.records(task)
  ]
  assert not list(tmp_path.glob('*.lock'))


def pair(start, places, *command, **options) -> list:
  """A process in each of two folders, which meet."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  return [
    start(
      *(each[i] if isinstance(each, tuple) else each for each in command),
      f'--coordinator_address=localhost:{port}',
      '--process_count=2',
      f'--process_index={i}',
      cwd=place,
      **options,
    )
    for i, place in enumerate(places)
  ]


def outcomes(processes) -> list[tuple[int, str]]:
  """Exit status and standard error of each, when all have ended."""
  said = [process.communicate(timeout=180)[1] for process in processes]
  return [(p.returncode, s) for p, s in zip(processes, said, strict=True)]


def together(start, places, *command, **options) -> list[tuple[int, str]]:
  return outcomes(pair(start, places, *command, **options))


@pytest.mark.slow
def test_processes_that_are_asked_to_end_do_after_a_chunk(
  start, t5, task, tmp_path
):
  """The second one alone is, as when its machine is drained."""
  one, two = tmp_path / 'one', tmp_path / 'two'
  mesh = {
    'device_mesh__num_devices': 'None',
    'device_mesh__num_partitions': 2,
  }
  command = argv(t5, task, two, **mesh)
  hosts = pair(start, [tmp_path] * 2, *command)
  chunks = two / 'tmp-task-predict-00000-of-00001'
  wait_for(chunks, hosts[0])
  hosts[1].send_signal(signal.SIGTERM)
  found = outcomes(hosts)
  assert [status for status, _ in found] == [75, 75], found
  assert ['was asked to end (SIGTERM)' in text for _, text in found] == [
    True,
    False,
  ]
  assert not any('has failed' in text for _, text in found)
  num_marks = len(list(chunks.glob('*-chunk*.COMPLETED')))
  assert 0 < num_marks < NUM_EXAMPLES // infer_runs.BATCH_SIZE
  assert f'ends after chunk {num_marks - 1}' in found[0][1]
  found = together(start, [tmp_path] * 2, *command)
  assert [status for status, _ in found] == [0, 0], found
  finish(start(*argv(t5, task, one)))
  assert predictions(result(two)) == predictions(result(one))


@pytest.mark.slow
def test_each_process_makes_the_masks_of_its_own_rows(
  start, t5, task, tmp_path
):
  """Two of them, with four devices each."""
  pytest.importorskip('llguidance')
  one, two = tmp_path / 'one', tmp_path / 'two'
  regex = r'[a-d]{1,3}( (the|fox) (live|big)){2}\.'
  lengths = "{'inputs': 12, 'targets': 32}"
  options = {
    'Decoding__regex': repr(regex),
    'Decoding__batch_size': 8,
    'TASK_FEATURE_LENGTHS': lengths,
    'drafters__PromptLookup__gamma': 3,
  }
  drafter = '--gin_file=drafters/prompt_lookup.gin'
  mesh = {
    'device_mesh__num_devices': 'None',
    'device_mesh__num_partitions': 2,
  }
  command = argv(t5, task, two, drafter, **options, **mesh)
  ended = together(start, [tmp_path] * 2, *command, num_devices=4)
  assert [status for status, _ in ended] == [0, 0], ended
  finish(start(*argv(t5, task, one, drafter, **options)))
  assert predictions(result(two)) == predictions(result(one))
  texts = predictions(result(one))
  assert all(re.fullmatch(regex, text) for text in texts)


@pytest.mark.slow
def test_processes_that_are_asked_to_end_write_a_checkpoint(start, tmp_path):
  """Between two that the schedule has; then they go on from it."""
  tiny_runs.write_tokens(tmp_path / 'tokens', train=120)
  (tmp_path / 'train.gin').write_text(GIN.format(base='train'))

  def command(steps):
    return [
      *('train', '--gin_file=train.gin', '--gin.TOKENS="tokens"'),
      *('--gin.MODEL_DIR="run"', f'--gin.TRAIN_STEPS={steps}'),
      *('--gin.CHECKPOINT_PERIOD=100000', '--gin.EVAL_PERIOD=100000'),
      '--gin.loop.Schedule.average_last=1',
      '--gin.loop.Schedule.log_period=100000',
    ]

  run = tmp_path / 'run'
  hosts = pair(start, [tmp_path] * 2, *command(10**6))
  wait_for(run / 'config.gin', hosts[0])
  hosts[0].send_signal(signal.SIGTERM)
  found = outcomes(hosts)
  assert [status for status, _ in found] == [75, 75], found
  (checkpoint,) = (run / 'checkpoints').iterdir()
  step = int(checkpoint.name)
  assert step < 10**5
  assert metrics_log.read_log(run / metrics_log.NAME)[-1]['step'] == step
  found = together(start, [tmp_path] * 2, *command(step + 3))
  assert [status for status, _ in found] == [0, 0], found
  # The mean of the steps since goes on.
  lines = metrics_log.read_log(run / metrics_log.NAME)
  assert [line['step'] for line in lines[-2:]] == [step, step + 3]
  assert [each.name for each in (run / 'checkpoints').iterdir()] == [
    str(step + 3)
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['Decoding.temperature', 'the examples in chunk 0', 'the data']
)
def test_processes_that_disagree_are_refused(start, tmp_path, name):
  """Both, before anything is decoded or trained."""
  places = [tmp_path / str(i) for i in range(2)]
  command = argv('t5', 'task.jsonl', 'out')
  if name == 'the data':
    command = ['train', '--gin_file=train.gin', '--gin.TOKENS="tokens"']
    command += ['--gin.MODEL_DIR="out"', '--gin.TRAIN_STEPS=4']
  elif name == 'Decoding.temperature':
    command += [tuple(f'--gin.{name}={value}' for value in (0.0, 1.0))]
  for i, place in enumerate(places):
    tiny_t5.write_model(place / 't5')
    infer_runs.write_task(place / 'task.jsonl', 9, seed=i * ('exa' in name))
    tiny_runs.write_tokens(place / 'tokens', train=90 + i)
    (place / 'train.gin').write_text(GIN.format(base='train'))
  for status, said in together(start, places, *command):
    assert status == 2, said
    assert re.search(rf'{name} is .* in process 0 and .* in process 1', said)
  assert not [*tmp_path.rglob('out/checkpoints'), *tmp_path.rglob('*chunk*')]


@pytest.mark.slow
@pytest.mark.parametrize('more', [{}, {'Decoding__num_decodes': 2}])
def test_two_processes_of_four_devices_decode_what_one_does(
  start, t5, tmp_path, more
):
  """Data and model axes of 4 x 2, each across both processes in part; the first
  process writes."""
  task = tmp_path / 'task.jsonl'
  infer_runs.write_task(task, 5 * infer_runs.BATCH_SIZE)
  one, two = tmp_path / 'one', tmp_path / 'two'
  whole = {'infer__checkpoint_period': 100} | more
  finish(start(*argv(t5, task, one, **whole)))
  mesh = {
    'device_mesh__num_devices': 'None',
    'device_mesh__num_partitions': 2,
  }
  command = argv(t5, task, two, **whole, **mesh)
  found = together(start, [tmp_path] * 2, *command, num_devices=4)
  assert [status for status, _ in found] == [0, 0], found
  assert ['examples decoded' in text for _, text in found] == [True, False]
  assert predictions(result(two)) == predictions(result(one))
