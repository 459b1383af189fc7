"""Plain decoding, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.base import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDrafter:
  """Plain decoding, through the same loop. `gamma` and `tree` count only with
  `exact_bits`: they are those of the drafter whose tokens are to be the same.
  """

  gamma: lengths.Gamma = lengths.gamma_option(0)
  tree: lengths.Shape | None = lengths.tree_option()

  length = lengths.Fixed(0)

  @property
  def width(self) -> lengths.Length:
    """What a target call has room for."""
    if not self.gamma:
      raise ValueError(
        'exact_bits needs the gamma, or gamma and tree, that drafts have: bits '
        "depend on the width of the target's calls"
      )
    return lengths.of(gamma=self.gamma, tree=self.tree)

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    if isinstance(length, Tree):
      return Drafting(drafter=drafters.none(len(length.parents), length))
    return Drafting(drafter=drafters.none(lengths.fixed(length)))
