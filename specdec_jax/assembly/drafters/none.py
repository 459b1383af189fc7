"""Plain decoding, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.base import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDrafter:
  """Plain decoding, through the same loop. Fields count only with `exact_bits`:
  they are those of the drafter whose tokens are to be the same.
  """

  gamma: lengths.Gamma | None = lengths.gamma_option()
  tree: lengths.Shape | None = lengths.tree_option()
  num_continuations: int = lengths.continuations_option()

  length = lengths.Fixed(0)

  def width(self, exact_bits: bool) -> lengths.LengthChoice:
    """What a target call has room for, beside the pending token; ValueError for
    a tree or a gamma that would not count, or without a gamma that does."""
    if not exact_bits:
      if self.tree is not None or self.num_continuations > 1:
        raise ValueError(
          'plain decoding has a tree only with exact_bits: give that too, or '
          'leave tree and num_continuations out'
        )
      if self.gamma is not None:
        raise ValueError(
          'plain decoding has a gamma only with exact_bits: give that too, '
          'leave gamma out, or choose a drafter that drafts'
        )
      return self.length
    if not self.gamma:
      raise ValueError(
        'exact_bits needs the gamma of the drafter whose tokens are to be the '
        'same: give gamma'
      )
    return lengths.of(
      gamma=self.gamma,
      tree=self.tree,
      num_continuations=self.num_continuations,
    )

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    if isinstance(length, Tree):
      idle = drafters.none(len(length.parents))
      return Drafting(drafter=idle._replace(tree=length))
    return Drafting(drafter=drafters.none(lengths.fixed(length)))
