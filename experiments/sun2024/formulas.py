"""Mean accepted tokens by enumeration, for examples without any context."""

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax import theory

# Enumerating drafts is for toys; beyond this many it is a mistake.
_MAX_DRAFTS = 1_000_000


def token_verification_accepted(
  p: ArrayLike, q: ArrayLike, gamma: int
) -> float:
  """Returns mean drafted tokens that Algorithm 1 accepts without any context,
  `beta + ... + beta^gamma`, as of `block_verification_accepted`."""
  p, q = _toy(p, q)
  rate = theory.acceptance_rate(p, q)
  return float(theory.expected_tokens(rate, gamma) - 1)


def block_verification_accepted(
  p: ArrayLike, q: ArrayLike, gamma: int
) -> float:
  """Returns mean drafted tokens that block verification accepts, by
  enumeration: Sun et al., Algorithm 2 (https://arxiv.org/abs/2403.10444), for
  one context-free pair, `[V]` each.

  The chance that the last accepted position is i or beyond is `1 - prod_{j >=
  i} (1 - h_j)`. Never less than `token_verification_accepted`; for P = (1/3,
  2/3), Q = (2/3, 1/3) and gamma 2 it is 11/9 against 10/9. Gamma is whole, and
  `V**gamma` may be at most 1e6.
  """
  p, q = _toy(p, q)
  size = len(p)
  if size**gamma > _MAX_DRAFTS:
    raise ValueError(
      f'{size} tokens and gamma {gamma} make {size**gamma} drafts, more than'
      f' {_MAX_DRAFTS}'
    )
  # Every draft is a column: of 2 tokens and gamma 2 they are
  # 0 0 1 1 over 0 1 0 1.
  drafts = np.indices((size,) * gamma).reshape(gamma, size**gamma)
  weights = q[drafts].prod(0)
  ratio = np.divide(p, q, out=np.zeros_like(p), where=q > 0)
  prefix, accept = np.ones(size**gamma), []
  for i in range(gamma):
    prefix = np.minimum(1, prefix * ratio[drafts[i]])
    excess = np.maximum(prefix[:, None] * p - q, 0).sum(-1)
    total = excess + 1 - prefix
    inner = np.divide(excess, total, out=np.ones_like(total), where=total > 0)
    accept.append(prefix if i == gamma - 1 else inner)
  mean, none_beyond = 0.0, np.ones(size**gamma)
  for h in reversed(accept):
    none_beyond = none_beyond * (1 - h)
    mean += float((weights * (1 - none_beyond)).sum())
  return mean


def _toy(p: ArrayLike, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
  """Returns both, once known to be two vectors."""
  # It refuses what are no distributions of one size.
  theory.acceptance_rate(p, q)
  p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
  if p.ndim != 1 or q.ndim != 1:
    raise ValueError(f'p and q must be vectors, got {p.shape} and {q.shape}')
  return p, q
