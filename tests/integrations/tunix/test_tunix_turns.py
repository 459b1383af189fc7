"""When rollouts of a training draft, with seconds that a clock would give."""

import pytest

from specdec_jax.integrations.tunix.turns import Turns


def run(num_calls, seconds_of, compiling=0.0):
  """Returns which calls drafted, and the seconds of all with compiling."""
  turns, drafted, spent = Turns(), [], 0.0
  for call in range(num_calls):
    drafts = turns.drafts_next()
    seconds = seconds_of(drafts, call)
    once = compiling if drafts not in drafted else 0.0
    turns.count(drafts, 100, seconds, once)
    drafted.append(drafts)
    spent += seconds + once
  return drafted, spent


@pytest.mark.parametrize('slowness', [1.05, 1.5, 3.0])
@pytest.mark.parametrize('num_calls', [1, 3, 30, 300, 3000])
def test_slower_drafts_cost_little(slowness, num_calls):
  seconds_of = lambda drafts, call: 10 * slowness if drafts else 10.0
  _, spent = run(num_calls, seconds_of, compiling=4)
  assert spent <= 1.03 * (10 * num_calls + 4)


def test_faster_drafts_are_found_and_kept():
  drafted, _ = run(400, lambda drafts, call: 5.0 if drafts else 10.0)
  first = drafted.index(True)
  assert 90 <= first <= 110
  assert sum(drafted[first:]) > 0.9 * len(drafted[first:])


def test_drafts_that_become_faster_are_found():
  seconds_of = lambda drafts, call: (
    10.0 if not drafts else 20.0 if call < 500 else 5.0
  )
  drafted, _ = run(1500, seconds_of)
  assert 1 <= sum(drafted[:500]) <= 11
  assert sum(drafted[1000:]) > 450
