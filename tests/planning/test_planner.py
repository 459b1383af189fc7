"""From acceptance and costs to a gamma."""

import dataclasses

import numpy as np
import pytest

from specdec_jax import theory
from specdec_jax.planning import planner
from specdec_jax.theory.costs import Costs


def costs(*, c=0.05, slope=0.0, loop=0.0, widths=(1, 7, 13)):
  """A plain step is 1, and every further position costs `slope`."""
  return Costs(
    widths=widths,
    target_seconds=[1 + slope * (width - 1) for width in widths],
    first_draft_seconds=c,
    draft_seconds=c,
    loop_seconds=loop,
    c_hat=0.1,
  )


@pytest.mark.parametrize('alpha', [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize('c', [0.01, 0.1, 0.3])
def test_with_the_paper_s_assumptions_it_is_the_paper_s_theorem(alpha, c):
  plan = planner.plan(alpha, costs(c=c))
  for choice in plan.choices:
    gamma = choice.gamma
    assert choice.speedup == pytest.approx(
      theory.walltime_improvement(alpha, gamma, c)
    )
    assert choice.operations_factor == pytest.approx(
      theory.operations_factor(alpha, gamma, 0.1)
    )
  assert plan.best.gamma == theory.best_gamma(alpha, c, max_gamma=12)


@pytest.mark.parametrize('seed', range(20))
def test_no_gamma_gains_more_than_the_oracle(seed):
  rng = np.random.default_rng(seed)
  profile = rng.uniform(0, 1, 8)
  parts = Costs(
    widths=(1, 5, 9),
    target_seconds=rng.uniform(0.8, 2, 3),
    first_draft_seconds=rng.uniform(0, 0.5),
    draft_seconds=rng.uniform(0, 0.5),
    loop_seconds=rng.uniform(0, 0.1),
    launch_seconds=rng.uniform(0, 3),
    plain_launch_seconds=rng.uniform(0, 3),
  )
  plan = planner.plan(profile, parts, length=40, batch_size=1 + seed % 3)
  bound = planner.oracle_speedup(profile, parts, 40)
  assert bound >= plan.best.speedup - 1e-12
  assert planner.oracle_speedup(0.7, costs(c=0.1)) == pytest.approx(
    1 / (1 - 0.7 + 0.7 * 0.1)
  )
  assert planner.oracle_speedup([0.9, 1.0], costs(c=0.25)) == 4
  assert planner.oracle_speedup([0.9, 0.0], costs(c=1.5)) == 1


def test_the_first_drafted_token_has_its_own_cost():
  parts = Costs(
    widths=(1, 3),
    target_seconds=(2.0, 3.0),
    first_draft_seconds=0.5,
    draft_seconds=0.2,
    loop_seconds=0.1,
  )
  assert parts.c(1) == pytest.approx(0.25)
  assert parts.c(2) == pytest.approx((0.5 + 0.2) / 2 / 2.0)
  assert parts.verify_cost_ratio(1) == pytest.approx(1.25)
  assert parts.iteration_seconds(0) == 2.0
  assert parts.iteration_seconds(2) == pytest.approx(0.5 + 0.2 + 3.0 + 0.1)


def test_launching_a_decode_weighs_on_short_texts():
  parts = costs(c=0.05)
  dear = dataclasses.replace(
    parts, launch_seconds=3.0, plain_launch_seconds=1.0
  )
  assert dear.decode_seconds(0, 10) == 11
  assert dear.decode_seconds(4, 10) == pytest.approx(10 * 1.2 + 3)
  free = planner.plan(0.8, parts).choices[4].speedup
  for length in (8, 64, 512):
    choices = planner.plan(0.8, dear, length=length).choices
    assert choices[0].speedup == 1
    # As many plain steps are two dearer.
    assert choices[4].speedup == pytest.approx(
      (length + 1) / (length / free + 3)
    )


def test_a_rate_a_position():
  profile = [0.9, 0.5, 0.2, 0.1]
  plan = planner.plan(profile, costs(), max_gamma=4)
  for choice in plan.choices:
    assert choice.expected_tokens == pytest.approx(
      theory.expected_tokens_of_profile(profile[: choice.gamma])
    )
  assert planner.plan(profile, costs(c=0), max_gamma=4).best.gamma == 4
  with pytest.raises(ValueError, match=r'4 rates.*gamma 5'):
    planner.plan(profile, costs(), max_gamma=5)


def test_nothing_is_planned_beyond_the_measured_widths():
  """T(w) = w: no draft is worth its scoring, however long."""
  parts = costs(slope=1.0, widths=(1, 3, 5))
  assert parts.max_gamma == 4
  assert parts.verify_cost_ratio(4) == 5
  message = 'T\\(13\\) is not known: .* were measured up to T\\(5\\), gamma 4'
  for ask in (
    parts.verify_cost_ratio,
    parts.iteration_seconds,
    lambda gamma: parts.decode_seconds(gamma, 10),
    lambda gamma: planner.plan(0.9, parts, max_gamma=gamma),
  ):
    with pytest.raises(ValueError, match=message):
      ask(12)
  plan = planner.plan(0.9, parts)
  assert [choice.gamma for choice in plan.choices] == [0, 1, 2, 3, 4]
  assert plan.best.gamma == 0
  with pytest.raises(ValueError, match=r'gamma.*got 0'):
    parts.c(0)


def test_dearer_scoring_and_the_loop_lower_gamma():
  gammas = [
    planner.plan(0.8, costs(slope=slope, loop=loop)).best.gamma
    for slope, loop in ((0, 0), (0.05, 0), (0.2, 0))
  ]
  assert gammas == sorted(gammas, reverse=True)
  assert len(set(gammas)) == 3
  free, dear = (planner.plan(0.8, costs(loop=loop)).best for loop in (0, 0.5))
  assert dear.speedup < free.speedup
  assert dear.gamma >= free.gamma  # A dear loop is entered less often.


def test_break_even_alpha_neither_gains_nor_loses():
  dear = costs(c=0.2, slope=0.05)
  for choice in planner.plan(0.5, dear).choices[1:]:
    at = planner.plan(choice.break_even_alpha, dear).choices[choice.gamma]
    assert at.speedup == pytest.approx(1, abs=1e-6)
  assert planner.plan(0.5, costs(c=1.5)).choices[3].break_even_alpha is None


@pytest.mark.parametrize('batch_size', [1, 2, 8])
def test_iterations_until_the_slowest_row_is_done(batch_size):
  """Against decodes of 20,000 batches, within four deviations."""
  profile, length = np.array([0.8, 0.6, 0.7]), 20
  rng = np.random.default_rng(0)
  shape = (20_000, batch_size)
  left, iterations = np.full(shape, length), np.zeros(shape, int)
  while (left > 0).any():
    passed = rng.random((*shape, 3)) < profile
    iterations += left > 0
    left = left - 1 - passed.cumprod(-1).sum(-1)
  slowest = iterations.max(1)
  found = planner.expected_iterations(profile, length, batch_size)
  assert abs(found - slowest.mean()) < 4 * slowest.std() / np.sqrt(20_000)


def test_iterations_at_the_extremes():
  assert planner.expected_iterations([], 7, 3) == pytest.approx(7)
  assert planner.expected_iterations([0.0, 0.0], 7, 3) == pytest.approx(7)
  assert planner.expected_iterations([1.0, 1.0], 7, 3) == pytest.approx(3)


def test_rows_that_wait_cost_speed():
  one, many = (planner.plan(0.7, costs(), batch_size=b) for b in (1, 64))
  assert one.best.row_utilisation == 1
  assert many.best.row_utilisation < 0.9
  assert many.best.speedup < one.best.speedup
  assert any('64 rows' in sentence for sentence in many.sentences)


@pytest.mark.parametrize(
  ('alpha', 'settings', 'batch_size', 'words'),
  [
    (0.1, {'c': 0.5}, 1, 'only 10% of the target runs accept'),
    (0.6, {'c': 0.8}, 1, 'drafting 1 token costs 0.80 plain steps'),
    (0.6, {'slope': 0.9}, 8, 'scoring 2 positions of 8 rows costs 1.90'),
    (0.6, {'loop': 3.0}, 1, 'the loop itself costs 3.00 plain steps'),
  ],
)
def test_it_says_where_speculation_loses_and_why(
  alpha, settings, batch_size, words
):
  plan = planner.plan(alpha, costs(**settings), batch_size=batch_size)
  assert plan.best.gamma == 0
  assert 'Speculation loses here' in plan.sentences[0]
  assert words in plan.sentences[0]
  assert 'stops losing from alpha' in plan.sentences[1]


def test_some_acceptance_rate_makes_the_best_gamma_pay():
  """At the rate here gamma 1 loses least, and no rate would make it gain."""
  dear = costs(c=0.01, loop=2.5)
  sentence = planner.plan(0.1, dear).sentences[1]
  needed = planner.plan(0.1, dear).choices[12].break_even_alpha
  assert f'gamma 12 it stops losing from alpha {needed:.2f}' in sentence
  (*_, sentence) = planner.plan(0.1, costs(c=1.5)).sentences
  assert 'No acceptance rate' in sentence


def test_a_gain_within_the_margin_is_neither_gain_nor_loss():
  plan = planner.plan(0.5, costs(c=0.49))
  assert plan.best.gamma == 1
  (sentence,) = plan.sentences
  assert 'neither gains nor loses' in sentence


def test_it_says_where_it_gains_and_from_where_it_loses():
  plan = planner.plan(0.6, costs(c=0.3))
  losing = [each.gamma for each in plan.choices[1:] if each.speedup < 1]
  assert plan.sentences[0].startswith(f'Take gamma {plan.best.gamma}: ')
  assert f'at gamma {losing[0]} it loses' in plan.sentences[1]
  whole = planner.plan(0.95, costs(c=0.01))
  assert 'is the largest considered' in whole.sentences[1]


def test_an_interval_of_alpha_is_an_interval_of_gamma():
  (*_, wide) = planner.plan(0.7, costs(), interval=(0.5, 0.9)).sentences
  low, high = (planner.plan(a, costs()).best for a in (0.5, 0.9))
  assert f'between {low.gamma} and {high.gamma}' in wide
  (*_, narrow) = planner.plan(0.7, costs(), interval=(0.7, 0.701)).sentences
  assert 'throughout' in narrow


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'widths': (2, 3)}, 'widths must ascend'),
    ({'widths': (1, 3, 3)}, 'widths must ascend'),
    ({'c': -0.1}, 'first_draft_seconds'),
    ({'slope': -0.5}, 'target.*above 0'),
  ],
)
def test_bad_costs_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    costs(**change)


@pytest.mark.parametrize(
  ('seconds', 'message'),
  [([1, np.nan, 2], 'above 0, got nan'), ([], 'target_seconds needs')],
)
def test_bad_times_are_refused_wherever_they_stand(seconds, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(costs(), target_seconds=seconds)


def test_intervals_are_of_what_is_drafted():
  """A drafter that mostly has no guess: alpha 0.8 is of its guesses alone."""
  mostly_none = [0.36, 0.8, *[0.88] * 10]
  found = planner.plan(
    mostly_none, costs(slope=0.1), interval=(0.75, 0.85), mean=0.8
  )
  ends = [
    planner.plan([0.36 * x, 0.8 * x, *[0.88 * x] * 10], costs(slope=0.1))
    for x in (0.75 / 0.8, 0.85 / 0.8)
  ]
  low, high = (end.best.speedup for end in ends)
  assert low < found.best.speedup < high
  assert f'between {low:.2f} and {high:.2f}' in found.sentences[-1]


def test_runs_without_a_draft_cost_a_plain_step():
  dear = costs(c=0.0, slope=0.5)
  half = dataclasses.replace(dear, undrafted=0.5)
  # T(5) is 3: half of the runs cost that, the others 1.
  assert dear.iteration_seconds(4) == pytest.approx(3)
  assert half.iteration_seconds(4) == pytest.approx(2)
  assert half.iteration_seconds(0) == 1
