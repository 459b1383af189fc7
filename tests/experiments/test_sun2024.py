"""The enumeration of what block and token verification accept."""

import itertools

import numpy as np
import pytest

from experiments.sun2024 import formulas


def test_block_verification_toy_of_sun_et_al():
  p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
  tokens = formulas.token_verification_accepted(p, q, 2)
  block = formulas.block_verification_accepted(p, q, 2)
  assert tokens == pytest.approx(10 / 9, abs=1e-12)
  assert block == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize('gamma', [0, 1, 2, 4])
def test_block_verification_is_optimal(gamma):
  # Sun et al. show that position i is reached with probability E_Q[p_i].
  rng = np.random.default_rng(10)
  pairs = [rng.dirichlet(np.full(3, 0.5), 10) for _ in range(2)]
  for p, q in zip(*pairs, strict=True):
    best = 0.0
    for length in range(1, gamma + 1):
      for draft in itertools.product(range(3), repeat=length):
        reached = 1.0
        for token in draft:
          reached = min(1.0, reached * p[token] / q[token])
        best += reached * q[list(draft)].prod()
    block = formulas.block_verification_accepted(p, q, gamma)
    tokens = formulas.token_verification_accepted(p, q, gamma)
    assert block == pytest.approx(best, abs=1e-12)
    assert block >= tokens - 1e-12
    if gamma < 2:
      assert block == pytest.approx(tokens, abs=1e-12)


def test_block_verification_of_equal_and_of_one_hot_distributions():
  p = [0.2, 0.3, 0.5]
  assert formulas.block_verification_accepted(p, p, 4) == pytest.approx(4)
  one_hot = [0.0, 1.0, 0.0]
  block = formulas.block_verification_accepted(p, one_hot, 3)
  assert block == pytest.approx(0.3 + 0.09 + 0.027)


@pytest.mark.parametrize(
  ('function', 'arguments', 'message'),
  [
    (formulas.block_verification_accepted, ([0.1] * 10,) * 2 + (9,), 'drafts'),
    (formulas.token_verification_accepted, ([[1.0]], [1.0], 1), 'vectors'),
  ],
)
def test_what_is_no_toy_is_refused(function, arguments, message):
  with pytest.raises(ValueError, match=message):
    function(*arguments)
