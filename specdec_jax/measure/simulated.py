"""Simulated acceptance, to time the loop apart from a drafter's quality.

The text of such a decode is noise: only its speed means anything, and whoever
shows it says that it is simulated.
"""

import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Draft, Verification
from specdec_jax.verification import decision
from specdec_jax.verification.decision import Decision


def simulated_acceptance(
  row_keys: Array, draft: Draft, target_probs: Array, *, alpha: float
) -> Verification:
  """Accepts every drafted token with the chance `alpha`, whatever p and q are,
  and draws the token after them from p, float32 `[B, G+1, V]`. Not lossless,
  and not meant to be."""

  def decide(uniforms: Array, draft: Draft, target_probs: Array) -> Decision:
    gamma = draft.tokens.shape[1]
    is_drafted = arrays.is_within(draft.lengths, gamma)
    accept_probs = jnp.where(is_drafted, jnp.float32(alpha), 0.0)
    num_accepted = arrays.count_leading(uniforms < accept_probs)
    return Decision(
      num_accepted=num_accepted,
      next_probs=decision.probs_at(target_probs, num_accepted),
      accept_probs=accept_probs,
    )

  return decision.verify(decide, row_keys, draft, target_probs)
