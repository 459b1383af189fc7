"""How a gamma is measured on a few rows."""

import dataclasses

import numpy as np
import pytest

from specdec_jax.decoding import statistics
from specdec_jax.measure import gamma_search
from specdec_jax.measure.gamma_search import Measurement

GAMMAS = (0, 2, 5, 11)


def measurement(fill_seconds, loop_seconds, num_runs, gamma=3):
  counts = statistics.init(2, gamma)
  counts = dataclasses.replace(
    counts,
    num_tokens=np.array([6, 9]),
    num_target_runs=np.array(num_runs),
  )
  return Measurement(
    gamma=gamma,
    statistics=counts,
    num_iterations=max(num_runs),
    fill_seconds=fill_seconds,
    loop_seconds=loop_seconds,
  )


def test_gammas_are_measured_there_and_back():
  order = []

  def decode(gamma):
    order.append(gamma)
    return [measurement(0.0, 1.0, [6, 9], gamma)]

  choice = gamma_search.choose(GAMMAS, decode, batch_size=2, waits=True)
  assert order == [0, 2, 5, 11, 11, 5, 2, 0]
  assert set(choice.tokens_per_second) == {'0', '2', '5', '11'}


def test_the_fastest_gamma_is_chosen():
  """Drafts of two tokens, all accepted, in iterations that take as long."""

  def decode(gamma):
    runs = [6, 9] if gamma == 0 else [2, 3]
    found = measurement(0.0, 0.1 * max(runs), runs, gamma)
    counts = dataclasses.replace(
      found.statistics,
      num_tested=np.tile(np.array(runs)[:, None], (1, gamma)),
      num_accepted=np.tile(np.array(runs)[:, None], (1, gamma)),
    )
    return [dataclasses.replace(found, statistics=counts)]

  choice = gamma_search.choose((0, 2), decode, batch_size=2, waits=True)
  assert choice.gamma == 2
  slow = lambda gamma: [
    dataclasses.replace(found, loop_seconds=10.0 if gamma else 0.1)
    for found in decode(gamma)
  ]
  choice = gamma_search.choose((0, 2), slow, batch_size=2, waits=True)
  assert choice.gamma == 0


def test_all_measurements_of_a_gamma_count():
  found = [measurement(3.0, 8.0, [2, 4]), measurement(1.0, 15.5, [3, 5])]
  trial = gamma_search.trial(found, waits=True)
  assert (trial.fill_seconds, trial.iteration_seconds) == (1.0, 23.5 / 9)
  # Two measurements are equally far from what both say together.
  distance = abs(8.0 - 4 * 23.5 / 9)
  assert trial.iteration_error == pytest.approx(2 * distance / 23.5)
  assert gamma_search.trial(found[:1], waits=True).iteration_error == 0
  assert trial.utilisation == (2 + 4 + 3 + 5) / (2 * 4 + 2 * 5)
  assert trial.num_runs.tolist() == [2, 4, 3, 5]
  assert trial.num_accepted.shape == (4, 3)
  assert gamma_search.trial(found, waits=False).utilisation == 1.0
