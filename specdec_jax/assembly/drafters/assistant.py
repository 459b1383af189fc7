"""A Gemma 4 assistant, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters import on_target
from specdec_jax.assembly.drafters.choice import Drafting, Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assistant(on_target.OnTarget):
  """The assistant that was trained for a Gemma 4; see `drafters.assistant`.

  With `lookup`, text that the context has already is copied from it, as
  `PromptLookup` does.
  """

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    return on_target.make(
      self, target, length, name='assistant', chain_of=drafters.assistant
    )
