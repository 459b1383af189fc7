"""How many experts of a layer a block of tokens touches."""

import math

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


def expected_most(
  num_experts: int, num_chosen: int, num_tokens: int, num_devices: int
) -> float:
  """Computes how many distinct experts of one device some tokens choose, on
  average, if it is the one of which they choose most.

  Each of D devices has E / D of the experts, and all wait for the last. Tokens
  choose as in `expected_distinct`, and an expert is taken to be chosen whether
  or not others are: how many a device is asked for is then binomial, with E / D
  trials of probability `1 - (1 - k / E)^n`, and the mean of the most of D is
  the sum over m >= 1 of `1 - P(fewer than m)^D`. For one device, this is
  `expected_distinct`. Raises ValueError as that, or if D does not divide E.
  """
  distinct = float(expected_distinct(num_experts, num_chosen, num_tokens))
  if num_devices < 1 or num_experts % num_devices:
    raise ValueError(
      f'num_devices {num_devices} must divide num_experts {num_experts}'
    )
  # Of 128 experts on 4 devices, of which one token chooses 8, the busiest
  # device has 3.45, not 2; in draws without the assumption, 3.48.
  trials, prob = num_experts // num_devices, distinct / num_experts
  counts = [
    math.comb(trials, m) * prob**m * (1 - prob) ** (trials - m)
    for m in range(trials)
  ]
  fewer = np.cumsum(counts)
  return float(np.sum(1 - fewer**num_devices))
