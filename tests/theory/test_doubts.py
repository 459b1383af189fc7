"""Times that cannot be, and machines that are busy."""

import os

import pytest

from specdec_jax.theory import doubts

_QUIET = {'plain': [1.0, 1.05], 'speculative': [0.9, 0.9]}
# An iteration of 4 + 1 + 2 * 0.9 ms with three drafted tokens, as it can be.
_COSTS = {
  'widths': [1, 2, 4],
  'target_seconds': [3e-3, 3.5e-3, 4e-3],
  'extend_seconds': 3.8e-3,
  'first_draft_seconds': 1e-3,
  'draft_seconds': 0.9e-3,
  'iteration_seconds': 6.9e-3,
  'c_hat': 0.2,
}


def test_speeds_that_cannot_be_are_doubted():
  def found(turns=_QUIET, **changes):
    sound = {'verify_cost_ratio': 1.2, 'speedup': 1.4, 'most_speedup': 1.4}
    return doubts.of_speeds(sound | changes | {'turn_seconds': turns})

  assert found() == []
  [told] = found(verify_cost_ratio=0.69)
  assert '0.69 of a plain step' in told
  [told] = found(speedup=1.81, most_speedup=1.44)
  assert 'exceeds the 1.44' in told
  [told] = found(_QUIET | {'plain': [1.0, 1.0, 1.3]})
  assert 'plain decoding took 1 to 1.3 s' in told


def test_one_slow_turn_of_a_short_decode_is_no_doubt():
  once, often = [1.0, 1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 2.0, 2.0, 2.0]
  assert doubts.of_turns({'plain': once}) != []
  assert doubts.of_turns({'plain': once}, is_short=True) == []
  [told] = doubts.of_turns({'plain': often}, is_short=True)
  assert 'took 1 to 2 s' in told


@pytest.mark.parametrize(
  ('changes', 'told'),
  [
    ({'extend_seconds': 5e-3}, 'the target call alone is timed at 5 ms'),
    ({'target_seconds': [5e-3, 4e-3, 4e-3]}, 'at 0.80 of a plain step'),
    ({'first_draft_seconds': 9e-6}, 'a drafted token is timed at 0.009 ms'),
    ({'draft_seconds': 9e-6}, 'a further drafted token is timed at 0.009 ms'),
    ({'draft_seconds': 5e-3}, 'timed at 15 ms together, and the iteration at'),
  ],
)
def test_costs_that_cannot_be_are_doubted(changes, told):
  assert doubts.of_costs(_COSTS, is_one_by_one=True) == []
  [found] = doubts.of_costs(_COSTS | changes, is_one_by_one=True)
  assert told in found
  assert found in doubts.sentence([found])


def test_costs_that_can_be_are_not():
  # All tokens of one pass come with the first, and copies cost next to nothing.
  assert doubts.of_costs(_COSTS | {'draft_seconds': 0.0}) == []
  copies = {'c_hat': 0.0, 'first_draft_seconds': 9e-6, 'draft_seconds': 0.0}
  assert doubts.of_costs(_COSTS | copies) == []
  assert doubts.sentence([]) == ''


def test_a_loaded_machine_is_doubted(monkeypatch):
  monkeypatch.setattr(os, 'cpu_count', lambda: 2)
  monkeypatch.setattr(os, 'getloadavg', lambda: (3.0, 0.0, 0.0))
  assert doubts.of_load() == []
  monkeypatch.setattr(os, 'getloadavg', lambda: (7.5, 0.0, 0.0))
  assert doubts.of_load() == ['the load is 7.5 on 2 cores']
