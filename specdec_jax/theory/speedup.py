"""Expected speedups, and their price in arithmetic operations.

As in `theory.acceptance`, symbols and sections are those of Leviathan et al.
(https://arxiv.org/abs/2211.17192), arguments broadcast, scalars give a scalar,
and an argument out of range raises ValueError with its name and value. Gamma is
finite. Beside `alpha` and `gamma` there are two ratios to one plain step of the
target, at least 0 (Definitions 3.7 and 3.10):

- `c`: the time of one drafter step over that of one target step;
- `c_hat`: the same for arithmetic operations per token.
"""

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax.theory.acceptance import above_zero, expected_tokens, in_range

# Gains and losses below this share count as neither.
MARGIN = 0.02


def walltime_improvement(
  alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike
) -> np.ndarray:
  """Computes plain decoding's time over speculative decoding's, `(1 -
  alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1))`: Theorem 3.8.

  Assumes that scoring `gamma + 1` tokens at once costs one plain step;
  `predicted_speedup` does not.
  """
  return predicted_speedup(expected_tokens(alpha, gamma), gamma, c)


def operations_factor(
  alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike
) -> np.ndarray:
  """Computes operations per token over plain decoding's, `(1 - alpha) (gamma
  c_hat + gamma + 1) / (1 - alpha^(gamma+1))`: Theorem 3.11."""
  tokens = expected_tokens(alpha, gamma)
  gamma, c_hat = in_range('gamma', gamma, 0), in_range('c_hat', c_hat, 0)
  # Gamma tokens are drafted, and gamma + 1 positions scored.
  return ((gamma * (c_hat + 1) + 1) / tokens)[()]


def best_gamma(
  alpha: ArrayLike, c: ArrayLike, max_gamma: int = 128
) -> int | np.ndarray:
  """Finds the gamma up to `max_gamma` with the greatest `walltime_improvement`:
  the least of equally good ones, 0 if drafting does not pay.

  Sec. 3.5 and Figure 3. Returns an `int` for scalars. The improvement rises and
  then falls with gamma, so that a result of `max_gamma` (always with `c` 0)
  means that the optimum lies there or beyond.
  """
  # Gammas are the last axis: of alpha and c `[A]`, `[A, max_gamma + 1]`.
  gammas = np.array(range(max_gamma + 1))
  alpha, c = np.asarray(alpha)[..., None], np.asarray(c)[..., None]
  factors = walltime_improvement(alpha, gammas, c)
  # Two gammas that tie on paper may differ in the last bits of a float64.
  is_best = factors >= factors.max(-1, keepdims=True) * (1 - 1e-14)
  best = is_best.argmax(-1)
  return int(best) if best.ndim == 0 else best


def predicted_speedup(
  block_efficiency: ArrayLike,
  gamma: ArrayLike,
  c: ArrayLike,
  verify_cost_ratio: ArrayLike = 1.0,
) -> np.ndarray:
  """Computes the speedup from measured tokens and costs, `block_efficiency /
  (gamma c + verify_cost_ratio)`.

  Theorem 3.8 without the assumptions that acceptances are independent and that
  scoring `gamma + 1` tokens costs as much as scoring one.

  Args:
    block_efficiency: mean tokens per target run, at least 1.
    gamma: drafter steps per target run: the mean if it varies, 1 for a drafter
      that fills a block in one pass.
    c: time of a drafter step over that of a plain step of the target.
    verify_cost_ratio: time to score a draft over a plain step's, above 0.
  """
  tokens = in_range('block_efficiency', block_efficiency, 1)
  gamma, c = in_range('gamma', gamma, 0), in_range('c', c, 0)
  verify = above_zero('verify_cost_ratio', verify_cost_ratio)
  # 3 tokens from a run that drafts 4 at .1 each and scores in 1.2: 3 / 1.6
  return (tokens / (gamma * c + verify))[()]
