"""Speculative sampling (Leviathan et al., arXiv 2211.17192)."""

import functools

import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Draft, Verification
from specdec_jax.sampling import distributions
from specdec_jax.verification import decision
from specdec_jax.verification.decision import Decision


def speculative_sampling(
  row_keys: Array, draft: Draft, target_probs: Array, *, lenience: float = 1.0
) -> Verification:
  """Accepts drafted tokens with probability min(1, p / (lenience q)) and draws
  the correction from the residual.

  Algorithm 1 of https://arxiv.org/abs/2211.17192; with lenience 1 each token
  has exactly the target's distribution. Lenience below 1 (Appendix A.5) accepts
  more, and no token's probability exceeds p / lenience. The paper does not give
  its residual: norm(max(0, p - q)), used here, keeps that bound. At temperature
  0 this lenience has no effect; use that of `greedy`.

  A `base.VerifyFn`. Raises ValueError if `lenience` is outside (0, 1].
  """
  check_lenience(lenience)
  decide_fn = functools.partial(decide, lenience=lenience)
  return decision.verify(decide_fn, row_keys, draft, target_probs)


def decide(
  uniforms: Array, draft: Draft, target_probs: Array, *, lenience: float = 1.0
) -> Decision:
  """Applies the rule to given uniform draws, float32 `[B, G]`."""
  gamma = draft.tokens.shape[1]
  draft = decision.proposed(draft, target_probs.shape[-1])
  is_drafted = arrays.is_within(draft.lengths, gamma)
  p = arrays.pick(target_probs[:, :gamma], draft.tokens)
  q = lenience * decision.drafted_probs(draft)
  # No division and no epsilon: a token of probability zero never passes, even
  # if its draw is zero. With p = .3, q = .6 it passes if u < .5 (u .6 < .3).
  is_accepted = is_drafted & (uniforms * q < p)
  num_accepted = arrays.count_leading(is_accepted)
  next_probs = decision.probs_at(target_probs, num_accepted)
  if gamma:
    is_rejected = num_accepted < draft.lengths
    # p = [.5, .3, .2], q = [.3, .6, .1] -> [.2, 0, .1] -> [2/3, 0, 1/3]
    residual = distributions.normalize(
      decision.subtract_draft(next_probs, draft, num_accepted), next_probs
    )
    next_probs = jnp.where(is_rejected[:, None], residual, next_probs)
  ratio = p / jnp.where(q == 0, 1.0, q)
  return Decision(
    num_accepted=num_accepted,
    next_probs=next_probs,
    accept_probs=jnp.where(is_drafted, jnp.minimum(ratio, 1.0), 0.0),
  )


def check_lenience(lenience: float) -> None:
  """Raises ValueError unless `lenience` lies in (0, 1]."""
  if not 0 < lenience <= 1:
    raise ValueError(f'lenience must lie in (0, 1], got {lenience}')
