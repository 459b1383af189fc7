"""How many experts a block of tokens touches."""

import numpy as np
import pytest

from specdec_jax.theory.experts import expected_distinct, expected_most


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


@pytest.mark.parametrize('num_tokens', [1, 5, 40])
def test_the_busiest_device_has_more_than_its_share(num_tokens):
  """Within 4% of draws in which a token's experts exclude each other."""
  rng = np.random.default_rng(1)
  counts = []
  for _ in range(2000):
    is_chosen = np.zeros(32, bool)
    for _ in range(num_tokens):
      is_chosen[rng.permutation(32)[:4]] = True
    counts.append(is_chosen.reshape(4, 8).sum(axis=1).max())
  expected = expected_most(32, 4, num_tokens, 4)
  assert expected == pytest.approx(np.mean(counts), rel=0.04)
  assert expected > expected_distinct(32, 4, num_tokens) / 4


def test_one_device_has_all_and_many_tokens_touch_all_of_each():
  assert expected_most(32, 4, 3, 1) == pytest.approx(
    expected_distinct(32, 4, 3)
  )
  assert expected_most(128, 8, 10_000, 4) == pytest.approx(32)
  with pytest.raises(ValueError, match='num_devices 3 must divide'):
    expected_most(32, 4, 3, 3)
