"""A block drafter on the target's features, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly import lengths, models
from specdec_jax.assembly.drafters import on_target
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.option_fields import option
from specdec_jax.drafters.block import check_depth
from specdec_jax.launch.numbers import share
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block(on_target.OnTarget):
  """A block in one pass over the target's features, by a network that was
  trained for the target; see `drafters.block`.

  With `lookup`, text that the context has already is copied from it, as
  `PromptLookup` does.
  """

  min_confidence: float = option(
    0.0,
    'end a draft before a token that the confidence head expects to be '
    'accepted, with all before it, with less probability than this',
    type=share,
  )

  @property
  def length(self) -> lengths.LengthChoice:
    """Reads the size of a block from the folder, where gamma does not say."""
    if self.tree is not None and self.min_confidence:
      raise ValueError(
        'min_confidence ends chains, not trees: give one of them'
      )
    length = super().length
    if isinstance(self.gamma, int):
      return length
    size = self._config().num_drafts
    # All of a block, about a half and a quarter: of 7 tokens 1, 3 and 7.
    tried = {(size + 1) // part - 1 for part in (1, 2, 4)}
    return lengths.of(
      gamma=self.gamma,
      usual=size,
      tree=self.tree,
      tried=sorted(tried - {0, -1}),
    )

  def _config(self) -> BlockDrafterConfig:
    config: BlockDrafterConfig = models.read_drafter_config(self.model, 'block')
    return config

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    check_depth(lengths.depth(length), self._config().num_drafts)
    return on_target.make(
      self,
      target,
      length,
      name='block',
      chain_of=drafters.block,
      min_confidence=self.min_confidence,
    )
