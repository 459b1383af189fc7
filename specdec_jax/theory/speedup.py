"""How much faster, and at what price in arithmetic.

Costs are ratios to one plain step of the target, so nothing here has a unit
except `specdec_time`. `c` is the time of one drafter step over that of one
target step, `c_hat` the same for arithmetic operations per token (Leviathan et
al., https://arxiv.org/abs/2211.17192, Definitions 3.7 and 3.10).

All functions take scalars or arrays and follow numpy's broadcasting; scalars in
give a scalar out. An argument out of range raises ValueError with its name and
value.
"""

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax.theory.acceptance import expected_tokens, in_range


def walltime_improvement(
  alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike
) -> np.ndarray:
  """Plain decoding's time over speculative decoding's, above 1 for a gain.

  `(1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1))`: Leviathan et al.,
  Theorem 3.8: https://arxiv.org/abs/2211.17192. Scoring `gamma + 1` tokens at
  once is taken to cost one plain step; `predicted_speedup` lifts that.

  Args:
    alpha: acceptance rate in [0, 1].
    gamma: drafted tokens, at least 0, infinity allowed.
    c: cost ratio of a drafter step, at least 0.
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
  """Arithmetic per token over plain decoding's, above 1 for extra work.

  `(1 - alpha) (gamma c_hat + gamma + 1) / (1 - alpha^(gamma+1))`: Leviathan et
  al., Theorem 3.11: https://arxiv.org/abs/2211.17192.

  Args:
    alpha: acceptance rate in [0, 1].
    gamma: drafted tokens, at least 0, infinity allowed.
    c_hat: operations of one drafter token over one target token, at least 0.
  """
  tokens = expected_tokens(alpha, gamma)
  gamma, c_hat = in_range('gamma', gamma, 0), in_range('c_hat', c_hat, 0)
  with np.errstate(invalid='ignore'):
    factor = (gamma * (c_hat + 1) + 1) / tokens
  # Without end: each accepted token was drafted once and scored once.
  return np.where(tokens == np.inf, c_hat + 1, factor)[()]


def memory_reads_factor(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray:
  """Reads of the target's weights and cache per token over plain decoding's.

  `1 / expected_tokens`, below 1 for a saving: Leviathan et al., Sec. 3.4
  (https://arxiv.org/abs/2211.17192), who state the inverse, the factor by which
  reads shrink. The drafter's own reads are not counted.

  Args:
    alpha: acceptance rate in [0, 1].
    gamma: drafted tokens, at least 0, infinity allowed.

  Returns:
    Factors in [0, 1], the broadcast shape of the arguments.
  """
  return 1 / expected_tokens(alpha, gamma)


def minimal_improvement(alpha: ArrayLike, c: ArrayLike) -> np.ndarray:
  """What the best gamma gains at the least.

  `(1 + alpha) / (1 + c)` if `alpha > c`, the gain of gamma 1: Leviathan et al.,
  Corollary 3.9: https://arxiv.org/abs/2211.17192. Otherwise no gamma gains and
  the best, 0, gives 1.

  Args:
    alpha: acceptance rate in [0, 1].
    c: cost ratio of a drafter step, at least 0.

  Returns:
    Factors of at least 1, the broadcast shape of the arguments.
  """
  alpha, c = in_range('alpha', alpha, 0, 1), in_range('c', c, 0)
  return np.where(alpha > c, (1 + alpha) / (1 + c), 1.0)[()]


def best_gamma(
  alpha: ArrayLike, c: ArrayLike, max_gamma: int = 128
) -> int | np.ndarray:
  """The gamma up to `max_gamma` with the greatest `walltime_improvement`.

  Leviathan et al., Sec. 3.5 and Figure 3: https://arxiv.org/abs/2211.17192.
  The improvement rises and then falls with gamma, so a bound that is reached
  (always at `c` 0) means that the optimum lies at or beyond it.

  Args:
    alpha: acceptance rate in [0, 1].
    c: cost ratio of a drafter step, at least 0.
    max_gamma: the largest gamma considered, at least 0.

  Returns:
    Whole numbers, the broadcast shape of `alpha` and `c`; an `int` for
    scalars. The least of equally good ones: 0 if drafting does not pay.
  """
  if max_gamma != int(max_gamma) or max_gamma < 0:
    raise ValueError(
      f'max_gamma must be a whole number of at least 0, got {max_gamma}'
    )
  gammas = np.arange(int(max_gamma) + 1)
  factors = walltime_improvement(
    np.asarray(alpha)[..., None], gammas, np.asarray(c)[..., None]
  )
  # Two gammas that tie on paper may differ in the last bits of a float64.
  is_best = factors >= factors.max(-1, keepdims=True) * (1 - 1e-14)
  best = is_best.argmax(-1)
  return int(best) if best.ndim == 0 else best


def oracle_walltime_improvement(alpha: ArrayLike, c: ArrayLike) -> np.ndarray:
  """The improvement if gamma were always chosen with hindsight.

  An oracle drafts just the n tokens that will be accepted, `alpha / (1 -
  alpha)` of them on average, and pays `n c + 1` for n + 1 tokens, hence
  `1 / (1 - alpha + alpha c)`. It follows from Sec. 3.5 of Leviathan et al.
  (https://arxiv.org/abs/2211.17192), which does not print it. Where `c > 1`
  such an oracle loses to one that drafts nothing; that one is not meant here.

  Args:
    alpha: acceptance rate in [0, 1].
    c: cost ratio of a drafter step, at least 0.

  Returns:
    Factors, the broadcast shape of the arguments; infinite at `alpha` 1 with
    `c` 0.
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
  """The speedup that measured tokens and measured costs imply.

  `block_efficiency / (gamma c + verify_cost_ratio)`: Theorem 3.8 of Leviathan
  et al. (https://arxiv.org/abs/2211.17192) with two assumptions lifted, that
  acceptances are independent and that scoring `gamma + 1` tokens costs no more
  than scoring one.

  Args:
    block_efficiency: tokens per target run, at least 1.
    gamma: drafter steps per target run, at least 0: the mean if it varies, 1
      for a drafter that guesses all its tokens in one pass.
    c: time of one drafter step over one plain step of the target, at least 0.
    verify_cost_ratio: time of the target's call on a whole draft over that of
      a plain step, above 0.
  """
  tokens = in_range('block_efficiency', block_efficiency, 1)
  gamma, c = in_range('gamma', gamma, 0), in_range('c', c, 0)
  verify = in_range('verify_cost_ratio', verify_cost_ratio, 0)
  if (verify == 0).any():
    raise ValueError('verify_cost_ratio must be above 0, got 0')
  return (tokens / (_drafting_cost(gamma, c) + verify))[()]


def specdec_time(
  length: ArrayLike,
  tokens_per_iteration: ArrayLike,
  draft_time: ArrayLike,
  verify_time: ArrayLike,
) -> np.ndarray:
  """Time to decode a sequence, `L / Tok (t_draft + t_verify)`.

  Xia et al., the two principles of a drafter:
  https://arxiv.org/abs/2203.16487. Capability raises the tokens per iteration,
  latency lowers `draft_time`. Encoding, which happens once, is not in it, and a
  last iteration that is only partly used counts for its part.

  Args:
    length: tokens to decode, at least 0.
    tokens_per_iteration: mean tokens per iteration, the correction included,
      at least 1.
    draft_time: of drafting in one iteration, at least 0, in any unit.
    verify_time: of verifying it, at least 0, in the same unit.
  """
  length = in_range('length', length, 0)
  tokens = in_range('tokens_per_iteration', tokens_per_iteration, 1)
  draft = in_range('draft_time', draft_time, 0)
  verify = in_range('verify_time', verify_time, 0)
  return (length / tokens * (draft + verify))[()]


def _drafting_cost(gamma: np.ndarray, c: np.ndarray) -> np.ndarray:
  """`gamma c`, and 0 rather than NaN for a free drafter without end."""
  with np.errstate(invalid='ignore'):
    return np.where(c == 0, 0.0, gamma * c)
