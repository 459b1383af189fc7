"""Acceptance rates, and the expected tokens that follow from them.

Sections and symbols are those of Leviathan et al.
(https://arxiv.org/abs/2211.17192) unless another paper is named:

- `p` and `q`, float `[..., V]`: probabilities of the target and of the drafter;
- `lenience`, l in (0, 1], broadcast against their leading axes: 1 is lossless;
- `alpha`, in [0, 1]: the mean over contexts of the chance that a drafted token
  is accepted;
- `gamma`, at least 0, fractions and infinity allowed: drafted tokens.

"Tokens" always counts the correction or bonus token, so a target run gives at
least one. All functions take scalars or arrays and broadcast as numpy does: `p`
and `q` lose their last axis, and scalars give a scalar. They raise ValueError,
with name and value, for an argument out of range and for a distribution that
does not sum to 1 within 1e-4.
"""

import numpy as np
from numpy.typing import ArrayLike

_TOLERANCE = 1e-4


def in_range(
  name: str, value: ArrayLike, low: float, high: float = np.inf
) -> np.ndarray:
  """Returns `value` as float64; ValueError if it is NaN or out of range."""
  array = np.asarray(value, np.float64)
  is_outside = ~((array >= low) & (array <= high))
  if is_outside.any():
    raise ValueError(
      f'{name} must lie in [{low:g}, {high:g}], got {array[is_outside][0]:g}'
    )
  return array


def above_zero(name: str, value: ArrayLike, high: float = np.inf) -> np.ndarray:
  """Returns `value` as float64; ValueError unless it is in `(0, high]`."""
  array = in_range(name, value, 0.0, high)
  if (array == 0).any():
    raise ValueError(f'{name} must be above 0, got 0')
  return array


def _distribution(name: str, probs: ArrayLike) -> np.ndarray:
  """Returns `probs` as float64; ValueError unless they sum to 1."""
  array = in_range(name, probs, 0.0, 1.0 + _TOLERANCE)
  totals = np.asarray(array.sum(-1))
  is_off = abs(totals - 1) > _TOLERANCE
  if is_off.any():
    raise ValueError(f'{name} must sum to 1, got {totals[is_off][0]:g}')
  return array


def acceptance_rate(
  p: ArrayLike, q: ArrayLike, lenience: ArrayLike = 1.0
) -> np.ndarray:
  """Computes the probability that a token drawn from `q` is accepted, `sum
  min(p / l, q)`: Theorem 3.5, and Appendix A.5 for lenience. It is the paper's
  beta of one context; its mean over contexts is alpha."""
  p, q = _distribution('p', p), _distribution('q', q)
  lenience = above_zero('lenience', lenience, 1.0)
  # p = [.5, .5], q = [.8, .2]: .5 + .2 = .7; with lenience .5: .8 + .2 = 1
  rate = np.minimum(p / lenience[..., None], q).sum(-1)
  return np.minimum(rate, 1.0)[()]


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray:
  """Computes mean tokens per target run, `(1 - alpha^(gamma+1)) / (1 - alpha)`:
  Equation 1, and its limit `gamma + 1` at alpha 1.

  Assumes independent acceptances with one rate, which measured text need not
  follow: see `expected_tokens_of_profile`. A fractional gamma interpolates.
  """
  alpha, gamma = in_range('alpha', alpha, 0, 1), in_range('gamma', gamma, 0)
  alpha, gamma = np.broadcast_arrays(alpha, gamma)
  is_one = alpha == 1
  rejection = np.where(is_one, 1.0, 1 - alpha)
  with np.errstate(divide='ignore'):
    # expm1 keeps the digits that 1 - alpha**n loses when alpha is near 1.
    powers = -np.expm1((gamma + 1) * np.log1p(-rejection))
  # The logarithm rounds; the bounds, and gamma 0 with them, stay exact.
  tokens = np.clip(powers / rejection, 1, gamma + 1)
  return np.where(is_one, gamma + 1, tokens)[()]


def expected_tokens_of_profile(profile: ArrayLike) -> np.ndarray:
  """Computes mean tokens per target run if each position has its own rate.

  `1 + a_1 + a_1 a_2 + ...`: Equation 1 without the assumption that all `a_i`
  are equal. Exact for measured rates, `[..., G]`, G at least 0: `a_i` is the
  share of accepted tokens at position i among the tested ones, those whose
  predecessors were accepted. NaN, a position never tested, ends the draft.
  """
  # Rates .8 and .5 give 1 + .8 + .8 * .5 = 2.2 tokens.
  profile = np.asarray(profile, np.float64)
  profile = in_range('profile', np.where(np.isnan(profile), 0, profile), 0, 1)
  return (1 + profile.cumprod(-1).sum(-1))[()]


def expected_runs(rates: ArrayLike, gamma: int) -> float:
  """Computes mean target runs over one text of N tokens.

  `rates`, `[N]`, are the `acceptance_rate` of each token, given those before
  it; `gamma` is an integer. Exact if each rate is 0 or 1.
  """
  # A run starts where the last one ended, so that more of them start where text
  # is hard to guess. Means over all prefixes, as in a profile, are therefore
  # too optimistic if hard tokens stand together.
  rates = in_range('rates', rates, 0, 1)
  in_range('gamma', gamma, 0)
  # `runs[i]`: from token i on; beyond the end there is nothing to do.
  runs = np.zeros(len(rates) + gamma + 2)
  for i in reversed(range(len(rates))):
    # With rates 0.8, 0.5 ahead, a run ends 1, 2, 3 tokens further with chances
    # 0.2, 0.4, 0.4 (`stopped`).
    reached = np.concatenate([[1.0], rates[i : i + gamma].cumprod()])
    stopped = reached - np.append(reached[1:], 0.0)
    runs[i] = 1 + stopped @ runs[i + 1 : i + 1 + len(stopped)]
  return float(runs[0])


def alpha_from_block_efficiency(
  block_efficiency: ArrayLike, gamma: ArrayLike
) -> np.ndarray:
  """Computes the alpha at which `expected_tokens` is the measured mean: the
  third acceptance rate of `docs/notation.md`.

  Inverts Equation 1, which assumes independent acceptances with one rate.
  `block_efficiency`, tokens per target run, must lie in 1 .. `gamma + 1`, with
  1e-9 for rounding; `gamma` must be above 0.
  """
  tokens, gamma = np.broadcast_arrays(
    in_range('block_efficiency', block_efficiency, 1 - 1e-9),
    above_zero('gamma', gamma),
  )
  is_above = tokens > (gamma + 1) * (1 + 1e-9)
  if is_above.any():
    raise ValueError(
      f'block_efficiency {tokens[is_above][0]:g} is above gamma + 1 ='
      f' {gamma[is_above][0] + 1:g}'
    )
  # By bisection: halving 60 times leaves less than float64's spacing near 1.
  low, high = np.zeros(tokens.shape), np.ones(tokens.shape)
  for _ in range(60):
    middle = (low + high) / 2
    is_short = expected_tokens(middle, gamma) < tokens
    low = np.where(is_short, middle, low)
    high = np.where(is_short, high, middle)
  alpha = np.where(tokens <= 1, 0.0, (low + high) / 2)
  return np.where(tokens >= gamma + 1, 1.0, alpha)[()]
