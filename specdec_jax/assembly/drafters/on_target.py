"""Networks that draft token after token from what their target computed."""

import dataclasses
from collections.abc import Callable
from typing import Any

from specdec_jax import drafters
from specdec_jax.assembly import lengths, models
from specdec_jax.assembly.drafters import one_by_one
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.option_fields import option
from specdec_jax.base import Tree
from specdec_jax.checkpoints import loading
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.models import families
from specdec_jax.text import vocabularies, vocabulary_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnTarget(one_by_one.OneByOne):
  """Fields of the choices of such networks.

  With `lookup`, text that the context has already is copied from it, as
  `PromptLookup` does.
  """

  model: models.Model
  lookup: bool = option(
    False,
    'copy where prompt_lookup finds something, let the network draft elsewhere',
  )

  @property
  def length(self) -> lengths.LengthChoice:
    if self.lookup and self.tree is not None:
      raise ValueError('lookup copies chains, not trees: give one of them')
    return super().length


def make(
  choice: OnTarget,
  target: Target,
  length: lengths.Length,
  *,
  name: str,
  chain_of: Callable[[Any], Chain],
  min_confidence: float = 0.0,
) -> Drafting:
  """Makes the drafter of a choice, which `DRAFTERS` calls `name`; `chain_of` is
  of the module `drafters`, and `min_confidence` as in `Block`. ValueError if
  network and target do not fit."""
  config = models.read_drafter_config(choice.model, name)
  target.check_num_logits(config.vocab_size)
  if target.vocabulary is not None and not choice.model.is_random:
    # A folder of such a network need not have the target's vocabulary.
    path = loading.locate(choice.model.checkpoint)
    if vocabulary_files.is_in(path):
      vocabulary = vocabulary_files.read(path)
      vocabularies.check_same_vocabulary(target.vocabulary, vocabulary)
  # The target keeps the features of all positions that one call can accept.
  width = lengths.depth(length) + 1
  bound = families.bind(target.config, config, width=width)
  chain, first = chain_of(bound.model), None
  if choice.lookup and not isinstance(length, Tree):
    first = drafters.prompt_lookup(gamma=lengths.depth(length))
  return Drafting(
    drafter=one_by_one.drafter(
      chain,
      target,
      length,
      min_prob=choice.min_prob,
      min_confidence=min_confidence,
      first=first,
    ),
    model=choice.model,
    config=config,
    target=bound.target,
    join=bound.join,
    chain=chain,
  )
