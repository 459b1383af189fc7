"""The command as a process: signals, pipes, terminals, exit statuses."""

import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import time
from importlib import metadata

import pytest

from specdec_jax import lazy
from specdec_jax.assembly import trace_files as storage
from tests import children
from tests.cli.tiny import begun, without_styles


@pytest.fixture
def environment():
  return children.environment() | {
    'PYTHONWARNINGS': 'error',
    'TERM': 'xterm-256color',
  }


@pytest.fixture
def start(environment):
  """Starts the command; what is still running at the end is killed."""
  # A script that puts the tests in the background has them ignore interrupts,
  # and what they start would inherit that.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  started = []

  def call(*argv, within=(), **streams):
    streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE} | streams
    python = (*within, sys.executable)
    command = [*python, '-m', 'specdec_jax', *map(str, argv)]
    process = subprocess.Popen(
      command, env=environment, stdin=subprocess.DEVNULL, **streams
    )
    started.append(process)
    return process

  yield call
  for process in started:
    if process.poll() is None:
      process.kill()
    process.communicate()


@pytest.fixture
def many_prompts(tmp_path):
  path = tmp_path / 'many.txt'
  path.write_text(''.join(f'the in {i}\n' for i in range(5000)))
  return path


def test_help_and_errors_answer_soon(start):
  seconds = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
  before = seconds()
  shown = start('--help')
  out, err = shown.communicate(timeout=180)
  assert (shown.returncode, err) == (0, b'')
  for command in (b'generate', b'chat', b'convert', b'doctor'):
    assert command in out
  refused = start('generate', '--prompt', 'a', '--gamma', '0')
  out, err = refused.communicate(timeout=180)
  assert (refused.returncode, out) == (2, b'')
  assert err.count(b'\n') == 1
  assert b'Traceback' not in err
  # Of the processor: two interpreters and two imports of jax.
  assert seconds() - before < 20


def test_an_interrupt_leaves_whole_lines(start, model, many_prompts, tmp_path):
  json_path, trace_path = tmp_path / 'out.jsonl', tmp_path / 'trace.jsonl'
  process = start(
    'generate',
    *('--model', model, '--prompts', many_prompts, '--max_new_tokens', '8'),
    *('--json', json_path, '--trace', trace_path),
  )
  for _ in range(3):
    assert process.stdout.readline()
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=180)
  assert process.returncode == 130
  said = err.decode().splitlines()
  assert said[-1] == 'specdec: interrupted'
  for line, path in zip(said, (trace_path, json_path), strict=False):
    assert line.endswith(f'is in {begun(path)}')
  text = begun(json_path).read_text()
  assert text.endswith('\n')
  records = [json.loads(line) for line in text.splitlines()]
  assert 3 <= len(records) < 5000
  traced = storage.read(begun(trace_path))
  assert traced.summary is None
  assert not traced.is_truncated
  assert len(traced.rows) >= len(records)


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_a_compiled_decode(
  start, make_model, tmp_path
):
  """The loop of one batch would run for minutes without a word of Python."""
  model = make_model('long', max_positions=2**20, eos_token=None)
  err, err_end = pty.openpty()
  process = start(
    'generate',
    *('--model', model, '--prompt', 'ab', '--max_new_tokens', '200000'),
    *('--gamma', '1', '--drafter', 'uniform'),
    stderr=err_end,
  )
  os.close(err_end)
  said = b''
  while b'decoding' not in said:  # Which begins when it is compiled.
    said += os.read(err, 65536)
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(timeout=1)
  process.send_signal(signal.SIGINT)
  started = time.perf_counter()
  assert process.wait(timeout=180) == 130
  assert time.perf_counter() - started < 5
  assert read_all([err])[0].endswith('specdec: interrupted\r\n')


@pytest.mark.slow
def test_a_reader_that_leaves(start, model, many_prompts):
  process = start('generate', '--model', model, '--prompts', many_prompts,
                  '--max_new_tokens', '8')  # fmt: skip
  process.stdout.readline()
  process.stdout.close()
  assert process.wait(timeout=180) == 141
  assert process.stderr.read() == b''


@pytest.mark.slow
def test_a_closed_standard_output(start, model):
  """Else its text would be lost, and the next open file take its number."""
  process = start(
    *('generate', '--model', model, '--prompt', 'a'),
    within=('sh', '-c', 'exec "$@" >&-', 'sh'),
  )
  _, err = process.communicate(timeout=180)
  assert process.returncode == 2
  assert b'standard output is closed' in err


@pytest.mark.slow
@pytest.mark.parametrize('command', ['doctor', 'convert', 'chat'])
def test_a_platform_without_its_plug_in(start, environment, tmp_path, command):
  if any('cuda' in each.name for each in metadata.distributions()):
    pytest.skip('it is installed')
  environment['JAX_PLATFORMS'] = 'cuda'
  convert = ('lm-nano', tmp_path / 'out', '--to', 'huggingface')
  process = start(command, *(convert if command == 'convert' else ()))
  _, err = process.communicate(timeout=180)
  assert process.returncode == 2
  assert b'no device of JAX_PLATFORMS=cuda' in err
  assert b"pip install -e '.[cuda]' in the clone of specdec_jax" in err


@pytest.mark.tpu
def test_libtpu_is_silent_on_a_machine_without_tpus(start, environment, model):
  pytest.importorskip('libtpu')
  environment['JAX_PLATFORMS'] = ''
  process = start('generate', '--model', model, '--prompt', 'a',
                  '--max_new_tokens', '4')  # fmt: skip
  _, err = process.communicate(timeout=120)
  assert (process.returncode, err) == (0, b'')


@pytest.mark.tpu
def test_libtpu_is_silent_in_python_too(environment, model):
  pytest.importorskip('libtpu')
  program = (
    'import specdec_jax\n'
    f'decoder = specdec_jax.load({model!r}, gamma=2)\n'
    'print(*specdec_jax.generate(decoder, ["a"], max_new_tokens=4))\n'
  )
  result = subprocess.run(
    [sys.executable, '-c', program],
    env=environment | {'JAX_PLATFORMS': ''},
    capture_output=True,
    timeout=180,
  )
  assert (result.returncode, result.stderr) == (0, b'')


@pytest.mark.tpu
def test_libtpu_in_a_directory_that_was_deleted(
  environment, start, model, tmp_path, monkeypatch
):
  pytest.importorskip('libtpu')
  environment['JAX_PLATFORMS'] = ''
  folder = tmp_path / 'deleted'
  folder.mkdir()
  monkeypatch.chdir(folder)
  folder.rmdir()
  for command in (
    ('generate', '--model', model, '--prompt', 'a'),
    *lazy.installed('tests.planning.contract_rows:ON_TPU'),
  ):
    process = start(*command)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert b'error: the working directory was deleted, and libtpu' in err


@pytest.mark.slow
def test_an_encoding_that_lacks_characters(start, environment, model):
  environment['PYTHONIOENCODING'] = 'ascii'
  usual = ('--model', model, '--prompt', 'é', '--max_new_tokens', '8')
  process = start('generate', *usual, '--json', '-')
  out, err = process.communicate(timeout=180)
  assert (process.returncode, err) == (0, b'')
  assert json.loads(out.decode('ascii'))['prompt'] == 'é'


def read_all(descriptors: list[int]) -> list[str]:
  """What comes through descriptors until all are closed."""
  data = dict.fromkeys(descriptors, b'')
  is_open = set(descriptors)
  while is_open:
    for descriptor in select.select([*is_open], [], [], 60)[0]:
      try:
        chunk = os.read(descriptor, 65536)
      except OSError:  # The other side of a terminal has gone.
        chunk = b''
      data[descriptor] += chunk
      if not chunk:
        is_open.remove(descriptor)
        os.close(descriptor)
  return [data[each].decode() for each in descriptors]


def run_on_terminal(start, *argv, has_output=True):
  """Runs the command with standard error on a terminal, and standard output on
  another, or in a pipe."""
  out, out_end = pty.openpty() if has_output else os.pipe()
  err, err_end = pty.openpty()
  process = start(*argv, stdout=out_end, stderr=err_end)
  os.close(out_end)
  os.close(err_end)
  shown = read_all([out, err])
  assert process.wait(timeout=180) == 0, shown
  return shown


@pytest.mark.slow
@pytest.mark.parametrize('prompts', ['one', 'several', 'batch'])
def test_a_terminal_sees_colours_and_progress(start, model, tmp_path, prompts):
  path, json_path = tmp_path / 'prompts.txt', tmp_path / 'out.jsonl'
  lines = ['the in the in'] + ['ab ab ab'] * (prompts != 'one')
  path.write_text('\n'.join(lines))
  out, err = run_on_terminal(
    start,
    *('generate', '--model', model, '--prompts', path, '--json', json_path),
    *(
      '--max_new_tokens',
      '8',
      '--batch_size',
      '2' if prompts == 'batch' else '1',
    ),
  )
  assert '\x1b[34m' in out
  shown = without_styles(out).splitlines()
  headings = [line for line in shown if line.startswith('> ')]
  assert headings == [f'> {line}' for line in lines] * (prompts != 'one')
  assert 'compiling' in err
  # Not the sentence which says that decoding is plain.
  is_bar = 'decoding' in err.replace('plain decoding', '')
  assert is_bar == (prompts == 'batch')
  num_tokens = sum(
    len(json.loads(line)['tokens'])
    for line in json_path.read_text().splitlines()
  )
  last_line = without_styles(err).split('\n')[-2]
  assert f'{num_tokens} tokens in ' in last_line


@pytest.mark.slow
def test_a_watched_run_keeps_its_output_in_the_pipe(start, model, tmp_path):
  """A progress bar must not carry off what is printed beside it."""
  path, json_path = tmp_path / 'prompts.txt', tmp_path / 'out.jsonl'
  path.write_text('the in\nab\n')
  out, err = run_on_terminal(
    start,
    *('generate', '--model', model, '--prompts', path, '--json', json_path),
    *('--max_new_tokens', '8'),
    has_output=False,
  )
  texts = [
    json.loads(line)['text'] for line in json_path.read_text().splitlines()
  ]
  assert out == ''.join(f'{text}\n' for text in texts)
  assert 'decoding' in err
  assert '2/2' in err
