"""Turns, threads, and which device this is."""

import functools
import threading

import pytest

from specdec_jax.measure import stopwatch


@pytest.mark.parametrize(
  ('warm_up', 'expected'), [(None, 'abab'), (['b'], 'bab'), ([], 'ab')]
)
def test_programs_take_turns_after_those_that_warm_up(warm_up, expected):
  order, num_done = [], []
  programs = {name: functools.partial(order.append, name) for name in 'ab'}
  seconds, results = stopwatch.alternate(
    programs, 1, num_done.append, warm_up=warm_up
  )
  assert ''.join(order) == expected
  assert sum(num_done) == len(expected)
  assert {name: s.size for name, s in seconds.items()} == {'a': 1, 'b': 1}
  assert results.keys() == programs.keys()


def test_what_is_made_together_runs_at_once_and_comes_in_order(monkeypatch):
  monkeypatch.setattr(stopwatch.os, 'cpu_count', lambda: 2)
  both = threading.Barrier(2, timeout=60)

  def make(value):
    both.wait()
    return value

  calls = {value: functools.partial(make, value) for value in 'abcd'}
  made = stopwatch.together(calls)
  assert list(made.items()) == list(zip('abcd', 'abcd', strict=True))


def test_an_error_of_what_is_made_together_is_not_lost():
  with pytest.raises(ZeroDivisionError):
    stopwatch.together({'a': lambda: 1, 'b': lambda: 1 // 0})


def test_a_cpu_is_named_with_its_cores(monkeypatch):
  monkeypatch.setattr(stopwatch.os, 'cpu_count', lambda: 7)
  monkeypatch.setattr(stopwatch.Path, 'is_file', lambda path: True)
  monkeypatch.setattr(
    stopwatch.Path,
    'read_text',
    lambda path: 'flags\t: fpu\nmodel name\t: Z 80\n',
  )
  assert stopwatch.device_name() == 'Z 80, 7 cores'
  monkeypatch.setattr(stopwatch.Path, 'is_file', lambda path: False)
  monkeypatch.setattr(stopwatch.platform, 'machine', lambda: 'x86_64')
  assert stopwatch.device_name() == 'x86_64 CPU, 7 cores'
