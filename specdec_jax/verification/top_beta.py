"""Spec-Verification, the relaxed rule of SpecDec (Xia et al., arXiv
2203.16487)."""

import math

import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Draft, Verification


def top_beta(
  row_keys: Array,
  draft: Draft,
  target_probs: Array,
  *,
  beta: int,
  tau: float = math.inf,
) -> Verification:
  """Accepts drafted tokens among the target's `beta` likeliest that are within
  `tau` of the likeliest in log-probability; corrects with the likeliest.

  https://arxiv.org/abs/2203.16487, where beta 3 and tau 1 stand for little loss
  of quality. Lossy: an output need not be the target's greedy decoding, but
  each of its tokens meets both conditions after the tokens before it. Beta 1 is
  the strict rule, `greedy`. Of equally likely tokens the first ids rank first,
  as they do for argmax.

  A `base.VerifyFn` that draws nothing, and reads no probabilities of the draft.
  `target_probs` are at temperature 1: one-hot ones leave nothing to relax.
  `beta` is at least 1, `tau` in nats at least 0, and infinity asks for
  membership alone; ValueError otherwise.
  """
  del row_keys
  if isinstance(beta, bool) or not isinstance(beta, int) or beta < 1:
    raise ValueError(f'beta must be an integer of at least 1, got {beta!r}')
  if not tau >= 0:
    raise ValueError(f'tau must be at least 0, got {tau}')
  gamma = draft.tokens.shape[1]
  best = arrays.argmax(target_probs)
  probs = target_probs[:, :gamma]
  p = arrays.pick(probs, draft.tokens)
  # Without logarithms: a token of probability zero never passes.
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
  """How many ids come before each token, int32 `[B, G]`: 0 for the likeliest.

  Counted in one pass over the vocabulary; nothing is sorted.
  """
  p = arrays.pick(probs, tokens)[..., None]
  ids = jnp.arange(probs.shape[-1], dtype=jnp.int32)[None, None, :]
  is_before = (probs > p) | ((probs == p) & (ids < tokens[..., None]))
  return jnp.sum(is_before, axis=-1, dtype=jnp.int32)
