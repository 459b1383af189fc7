"""Which batches try what, and what they show."""

import dataclasses

import numpy as np
import pytest

from specdec_jax.decoding import statistics
from specdec_jax.measure import trials
from specdec_jax.measure.trials import Visit

GAMMAS = (0, 2, 5, 11)


@pytest.mark.parametrize(
  ('batch_size', 'num_batches', 'num_rounds'),
  [
    (1, 79, 0),
    (1, 80, 1),
    (1, 239, 2),
    (1, 10**6, 8),
    (4, 200, 2),
    (32, 120, 1),
  ],
)
def test_a_twentieth_of_the_batches_at_most(
  batch_size, num_batches, num_rounds
):
  found = trials.schedule(GAMMAS, batch_size, num_batches)
  assert len(found) == num_rounds * 4 <= num_batches / 20
  assert found[:8] == (0, 2, 5, 11, 11, 5, 2, 0)[: len(found)]
  needed = trials.num_batches_needed(GAMMAS, batch_size)
  seen = trials.schedule(GAMMAS, batch_size, min(needed, num_batches))
  assert seen == found
  if not found:
    choice = trials.too_short(GAMMAS, num_batches)
    assert choice.gamma == 0
    assert 'takes 80 batches, and there are 79' in choice.sentence


def visit(fill_seconds, loop_seconds, num_runs):
  counts = statistics.init(2, 3)
  counts = dataclasses.replace(
    counts,
    num_tokens=np.array([6, 9]),
    num_target_runs=np.array(num_runs),
  )
  return Visit(
    gamma=3,
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
