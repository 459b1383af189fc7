"""A way of decoding as one value, which every loop and its callers take."""

import dataclasses

from specdec_jax import trees
from specdec_jax.base import Drafter, LanguageModel, LogitsToProbsFn, VerifyFn
from specdec_jax.decoding.state import EosId
from specdec_jax.drafters.stateless import none
from specdec_jax.verification.speculative_sampling import speculative_sampling

_NO_DRAFTER = none()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """The target, the drafter and the rule; plain decoding without a drafter.

  Attributes:
    target: the model whose distribution or argmax the output has.
    drafter: the source of drafts; it changes the speed, not the distribution.
    verify_fn: the verification rule.
    logits_to_probs: how the target is sampled; a drafter has its own.
    eos_id: ends a row once committed; a tuple lists several, -1 none.
    num_ids: token ids, the rest of V being padding; None for V.
  """

  target: LanguageModel
  drafter: Drafter = _NO_DRAFTER
  verify_fn: VerifyFn = speculative_sampling
  logits_to_probs: LogitsToProbsFn
  eos_id: EosId
  num_ids: int | None = None

  @property
  def depth(self) -> int:
    """The most drafted tokens that one iteration can accept: gamma or D."""
    tree = self.drafter.tree
    return self.drafter.gamma if tree is None else trees.depth(tree)
