"""What is said while a command works, where there is no terminal."""

import re
import time

import pytest

from specdec_jax.launch import progress


def said(capsys) -> str:
  """What is on standard error as soon as anything is."""
  deadline = time.monotonic() + 30
  while not (found := capsys.readouterr().err):
    assert time.monotonic() < deadline
    time.sleep(0.001)
  return found


@pytest.fixture
def _often(monkeypatch):
  monkeypatch.setenv('SPECDEC_PROGRESS', '0.01')


@pytest.mark.usefixtures('_often')
def test_a_bar_tells_the_time_that_is_left(capsys):
  with progress.bar('timing', 4) as bar:
    assert said(capsys).startswith('specdec: timing: 0 of 4\n')
    bar.advance(1)
    time.sleep(0.02)
    bar.advance(1)
    lines = said(capsys) + said(capsys)
  assert re.search(r'specdec: timing: 2 of 4, \d+:\d\d:\d\d left\n', lines)
  capsys.readouterr()
  time.sleep(0.05)
  assert capsys.readouterr().err == ''


@pytest.mark.usefixtures('_often')
def test_waiting_tells_how_long(capsys):
  with progress.waiting('compiling'):
    assert said(capsys).startswith('specdec: compiling ... 0 s\n')


def test_zero_is_silence(capsys, monkeypatch):
  monkeypatch.setenv('SPECDEC_PROGRESS', '0')
  with progress.bar('timing', 4), progress.waiting('compiling'):
    time.sleep(0.05)
  assert capsys.readouterr().err == ''


@pytest.mark.parametrize('seconds', ['soon', '-1', 'nan', 'inf'])
def test_what_is_no_number_of_seconds_is_refused(monkeypatch, seconds):
  monkeypatch.setenv('SPECDEC_PROGRESS', seconds)
  is_refused = pytest.raises(ValueError, match='SPECDEC_PROGRESS')
  with is_refused, progress.waiting('compiling'):
    pass
