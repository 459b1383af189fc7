"""An EAGLE-3 network, as a choice."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly import lengths, models
from specdec_jax.assembly.drafters import one_by_one
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.option_fields import option
from specdec_jax.base import Tree
from specdec_jax.checkpoints import loading
from specdec_jax.models import families
from specdec_jax.text import vocabularies, vocabulary_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(one_by_one.OneByOne):
  """An EAGLE-3 network that was trained for the target; see `drafters.eagle`.

  With `lookup`, text that the context has already is copied from it, as
  `PromptLookup` does.
  """

  model: models.Model
  lookup: bool = option(
    False, 'copy where prompt_lookup finds something, let eagle draft elsewhere'
  )

  @property
  def length(self) -> lengths.Length:
    if self.lookup and self.tree is not None:
      raise ValueError('lookup copies chains, not trees: give one of them')
    return super().length

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    config = models.read_drafter_config(self.model, 'eagle')
    target.check_num_logits(config.vocab_size)
    if target.vocabulary is not None:
      # A head need not have the target's vocabulary beside it.
      path = loading.locate(self.model.checkpoint)
      if vocabulary_files.is_in(path):
        own = vocabulary_files.read(path)
        vocabularies.check_same_vocabulary(target.vocabulary, own)
    # The target keeps the features of all positions that one call can accept.
    width = lengths.depth(length) + 1
    bound = families.bind(target.config, config, width=width)
    chain, first = drafters.eagle(bound.model), None
    if self.lookup and not isinstance(length, Tree):
      first = drafters.prompt_lookup(gamma=lengths.depth(length))
    return Drafting(
      drafter=one_by_one.drafter(chain, target, length, first=first),
      model=self.model,
      config=config,
      target=bound.target,
      join=bound.join,
      chain=chain,
    )
