"""How many experts of a layer a block of tokens touches."""

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax.theory.acceptance import above_zero


def expected_distinct(
  num_experts: ArrayLike, num_chosen: ArrayLike, num_tokens: ArrayLike
) -> np.ndarray:
  """Computes how many distinct experts some tokens choose, on average.

  Each token chooses `num_chosen` of `num_experts` at random, independently of
  the others: an expert is left out by all with probability `(1 - k / E)^n`, so
  that `E (1 - (1 - k / E)^n)` are chosen. Routers that prefer some experts, and
  neighbouring tokens that prefer the same, touch fewer. Raises ValueError
  unless all are above 0 and k is at most E.
  """
  # Of 128, one token chooses 8, and five choose 35.4.
  size = above_zero('num_experts', num_experts)
  chosen = above_zero('num_chosen', num_chosen)
  count = above_zero('num_tokens', num_tokens)
  if np.any(chosen > size):
    raise ValueError(f'num_chosen {chosen} must be at most num_experts {size}')
  return size * (1 - (1 - chosen / size) ** count)
