"""Rates of counts, and how far rows let them be trusted."""

import numpy as np
import pytest

from specdec_jax.theory import estimates


def test_rates_have_their_own_denominators_and_none_of_nothing():
  assert estimates.quotient(np.int32(8), np.int32(3)) == 8 / 3
  assert estimates.quotient(0, 0) is None


def test_intervals_are_of_rows():
  """A ratio's interval covers its mean; that of a paired difference is narrower
  than those of its parts."""
  rng = np.random.default_rng(0)
  means, covered, widths = [], 0, []
  for _ in range(400):
    counts = rng.integers(5, 30, 60)
    easy = rng.uniform(0.3, 0.9, 60)  # A row's tokens have much in common.
    sums = rng.binomial(counts, easy)
    value, (low, high) = estimates.ratio(sums, counts)
    covered += low <= 0.6 <= high
    better = np.minimum(sums + 1, counts)
    _, (lower, upper) = estimates.ratio(better - sums, counts)
    means.append(value)
    widths.append((upper - lower) / (high - low))
  assert np.mean(means) == pytest.approx(0.6, abs=0.01)
  assert 0.91 < covered / 400 < 0.98
  assert np.mean(widths) < 0.3


def test_one_row_has_no_interval_and_none_no_ratio():
  one = np.ones(1)
  assert estimates.ratio(0.5 * one, one) == (0.5, None)
  with pytest.raises(ValueError, match=r'counted.*3 rows'):
    estimates.ratio(np.zeros(3), np.zeros(3))
