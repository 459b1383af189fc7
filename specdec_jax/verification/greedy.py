"""Greedy verification: a drafted token passes if it is the target's argmax."""

import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Draft, Verification
from specdec_jax.verification import decision
from specdec_jax.verification.speculative_sampling import check_lenience


def greedy(
  row_keys: Array, draft: Draft, target_probs: Array, *, lenience: float = 1.0
) -> Verification:
  """Accepts drafted tokens that are the target's argmax; corrects with it.

  With lenience 1 the output is the target's own greedy decoding, token for
  token. Lenience l below 1 accepts x if p(x) >= l max p (Appendix A.5 of
  https://arxiv.org/abs/2211.17192, whose printed inequality is reversed), and
  needs the target's probabilities at temperature 1, not one-hot ones.

  A `base.VerifyFn` that draws nothing and does not read `draft.probs`. Raises
  ValueError if `lenience` is outside (0, 1].
  """
  del row_keys
  check_lenience(lenience)
  gamma = draft.tokens.shape[1]
  draft = decision.proposed(draft, target_probs.shape[-1])
  best = arrays.argmax(target_probs)
  passes = draft.tokens == best[:, :gamma]
  if lenience < 1:
    p = arrays.pick(target_probs[:, :gamma], draft.tokens)
    p_best = arrays.pick(target_probs[:, :gamma], best[:, :gamma])
    passes = passes | (p >= lenience * p_best)
  passes = passes & arrays.is_within(draft.lengths, gamma)
  num_accepted = arrays.count_leading(passes)
  return Verification(
    num_accepted=num_accepted,  # draft 5 6 7, argmax 5 6 8 9: 2, then 8
    next_token=arrays.pick(best, num_accepted),
    accept_probs=passes.astype(jnp.float32),
  )
