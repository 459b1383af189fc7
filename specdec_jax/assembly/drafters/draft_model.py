"""A smaller language model, as a choice."""

import dataclasses
from typing import Any

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

    def join(_: Any, params: Any) -> Any:
      if few is None:
        return params
      # The draft model's logits are those of its draft vocabulary.
      _, ids = few
      return models.with_logits_of(params, ids, config)

    return Drafting(
      drafter=one_by_one.drafter(
        network, target, length, min_prob=self.min_prob, few=few
      ),
      model=self.model,
      config=config,
      join=join,
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
  target_stacks, draft_stacks = _stacks(target.config), _stacks(config)
  if target_stacks != draft_stacks:
    raise ValueError(
      f'{target.name} is {target_stacks} and {model.checkpoint} {draft_stacks}'
    )


def _stacks(config: families.Config) -> str:
  """Returns, for errors, which stacks a network has."""
  return (
    'an encoder-decoder' if families.has_encoder(config) else 'decoder-only'
  )
