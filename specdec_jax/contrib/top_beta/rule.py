"""Spec-Verification, SpecDec's relaxed rule (Xia et al., arXiv 2203.16487)."""

import math

import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Draft, Verification
from specdec_jax.verification import decision


def top_beta(
  row_keys: Array,
  draft: Draft,
  target_probs: Array,
  *,
  beta: int,
  tau: float = math.inf,
) -> Verification:
  """Accepts drafted tokens among the target's `beta` likeliest and within `tau`
  nats of the likeliest; corrects with the likeliest.

  https://arxiv.org/abs/2203.16487, which loses little quality with beta 3 and
  tau 1. Lossy: the output need not be the target's greedy decoding, but each
  token meets both conditions given the tokens before it. Beta 1 is the strict
  rule, `greedy`. Of equally likely tokens the lower id ranks first, as in
  argmax. Infinite `tau` leaves only the condition on `beta`.

  A `base.VerifyFn` that draws nothing and does not read `draft.probs`; its
  `target_probs` are at temperature 1, since one-hot ones leave nothing to
  relax. Raises ValueError if `beta` is below 1 or `tau` below 0.
  """
  del row_keys
  if isinstance(beta, bool) or not isinstance(beta, int) or beta < 1:
    raise ValueError(f'beta must be an integer of at least 1, got {beta!r}')
  if not tau >= 0:
    raise ValueError(f'tau must be at least 0, got {tau}')
  gamma = draft.tokens.shape[1]
  draft = decision.proposed(draft, target_probs.shape[-1])
  best = arrays.argmax(target_probs)
  probs = target_probs[:, :gamma]
  p = arrays.pick(probs, draft.tokens)
  # Without logarithms, so that probability 0 never passes, tau infinite or not.
  is_close = (p > 0) & (p >= math.exp(-tau) * jnp.max(probs, axis=-1))
  is_drafted = arrays.is_within(draft.lengths, gamma)
  passes = is_drafted & is_close & (_ranks(probs, draft.tokens) < beta)
  num_accepted = arrays.count_leading(passes)
  return Verification(
    num_accepted=num_accepted,
    next_token=arrays.pick(best, num_accepted),
    accept_probs=passes.astype(jnp.float32),
  )


def _ranks(probs: Array, tokens: Array) -> Array:
  """Ranks each token, int32 `[B, G]`, 0 for the likeliest, without sorting:
  counts the ids before it. Of probabilities [.2, .5, .2] the ranks are 1, 0, 2.
  """
  p = arrays.pick(probs, tokens)[..., None]
  ids = jnp.arange(probs.shape[-1], dtype=jnp.int32)[None, None, :]
  is_before = (probs > p) | ((probs == p) & (ids < tokens[..., None]))
  return jnp.sum(is_before, axis=-1, dtype=jnp.int32)
