"""A smaller language model, as a choice."""

import dataclasses

import numpy as np

from specdec_jax.assembly import lengths, models
from specdec_jax.assembly.drafters import one_by_one
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.base import LanguageModel
from specdec_jax.drafters.autoregressive import as_chain
from specdec_jax.models import families
from specdec_jax.text import vocabularies


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(one_by_one.OneByOne):
  """A smaller model; see `drafters.autoregressive`. If a
  `draft_vocabulary.json` lies beside the weights, only its tokens are drafted;
  see `models.read_draft_vocabulary`."""

  model: models.Model

  # A CPU scores four drafted tokens for little more than one: products.py.
  tried = (1, 4, 9)

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    config = models.read_config(self.model)
    _check_fits(self.model, config, target)
    network, few = networks(self.model, config, target)
    return Drafting(
      drafter=one_by_one.drafter(
        network, target, length, min_prob=self.min_prob, few=few
      ),
      model=self.model,
      config=config,
      join=lambda target, own: (
        models.with_logits_of(own, few[1], config) if few else own
      ),
      chain=as_chain(network),
    )


def networks(
  model: models.Model, config: families.Config, target: Target
) -> tuple[LanguageModel, tuple[LanguageModel, np.ndarray] | None]:
  """Returns a draft model with logits of the target's ids and, if it has a
  draft vocabulary, also `few` as for `one_by_one.drafter`."""
  network = families.language_model(config)
  num_logits = target.config.vocab_size
  ids = models.read_draft_vocabulary(model, target.vocab_size)
  if ids is None:
    # Target or draft model may be padded further: padding has probability zero
    # in p and q.
    return families.with_logits_of(network, num_logits), None
  few, network = families.with_draft_vocabulary(network, ids, num_logits)
  return network, (few, ids)


def _check_fits(
  model: models.Model, config: families.Config, target: Target
) -> None:
  """Raises unless target and draft model read the same, in one vocabulary."""
  # A caller that gives the sizes themselves has compared the vocabularies.
  if isinstance(model.sizes, str | None):
    if target.vocabulary is None:
      target.check_num_logits(config.vocab_size)
    else:
      vocabularies.check_same_vocabulary(
        target.vocabulary, models.read_vocabulary(model, config)
      )
  kinds = [
    'an encoder-decoder' if families.has_encoder(each) else 'decoder-only'
    for each in (target.config, config)
  ]
  if kinds[0] != kinds[1]:
    raise ValueError(
      f'{target.name} is {kinds[0]} and {model.checkpoint} {kinds[1]}'
    )
