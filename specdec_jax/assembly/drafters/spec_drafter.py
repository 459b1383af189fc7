"""A Spec-Drafter, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly import lengths, models
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.models import families


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecDrafter:
  """A block of k = gamma tokens in one pass; see `drafters.spec_drafter`.

  Attributes:
    model: the folder that `specdec train` wrote; in a dry run, `sizes` alone,
      a name of `presets.SPEC_DRAFTERS`, will do.
  """

  model: models.Model
  gamma: lengths.Gamma | None = lengths.gamma_option()

  @property
  def length(self) -> lengths.LengthChoice:
    # A block costs one pass, whatever its length; scoring it costs a CPU more.
    return lengths.of(gamma=self.gamma, usual=25, tried=(2, 5, 11, 23))

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    config = models.read_drafter_config(self.model, 'spec_drafter')
    gamma = lengths.fixed(length)
    if not families.has_encoder(target.config):
      raise ValueError(
        f'{self.model.checkpoint} reads what an encoder made, and '
        f'{target.name} has none: give a draft_model of another kind'
      )
    # It was trained for one target, and has the same padding.
    num_logits, target_logits = config.vocab_size, target.config.vocab_size
    if num_logits != target_logits:
      raise ValueError(
        f'the target has {target_logits} logits, the drafter {num_logits}'
      )
    drafter = drafters.spec_drafter(
      families.bind(target.config, config, width=gamma + 1).model,
      gamma=gamma,
      vocab_size=target.vocab_size,
    )
    return Drafting(drafter=drafter, model=self.model, config=config)
