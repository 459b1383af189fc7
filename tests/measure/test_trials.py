"""What the first rows of a run try, and what they show."""

import dataclasses

import numpy as np
import pytest

from specdec_jax.decoding import statistics
from specdec_jax.measure import trials
from specdec_jax.measure.trials import Visit
from specdec_jax.theory.gamma_trials import ChosenGamma

GAMMAS = (0, 2, 5, 11)


def test_all_gammas_the_middle_one_or_none_is_tried():
  """As many as so many more turns are worth, there and back again."""
  for num_left, tried in ((10**6, GAMMAS), (500, (0, 5)), (100, (0,))):
    used = []

    def decode(gamma, used=used):
      used.append(gamma)
      return [visit(0.0, 1.0, [6, 9], gamma)]

    found = trials.choose(
      GAMMAS,
      decode,
      batch_size=2,
      waits=True,
      is_worth=lambda num_turns, num_left=num_left: num_turns <= num_left,
    )
    assert found.turns == used
    if len(tried) > 1:
      assert used == [*tried, *reversed(tried)]
      assert len(used) == trials.num_turns(tried)
      assert set(found.tokens_per_second) == {str(each) for each in tried}
    else:
      assert used == [0]
      assert (found.gamma, found.tokens_per_second) == (0, {})
      assert 'too short' in found.sentence


def test_compiling_has_to_be_worth_it():
  """A turn of a second, of a run whose plain program took three: that of the
  drafts may take eighteen, which is 2% of 900 seconds."""
  asked = []
  first = visit(0.0, 1.0, [6, 9], 0)
  for seconds in (0.0, 3.0):
    first = dataclasses.replace(first, compile_seconds=seconds)
    trials.choose(
      GAMMAS[:2],
      lambda gamma, first=first: [first],
      batch_size=2,
      waits=True,
      is_worth=lambda num_turns: asked.append(num_turns),
    )
  # All of one gamma is the one in the middle, too.
  assert asked[0] == asked[1] == 200
  assert asked[2] - asked[0] == 900


def test_what_an_earlier_run_chose_holds_unless_texts_speak_against_it():
  known = ChosenGamma(gamma=3, sentence='it pays', break_even=1.2)
  # 15 tokens in 12 target runs, and in 13.
  for runs, gamma in (([4, 8], 3), ([4, 9], 0)):
    used = []

    def decode(gamma, used=used, runs=runs):
      used.append(gamma)
      return [visit(0.0, 1.0, runs)]

    found = trials.choose(GAMMAS, decode, batch_size=2, waits=True, known=known)
    assert used == list(found.turns) == [3]
    assert found.gamma == gamma
  assert 'has to give 1.20' in found.sentence


def visit(fill_seconds, loop_seconds, num_runs, gamma=3):
  counts = statistics.init(2, gamma)
  counts = dataclasses.replace(
    counts,
    num_tokens=np.array([6, 9]),
    num_target_runs=np.array(num_runs),
  )
  return Visit(
    gamma=gamma,
    statistics=counts,
    num_iterations=max(num_runs),
    fill_seconds=fill_seconds,
    loop_seconds=loop_seconds,
  )


def test_all_visits_of_a_gamma_count():
  visits = [visit(3.0, 8.0, [2, 4]), visit(1.0, 15.5, [3, 5])]
  found = trials.trial(visits, waits=True)
  assert (found.fill_seconds, found.iteration_seconds) == (1.0, 23.5 / 9)
  # Two visits are equally far from what both say together.
  far = abs(8.0 - 4 * 23.5 / 9)
  assert found.iteration_error == pytest.approx(2 * far / 23.5)
  assert trials.trial(visits[:1], waits=True).iteration_error == 0
  assert found.utilisation == (2 + 4 + 3 + 5) / (2 * 4 + 2 * 5)
  assert found.num_runs.tolist() == [2, 4, 3, 5]
  assert found.num_accepted.shape == (4, 3)
  assert trials.trial(visits, waits=False).utilisation == 1.0
