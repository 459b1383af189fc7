"""Heads on the target's decoder, as a choice."""

import dataclasses

from specdec_jax.assembly import lengths, models
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.contrib.block_heads.blockwise_heads import blockwise_heads
from specdec_jax.contrib.block_heads.network import BlockHeadsConfig
from specdec_jax.models import families


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeads:
  """Heads on the target's decoder, `gamma` of them or all, in a folder
  that `specdec train` wrote; see `contrib.block_heads.blockwise_heads`."""

  model: models.Model
  gamma: lengths.Gamma | None = lengths.gamma_option()

  @property
  def length(self) -> lengths.LengthChoice:
    """Reads the number of heads from the folder, where gamma does not say."""
    if isinstance(self.gamma, int):
      return lengths.of(gamma=self.gamma)
    num_heads = self._config().gamma
    # All heads, about a half and a quarter: of 7 heads 1, 3 and 7.
    tried = {(num_heads + 1) // part - 1 for part in (1, 2, 4)}
    return lengths.of(
      gamma=self.gamma, usual=num_heads, tried=sorted(tried - {0, -1})
    )

  def _config(self) -> BlockHeadsConfig:
    return models.read_drafter_config(self.model, 'block_heads')

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    config, gamma = self._config(), lengths.fixed(length)
    if gamma > config.gamma:
      raise ValueError(f'gamma {gamma} is more than {config.gamma} heads')
    bound = families.bind(target.config, config, width=gamma + 1)
    return Drafting(
      drafter=blockwise_heads(bound.model, gamma=gamma),
      model=self.model,
      config=config,
      target=bound.target,
      join=bound.join,
    )
