"""No drafter, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.lengths import Fixed, Length


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDrafter:
  """Plain decoding, through the same loop."""

  length = Fixed(0)

  def make(self, target: Target, length: Length) -> Drafting:
    return Drafting(drafter=drafters.none())
