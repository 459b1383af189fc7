"""What a grammar leaves to say, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters.choice import Drafting, Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarDrafter:
  """Drafts what a row's grammar leaves to say, and nothing else; see
  `grammars.read`. Without a grammar it is plain decoding."""

  gamma: lengths.Gamma | None = lengths.gamma_option()

  @property
  def length(self) -> lengths.LengthChoice:
    return lengths.of(gamma=8 if self.gamma is None else self.gamma)

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    silent = drafters.none(lengths.fixed(length))
    return Drafting(
      drafter=silent._replace(may_abstain=True, takes_guesses=True)
    )
