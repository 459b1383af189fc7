"""`specdec chat`, piped."""

import io
import sys

import pytest

pytest.importorskip('jinja2')

from specdec_jax.launch import progress
from tests.cli import tiny

OPTIONS = '--drafter', 'prompt_lookup', '--gamma', '2', '--max_new_tokens', '8'


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp('chat') / 'tiny'
  return tiny.write_model(path, max_positions=512)


@pytest.fixture
def say(monkeypatch, capfd, folder):
  def say(text: str, *flags: str):
    monkeypatch.setattr(sys, 'stdin', io.StringIO(text))
    return tiny.run(capfd, 'chat', '--model', folder, *OPTIONS, *flags)

  return say


def test_each_line_is_a_message(say):
  result = say('ab\n\nab\n/reset\nab\n/quit\nin\n')
  assert result.status == 0, result.err
  # An empty line between answers, each of which may have several lines.
  first, second, again = result.out.removesuffix('\n').split('\n\n')
  assert first == again != second
  shown = say('ab\n', '--verdicts', '--color', 'never')
  assert shown.out.splitlines() == [first]


def test_a_full_context_is_said(say):
  result = say('in the ab ' * 200)
  assert result.status == 2
  assert 'context' in result.err


def test_how_an_answer_ended_is_said(say, monkeypatch):
  monkeypatch.setattr(progress, 'is_watched', lambda: True)
  result = say('ab\n')
  assert 'the answer ended at the token limit, after 8 tokens' in result.err
  result = say('ab\n', '--stop', result.out[2:4])
  assert 'the answer' not in result.err
