"""Guesses at random, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters.choice import Drafting, Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
  """Guesses at random; see `drafters.uniform`."""

  gamma: lengths.Gamma | None = lengths.gamma_option()

  @property
  def length(self) -> lengths.LengthChoice:
    return lengths.of(gamma=self.gamma)

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    drafter = drafters.uniform(
      gamma=lengths.fixed(length),
      # Padding is never drafted; its probability is 0.
      vocab_size=target.vocab_size,
      padded_vocab_size=target.config.vocab_size,
    )
    return Drafting(drafter=drafter)
