"""The gamma that trials choose."""

import dataclasses

import numpy as np
import pytest

from specdec_jax.measure import gamma_trials
from specdec_jax.measure.gamma_trials import Trial
from tests import slow

GAMMAS = (0, 2, 5, 11)


def trial(alpha, gamma, seconds, num_rows=40, num_tokens=600, seed=0, **more):
  """Rows of about `num_tokens` tokens, each accepted with chance `alpha`; they
  end where a token was not, and so do iterations."""
  rng = np.random.default_rng(seed)
  runs, tested, accepted, tokens = [], [], [], []
  for _ in range(num_rows):
    right = np.append(rng.random(num_tokens) < alpha, False)
    place, counts = 0, np.zeros((2, gamma), int)
    num_runs = 0
    while place < right.size:
      block = right[place : place + gamma]
      passed = int(np.append(block, False).argmin())
      counts[0, : min(passed + 1, gamma)] += 1
      counts[1, :passed] += 1
      place += passed + 1
      num_runs += 1
    runs.append(num_runs)
    tested.append(counts[0])
    accepted.append(counts[1])
    tokens.append(right.size)
  return Trial(
    gamma=gamma,
    num_tokens=np.array(tokens),
    num_runs=np.array(runs),
    num_tested=np.array(tested).reshape(num_rows, gamma),
    num_accepted=np.array(accepted).reshape(num_rows, gamma),
    **{'fill_seconds': 0.0, 'iteration_seconds': seconds} | more,
  )


@slow.parametrize('alpha', [0.0, 0.4, 0.8, 0.97], now=[0.8])
def test_long_drafts_say_what_shorter_ones_need(alpha):
  longest = trial(alpha, 11, 1.0)
  for gamma in (0, 1, 2, 3, 5, 11):
    expected = trial(alpha, gamma, 1.0).num_runs
    np.testing.assert_array_equal(
      gamma_trials.runs_with(longest, gamma), expected
    )
  for gamma in (4, 7, 8, 10):
    found = gamma_trials.runs_with(longest, gamma).sum()
    expected = trial(alpha, gamma, 1.0).num_runs.sum()
    assert found == pytest.approx(expected, rel=0.03), gamma


def choose(alphas, seconds, batch_size=1, **more):
  trials = [
    trial(alpha, gamma, each, seed=i, **more)
    for i, (gamma, alpha, each) in enumerate(
      zip(GAMMAS, alphas, seconds, strict=True)
    )
  ]
  return gamma_trials.choose(trials, batch_size)


def test_the_best_gamma_need_not_be_one_that_was_tried():
  """At alpha 0.8, with iterations of 1.1 + 0.05 gamma plain steps."""
  cost = lambda gamma: 1.1 + 0.05 * gamma if gamma else 1.0
  speed = lambda gamma: (1 - 0.8 ** (gamma + 1)) / 0.2 / cost(gamma)
  found = choose([0.8] * 4, [cost(gamma) for gamma in GAMMAS])
  best = max(range(12), key=speed)
  assert best not in GAMMAS
  assert abs(found.gamma - best) <= 1
  assert found.alpha == pytest.approx(0.8, abs=0.01)
  assert found.tokens_per_second['5'] == pytest.approx(speed(5), rel=0.03)
  assert found.tokens_per_second['0'] == 1.0
  parts = f'gamma auto is {found.gamma}: plain 1.0, ', ' in 160 rows; alpha 0.8'
  assert all(part in found.sentence for part in parts)


def test_what_was_tried_is_taken_where_others_are_hardly_faster():
  """Gamma 4 would be 1% faster than gamma 5."""
  pace = lambda gamma: (1 - 0.6 ** (gamma + 1)) / 0.4
  seconds = {0: 1.0, 2: pace(2) / 1.4, 5: pace(5) / 1.5, 11: pace(11)}
  between = seconds[2] + (seconds[5] - seconds[2]) * 2 / 3
  assert 1.0 < pace(4) / between / 1.5 < 1.02
  assert choose([0.6] * 4, list(seconds.values())).gamma == 5


@pytest.mark.parametrize('speedup', [0.6, 1.0, 1.01, 1.035])
def test_plain_decoding_unless_drafts_gain_by_a_margin(speedup):
  """Of the best gamma, with 0.1 plain steps per drafted token."""
  tokens = lambda gamma: (1 - 0.5 ** (gamma + 1)) / 0.5
  first = max(tokens(gamma) / speedup - 0.1 * gamma for gamma in range(1, 12))
  seconds = [first + 0.1 * gamma for gamma in GAMMAS[1:]]
  found = choose([0.5] * 4, [1.0, *seconds])
  assert (found.gamma == 0) == (speedup < 1.03)
  if speedup < 1.03:
    assert 'no gamma is faster than plain by 2%' in found.sentence


@pytest.mark.parametrize(
  ('alphas', 'gamma'), [((0.6, 0.6), 5), ((0.95, 0.1), 0)], ids=str
)
def test_a_gain_that_other_texts_might_not_have_is_none(alphas, gamma):
  """Gamma 5 gains 7%, in rows that are alike or that are not."""
  seconds, trials = [1.0, 10.0, 1.0, 10.0], []
  for tried, each in zip(GAMMAS, seconds, strict=True):
    halves = [trial(alpha, tried, each, num_rows=4) for alpha in alphas]
    rows = {
      name: np.concatenate([getattr(half, name) for half in halves])
      for name in ('num_tokens', 'num_runs', 'num_tested', 'num_accepted')
    }
    trials.append(dataclasses.replace(halves[0], **rows))
  pace = trials[2].num_tokens.sum() / trials[2].num_runs.sum()
  trials[2] = dataclasses.replace(trials[2], iteration_seconds=pace / 1.07)
  found = gamma_trials.choose(trials, 1)
  assert found.tokens_per_second['5'] == pytest.approx(1.07)
  assert found.gamma == gamma
  assert ('with the errors of so few rows' in found.sentence) == (not gamma)


@pytest.mark.parametrize(('error', 'gamma'), [(0.04, 5), (0.1, 0)])
def test_a_gain_less_than_the_error_of_the_times_is_none(error, gamma):
  pace = (1 - 0.6**6) / 0.4
  seconds = [1.0, 10.0, pace / 1.1, 10.0]
  found = choose([0.6] * 4, seconds, iteration_error=error)
  assert found.gamma == gamma


def test_what_is_tried_speaks_for_itself_where_the_longest_drafts_mislead():
  """As with drafts that are worse the longer they are. The promise of gamma 11
  for gamma 2 would be one token a run."""
  found = choose([0.0, 0.9, 0.9, 0.05], [1.0, 1.2, 1.8, 2.0])
  assert found.gamma == 5
  assert 'plain 1.0' in found.sentence


def test_few_rows_are_compared_on_the_texts_of_the_longest_drafts():
  """A text of which all is accepted at gamma 5, alone: it is no merit of 5."""
  found = choose(
    [0.0, 0.6, 0.97, 0.6], [1.0, 1.2, 2.5, 4.0], num_rows=1, num_tokens=200
  )
  assert found.tokens_per_second['5'] > found.tokens_per_second['2']
  assert found.gamma == 2


def test_prefills_and_idle_rows_count():
  """At alpha 0.8 of a free drafter; but its prefill takes as long as a text, or
  only half of the rows have work."""
  seconds = [1.0, 1.0, 1.0, 1.0]
  assert choose([0.8] * 4, seconds).gamma == 11
  trials = [trial(0.8, gamma, 1.0, seed=gamma) for gamma in (0, 5)]
  for changed in ({'fill_seconds': 601.0}, {'utilisation': 0.2}):
    slow = trial(0.8, 5, 1.0, seed=5, **changed)
    assert gamma_trials.choose([trials[0], slow], 4).gamma == 0, changed
  assert gamma_trials.choose(trials, 4).gamma == 5
