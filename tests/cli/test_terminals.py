"""What a model or a file says cannot command a terminal."""

import io
import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import lazy
from specdec_jax.cli.main import main
from specdec_jax.launch import progress
from tests.cli import tiny

# Of control characters, those that a terminal obeys though they are no line
# break or tab; a terminal reads U+009B as it does ESC [.
_CONTROLS = re.compile(r'[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]')
NAME = 'x\x1b]0;title\x07\x9b2J\u202e'
SHOWN = 'x␛]0;title␇<U+009B>2J<U+202E>'
_SHORT = '--max_new_tokens', '3', '--gamma', '2', '--drafter', 'prompt_lookup'


class Terminal(io.TextIOWrapper):
  """A terminal that keeps what is printed."""

  def __init__(self):
    super().__init__(io.BytesIO(), encoding='utf-8', newline='')

  def isatty(self) -> bool:
    return True

  def text(self) -> str:
    self.flush()
    return self.buffer.getvalue().decode()


@pytest.fixture
def on_terminal(monkeypatch):
  """Makes standard output and standard error of a test a terminal."""

  def begin() -> Terminal:
    # Not while the fixture is made: before the test begins, pytest sets both.
    monkeypatch.setenv('TERM', 'xterm-256color')
    screen = Terminal()
    monkeypatch.setattr(sys, 'stdout', screen)
    monkeypatch.setattr(sys, 'stderr', screen)
    return screen

  return begin


@pytest.fixture(scope='module')
def escaping(model) -> tuple[str, ...]:
  """Flags with which a model says nothing but ESC."""
  escape = tiny.make_tokens().index(chr(0x100 + 0x1B))
  bias = f'{{{escape}: 1000.0}}'
  return '--model', model, '--logit_bias', bias, *_SHORT


def assert_harmless(text: str) -> None:
  found = tiny.without_styles(text).replace('\r\n', '\n')
  # What rich does to a line of its own, such as that of a spinner.
  found = found.replace('\r', '')
  assert not _CONTROLS.search(found), repr(found)


def test_what_a_model_says(escaping, on_terminal, monkeypatch, tmp_path):
  terminal = on_terminal()
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text(f'in\n{NAME}\n')
  path = tmp_path / 'trace.jsonl'
  # One prompt streams, several are shown row by row.
  assert main(['generate', *escaping, '--prompt', 'in']) == 0
  assert '␛␛␛' in tiny.without_styles(terminal.text())
  more = '--batch_size', '2', '--prompts', str(prompts), '--trace', str(path)
  assert main(['generate', *escaping, *more]) == 0
  assert f'> {SHOWN}' in tiny.without_styles(terminal.text())
  for show in lazy.installed('tests.trace.contract_rows:show'):
    show(path)
  for verdicts in ((), ('--verdicts',)):
    monkeypatch.setattr(sys, 'stdin', io.StringIO('in\n'))
    before = len(terminal.text())
    assert main(['chat', *escaping, *verdicts]) == 0
    assert '␛␛␛' in tiny.without_styles(terminal.text()[before:])
  assert_harmless(terminal.text())


@pytest.mark.parametrize('command', ['generate', 'chat'])
def test_pipes_get_the_text_itself(escaping, command, capfd, monkeypatch):
  monkeypatch.setattr(sys, 'stdin', io.StringIO('in\n'))
  prompt = () if command == 'chat' else ('--prompt', 'in')
  result = tiny.run(capfd, command, *escaping, *prompt)
  assert (result.status, result.out) == (0, '\x1b\x1b\x1b\n')


def test_json_on_a_terminal_is_escaped(model, on_terminal):
  terminal = on_terminal()
  flags = '--model', model, *_SHORT, '--json', '-'
  for prompt in (NAME, 'ü'):
    assert main(['generate', *flags, '--prompt', prompt]) == 0
  shown = terminal.text()
  assert_harmless(shown)
  lines = re.findall(r'{"prompt".*}', shown)
  assert [json.loads(line)['prompt'] for line in lines] == [NAME, 'ü']
  assert '"ü"' in lines[1]


def test_names_of_files_in_errors(make_model, on_terminal):
  terminal = on_terminal()
  folders = [Path(make_model(name)) for name in ('a_key', 'a_tensor')]
  config = folders[0] / 'config.json'
  config.write_text(json.dumps(json.loads(config.read_text()) | {NAME: 1}))
  weights = folders[1] / 'model.safetensors'
  tensors = safetensors.numpy.load_file(weights)
  safetensors.numpy.save_file(tensors | {NAME: np.ones(2)}, weights)
  for folder in folders:
    assert main(['generate', '--model', str(folder), '--prompt', 'in']) == 2
    assert SHOWN in terminal.text()
  # argparse says what it does not know.
  assert main(['generate', '--prompt', 'in', f'--{NAME}']) == 2
  assert_harmless(terminal.text())
  assert terminal.text().count(SHOWN) == 3


def test_messages_in_a_file_are_harmless_too(capsys):
  progress.say(f'{NAME}\n\tü')
  assert capsys.readouterr().err == f'specdec: {SHOWN}\n\tü\n'


def test_progress(on_terminal):
  terminal = on_terminal()
  name = f'[/red]{NAME}'
  with progress.waiting(name):
    pass
  with progress.bar(name, 1) as bar:
    bar.advance(1)
    time.sleep(0.2)
  assert f'[/red]{SHOWN}' in terminal.text()
  assert_harmless(terminal.text())
