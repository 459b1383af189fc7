"""Turns, threads, and which device this is."""

import functools
import threading

import jax
import numpy as np
import pytest

from specdec_jax import drafters
from specdec_jax.base import Params
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.launch import platforms
from specdec_jax.measure import stopwatch
from specdec_jax.sampling import logits
from tests import toy


@pytest.mark.parametrize(
  ('warm_up', 'expected'), [(None, 'abab'), (['b'], 'bab'), ([], 'ab')]
)
def test_programs_take_turns_after_those_that_warm_up(warm_up, expected):
  order = []
  programs = {name: functools.partial(order.append, name) for name in 'ab'}
  seconds, results = stopwatch.alternate(programs, 1, warm_up=warm_up)
  assert ''.join(order) == expected
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


@pytest.mark.parametrize(
  ('cpuinfo', 'name'),
  [
    ('flags\t: fpu avx512f\nmodel name\t: Z 80\n', 'Z 80, 7 cores'),
    (
      'model name\t: Z 80\nflags\t: fpu avx2\n',
      'Z 80 without AVX-512, 7 cores',
    ),
    ('Features\t: fp asimd\n', 'arm64 CPU, 7 cores'),
    ('', 'arm64 CPU, 7 cores'),
  ],
)
def test_a_cpu_is_named_with_its_cores(cpuinfo, name, monkeypatch):
  monkeypatch.setattr(stopwatch.os, 'cpu_count', lambda: 7)
  monkeypatch.setattr(platforms, '_cpuinfo', lambda: cpuinfo)
  monkeypatch.setattr(platforms.platform, 'machine', lambda: 'arm64')
  assert platforms.device_name() == name


def test_what_a_program_does_once_is_no_part_of_a_draft():
  """Weights are converted once per decode, not once per iteration."""
  target, weights = toy.toy(5), toy.toy_params(5, seed=1)
  greedy = logits.standardize(temperature=0)
  drafter = drafters.autoregressive(target, gamma=2, logits_to_probs=greedy)
  params = Params(weights, weights)
  state = speculative.init(
    params,
    jax.random.key(0),
    toy.prompt([[1, 2, 3]]),
    method=Method(
      target=target, drafter=drafter, logits_to_probs=greedy, eos_id=-1
    ),
    max_len=12,
  )
  made = stopwatch.propose_programs(params, state, drafter, target)
  # By hand: 20 and 50 s at the start; a target call takes 2 s, a draft 0.5.
  seconds = []
  for i, program in enumerate(made):
    start, call = (20, 2.0) if i < len(made) / 2 else (50, 2.5)
    seconds.append(np.array([start + call * program.num_calls] * 3))
  assert stopwatch.propose_seconds(made, seconds) == pytest.approx(0.5)
