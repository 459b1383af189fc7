"""The values of one iteration that leave the compiled step."""

import dataclasses

import jax

from specdec_jax import arrays, base
from specdec_jax.base import Array, Draft, Verification
from specdec_jax.decoding.speculative import StepInfo
from specdec_jax.verification import decision


@base.value
class StepValues:
  """What leaves the compiled step of a `StepInfo`, for traces and stop strings;
  nothing has a vocabulary axis.

  The draft is without its probabilities; p and q, float32 `[B, G]`, are those
  of each drafted token (q is 1 from a deterministic drafter), next_p, float32
  `[B]`, the target's of the next; starts and counts are int32 `[B]`.
  """

  draft: Draft
  verification: Verification
  p: Array
  q: Array
  next_p: Array
  starts: Array
  counts: Array


@jax.jit
def gather(info: StepInfo) -> StepValues:
  """Picks the values of a step; called inside the jitted step, it keeps the
  probabilities `[B, G+1, V]` from leaving it."""
  draft, verification = info.draft, info.verification
  gamma = draft.tokens.shape[1]
  next_probs = decision.probs_at(info.target_probs, verification.num_accepted)
  return StepValues(
    draft=dataclasses.replace(draft, probs=None),
    verification=verification,
    p=arrays.pick(info.target_probs[:, :gamma], draft.tokens),
    q=decision.drafted_probs(draft),
    next_p=arrays.pick(next_probs, verification.next_token),
    starts=info.starts,
    counts=info.counts,
  )
