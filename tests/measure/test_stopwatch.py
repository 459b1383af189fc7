"""Turns, threads, and which dtype and which device this is."""

import functools
import threading

import numpy as np
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


@pytest.mark.parametrize('quickest', ['float32', 'bfloat16'])
def test_the_quickest_dtype_is_that_of_the_least_median(monkeypatch, quickest):
  made = {}

  def alternate(programs, repeats):
    made.update({name: program() for name, program in programs.items()})
    # Held up once, so that its mean is the larger one.
    held_up = np.array([1.0] * (repeats - 1) + [100.0])
    others = np.full(repeats, 2.0)
    return {
      name: held_up if name == quickest else others for name in programs
    }, made

  monkeypatch.setattr(stopwatch, 'alternate', alternate)
  assert stopwatch.quickest_dtype(['float32', 'bfloat16']) == quickest
  # Products by the identity, in each of them.
  for name, product in made.items():
    assert product.dtype == name
    np.testing.assert_array_equal(product, np.ones((5, 1024), product.dtype))


def test_one_dtype_is_not_timed(monkeypatch):
  monkeypatch.setattr(stopwatch, 'alternate', None)
  assert stopwatch.quickest_dtype(['bfloat16']) == 'bfloat16'


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
