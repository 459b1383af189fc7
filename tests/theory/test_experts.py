"""How many experts a block of tokens touches."""

import numpy as np
import pytest

from specdec_jax.theory.experts import expected_distinct


def test_one_token_touches_what_it_chooses_and_many_touch_all():
  assert expected_distinct(128, 8, 1) == pytest.approx(8)
  assert expected_distinct(128, 8, 10_000) == pytest.approx(128)
  assert expected_distinct(6, 6, 3) == pytest.approx(6)


def test_the_mean_is_that_of_random_choices():
  rng = np.random.default_rng(0)
  counts = []
  for _ in range(2000):
    chosen = [rng.permutation(32)[:4] for _ in range(5)]
    counts.append(np.unique(chosen).size)
  error = np.std(counts) / np.sqrt(len(counts))
  assert expected_distinct(32, 4, 5) == pytest.approx(
    np.mean(counts), abs=4 * error
  )


@pytest.mark.parametrize('sizes', [(0, 1, 1), (4, 5, 1), (4, 2, 0)])
def test_numbers_that_cannot_be_are_refused(sizes):
  with pytest.raises(ValueError, match='num_'):
    expected_distinct(*sizes)
