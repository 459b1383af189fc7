"""Block verification (Sun et al., arXiv 2403.10444)."""

import dataclasses

import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Draft, Verification
from specdec_jax.sampling import distributions
from specdec_jax.verification import decision
from specdec_jax.verification.decision import Decision, Threshold


def block_verification(
  row_keys: Array, draft: Draft, target_probs: Array
) -> Verification:
  """Accepts the longest prefix that passes, judging the block as a whole.

  Algorithm 2 of https://arxiv.org/abs/2403.10444: lossless, never fewer tokens
  in expectation than speculative sampling, and equal to it at gamma 1 or
  temperature 0. A rejection does not end the search: if a later position
  passes, all tokens before it are accepted too. A `base.VerifyFn`.
  """
  return decision.verify(decide, row_keys, draft, target_probs)


def decide(uniforms: Array, draft: Draft, target_probs: Array) -> Decision:
  """Applies the rule to given uniform draws, float32 `[B, G]`."""
  gamma = draft.tokens.shape[1]
  if not gamma:
    return Decision(
      num_accepted=jnp.zeros(target_probs.shape[0], jnp.int32),
      next_probs=target_probs[:, 0],
      accept_probs=jnp.zeros((target_probs.shape[0], 0), jnp.float32),
    )
  draft = decision.proposed(draft, target_probs.shape[-1])
  ratios = arrays.pick(target_probs[:, :gamma], draft.tokens)
  drafted = decision.drafted_probs(draft)
  ratios = ratios / jnp.where(drafted == 0, 1.0, drafted)
  # A draft ends at the first NaN in P or Q; what precedes it is judged alone.
  lengths = jnp.minimum(draft.lengths, arrays.count_leading(~jnp.isnan(ratios)))
  draft = dataclasses.replace(draft, lengths=lengths)
  is_drafted = arrays.is_within(lengths, gamma)
  prefix_probs = _prefix_probs(ratios)
  thresholds = _thresholds(prefix_probs[:, 1:], draft, target_probs)
  passes = thresholds.passes(uniforms) & is_drafted
  positions = jnp.arange(1, gamma + 1, dtype=jnp.int32)[None, :]
  # passes [1, 0, 1, 0] -> positions [1, 0, 3, 0] -> 3 accepted
  num_accepted = jnp.max(jnp.where(passes, positions, 0), axis=1)
  p_next = decision.probs_at(target_probs, num_accepted)
  scale = arrays.pick(prefix_probs, num_accepted)
  residual = distributions.normalize(
    decision.subtract_draft(scale[:, None] * p_next, draft, num_accepted),
    p_next,
  )
  is_rejected = num_accepted < draft.lengths
  return Decision(
    num_accepted=num_accepted,
    next_probs=jnp.where(is_rejected[:, None], residual, p_next),
    accept_probs=jnp.where(is_drafted, thresholds.value(), 0.0),
  )


def _prefix_probs(ratios: Array) -> Array:
  """Computes p_0 = 1, p_i = min(1, p_{i-1} P(x_i) / Q(x_i)), float32 `[B,
  G+1]`, from the ratios P / Q, `[B, G]`."""
  prefix_probs = [jnp.ones_like(ratios[:, 0])]  # [.5, 3, .2] -> [1, .5, 1, .2]
  for i in range(ratios.shape[1]):
    prefix_probs.append(jnp.minimum(prefix_probs[-1] * ratios[:, i], 1.0))
  return jnp.stack(prefix_probs, axis=1)


def _thresholds(
  prefix_probs: Array, draft: Draft, target_probs: Array
) -> Threshold:
  """Computes h_1 .. h_G, float32 `[B, G]`.

  h_i = Z_i / (Z_i + 1 - p_i), Z_i = sum_x max(p_i P(x) - Q(x), 0) over the
  tokens x after i drafted ones; for the last drafted token h_i = p_i.
  """
  gamma = prefix_probs.shape[1]
  # P and Q after i = 1 .. G-1 drafted tokens. With p_i = .5, P = [.8, .2] and
  # Q = [.3, .7]: Z_i = max(.4 - .3, 0) + max(.1 - .7, 0) = .1, h_i = .1 / .6.
  p_after = target_probs[:, 1:gamma]
  scale = prefix_probs[:, : gamma - 1]
  if draft.probs is None:
    next_drafted = arrays.pick(p_after, draft.tokens[:, 1:])
    mass = scale * (1.0 - next_drafted)
  else:
    mass = jnp.sum(
      jnp.maximum(scale[:, :, None] * p_after - draft.probs[:, 1:], 0.0),
      axis=-1,
    )
  mass = jnp.pad(mass, ((0, 0), (0, 1)))
  positions = jnp.arange(1, gamma + 1, dtype=jnp.int32)[None, :]
  is_last = positions == draft.lengths[:, None]
  return Threshold(
    numerator=jnp.where(is_last, prefix_probs, mass),
    denominator=jnp.where(is_last, 1.0, mass + (1.0 - prefix_probs)),
  )
