"""How much faster, and at what price in arithmetic.

As in `theory.acceptance`, symbols and sections are those of Leviathan et al.
(https://arxiv.org/abs/2211.17192) unless another paper is named, arguments
broadcast, scalars in give a scalar out, and an argument out of range raises
ValueError with its name and value. Beside `alpha` and `gamma` there are two
ratios to one plain step of the target, at least 0 (Definitions 3.7 and 3.10):

- `c`: the time of one drafter step over that of one target step;
- `c_hat`: the same for arithmetic operations per token.

Nothing here has a unit except `specdec_time`.
"""

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax.theory.acceptance import (
  above_zero,
  expected_tokens,
  in_range,
  whole,
)


def walltime_improvement(
  alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike
) -> np.ndarray:
  """Returns plain decoding's time over speculative decoding's, `(1 -
  alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1))`: Theorem 3.8.

  Scoring `gamma + 1` tokens at once is taken to cost one plain step, which
  `predicted_speedup` lifts.
  """
  tokens, c = expected_tokens(alpha, gamma), in_range('c', c, 0)
  with np.errstate(invalid='ignore', divide='ignore'):
    factor = predicted_speedup(tokens, gamma, c)
    # Always accepted, drafting without end: the drafter's own pace.
    limit = 1 / c
  is_endless = (tokens == np.inf) & (np.asarray(gamma) == np.inf)
  return np.where(is_endless, limit, factor)[()]


def operations_factor(
  alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike
) -> np.ndarray:
  """Returns arithmetic per token over plain decoding's, `(1 - alpha) (gamma
  c_hat + gamma + 1) / (1 - alpha^(gamma+1))`: Theorem 3.11."""
  tokens = expected_tokens(alpha, gamma)
  gamma, c_hat = in_range('gamma', gamma, 0), in_range('c_hat', c_hat, 0)
  with np.errstate(invalid='ignore'):
    factor = (gamma * (c_hat + 1) + 1) / tokens
  # Without end: each accepted token was drafted once and scored once.
  return np.where(tokens == np.inf, c_hat + 1, factor)[()]


def memory_reads_factor(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray:
  """Returns reads of the target's weights and cache per token over plain
  decoding's, `1 / expected_tokens` (Sec. 3.4 states the inverse). The drafter's
  own reads are not counted."""
  return 1 / expected_tokens(alpha, gamma)


def minimal_improvement(alpha: ArrayLike, c: ArrayLike) -> np.ndarray:
  """Returns what the best gamma gains at the least: `(1 + alpha) / (1 + c)` if
  `alpha > c`, the gain of gamma 1 (Corollary 3.9), otherwise 1, that of gamma
  0."""
  alpha, c = in_range('alpha', alpha, 0, 1), in_range('c', c, 0)
  return np.where(alpha > c, (1 + alpha) / (1 + c), 1.0)[()]


def best_gamma(
  alpha: ArrayLike, c: ArrayLike, max_gamma: int = 128
) -> int | np.ndarray:
  """Finds the gamma up to `max_gamma` with the greatest `walltime_improvement`,
  the least of equally good ones: 0 if drafting does not pay. An `int` for
  scalars.

  Sec. 3.5 and Figure 3. The improvement rises and then falls with gamma: at a
  bound that is reached (always at `c` 0) the optimum lies at or beyond it.
  """
  # The gammas are a last axis of their own: alpha and c `[A]` give factors
  # `[A, max_gamma + 1]`.
  gammas = np.arange(whole('max_gamma', max_gamma) + 1)
  factors = walltime_improvement(
    np.asarray(alpha)[..., None], gammas, np.asarray(c)[..., None]
  )
  # Two gammas that tie on paper may differ in the last bits of a float64.
  is_best = factors >= factors.max(-1, keepdims=True) * (1 - 1e-14)
  best = is_best.argmax(-1)
  return int(best) if best.ndim == 0 else best


def oracle_walltime_improvement(alpha: ArrayLike, c: ArrayLike) -> np.ndarray:
  """Returns the improvement if gamma were always chosen with hindsight, `1 / (1
  - alpha + alpha c)`.

  An oracle drafts just the n tokens that will be accepted, `alpha / (1 -
  alpha)` of them on average, and pays `n c + 1` for n + 1 tokens. It follows
  from Sec. 3.5, which does not print it. Where `c > 1` such an oracle loses to
  one that drafts nothing; that one is not meant here.
  """
  alpha, c = in_range('alpha', alpha, 0, 1), in_range('c', c, 0)
  with np.errstate(divide='ignore', invalid='ignore'):
    return (1 / (1 - alpha + alpha * c))[()]


def predicted_speedup(
  block_efficiency: ArrayLike,
  gamma: ArrayLike,
  c: ArrayLike,
  verify_cost_ratio: ArrayLike = 1.0,
) -> np.ndarray:
  """Returns the speedup that measured tokens and measured costs imply,
  `block_efficiency / (gamma c + verify_cost_ratio)`: Theorem 3.8 without its
  assumptions that acceptances are independent and that scoring `gamma + 1`
  tokens costs no more than scoring one.

  Tokens per target run are at least 1. Gamma is in drafter steps per target
  run: the mean if it varies, 1 for a drafter that guesses all its tokens in one
  pass. `verify_cost_ratio`, above 0, is the time of the target's call on a
  whole draft over that of a plain step.
  """
  tokens = in_range('block_efficiency', block_efficiency, 1)
  gamma, c = in_range('gamma', gamma, 0), in_range('c', c, 0)
  verify = above_zero('verify_cost_ratio', verify_cost_ratio)
  with np.errstate(invalid='ignore'):
    # 0 rather than NaN for a free drafter without end.
    drafting = np.where(c == 0, 0.0, gamma * c)
  return (tokens / (drafting + verify))[()]


def specdec_time(
  length: ArrayLike,
  tokens_per_iteration: ArrayLike,
  draft_time: ArrayLike,
  verify_time: ArrayLike,
) -> np.ndarray:
  """Returns the time to decode a sequence, `L / Tok (t_draft + t_verify)`: Xia
  et al., the two principles of a drafter (https://arxiv.org/abs/2203.16487).

  Encoding, which happens once, is not in it, and a last iteration that is only
  partly used counts for its part. The mean tokens per iteration, at least 1,
  include the correction; the times are those of drafting and of verifying in
  one iteration, at least 0, in any one unit.
  """
  length = in_range('length', length, 0)
  tokens = in_range('tokens_per_iteration', tokens_per_iteration, 1)
  draft = in_range('draft_time', draft_time, 0)
  verify = in_range('verify_time', verify_time, 0)
  return (length / tokens * (draft + verify))[()]
