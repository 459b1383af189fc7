"""Rates of counters that can be divided by hand."""

import jax
import numpy as np
import pytest

from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding import statistics


def _counters() -> statistics.Statistics:
  return statistics.Statistics(
    num_tokens=np.array([12, 4]),
    num_target_runs=np.array([6, 2]),
    num_short_runs=np.array([1, 0]),
    num_drafted=np.array([15, 6]),
    num_tested=np.array([[5, 3], [2, 1]]),
    num_accepted=np.array([[3, 2], [1, 1]]),
    accept_prob=np.array([4.4, 2.2]),
  )


def test_rates_have_the_denominators_that_they_name():
  rates = metrics.rates(_counters())
  assert rates.alpha == pytest.approx(7 / 11)
  assert rates.acceptance_per_drafted == pytest.approx(7 / 21)
  assert rates.block_efficiency == pytest.approx(16 / 8)
  assert rates.mean_accept_prob == pytest.approx(6.6 / 11)
  assert rates.row_utilisation == pytest.approx(8 / 12)


def test_there_are_no_rates_of_nothing():
  empty = jax.tree.map(np.asarray, statistics.init(2, 3))
  assert set(metrics.rates(empty)) == {None}


def test_the_summary_of_a_row_is_its_own():
  summary = metrics.row_summary(_counters(), 1)
  assert (summary['tokens'], summary['tested'], summary['accepted']) == (
    4,
    3,
    2,
  )
  assert summary['alpha'] == pytest.approx(2 / 3)
  assert summary['acceptance_per_drafted'] == pytest.approx(2 / 6)
  assert summary['block_efficiency'] == pytest.approx(4 / 2)
