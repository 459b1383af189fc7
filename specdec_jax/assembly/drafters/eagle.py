"""An EAGLE-3 network, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters import on_target
from specdec_jax.assembly.drafters.choice import Drafting, Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(on_target.OnTarget):
  """An EAGLE-3 network that was trained for the target; see `drafters.eagle`.

  With `lookup`, text that the context has already is copied from it, as
  `PromptLookup` does.
  """

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    return on_target.make(
      self, target, length, name='eagle', chain_of=drafters.eagle
    )
