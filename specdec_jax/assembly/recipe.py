"""What a decoder is made from, and the functions that follow from it."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.assembly.drafters import DrafterChoice, NoDrafter
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.lengths import Fixed, Length
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import Rule
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.decoding import exact_bits
from specdec_jax.decoding.method import Method
from specdec_jax.models import families
from specdec_jax.text.vocabularies import AnyVocabulary

# Stands for a context without a limit.
UNLIMITED = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """All that the programs of a decoder depend on, but shapes and devices.

  Two decoders of equal recipes can run each other's programs.

  Attributes:
    model: the target by name.
    drafter: the drafter as it was chosen.
    rule: the acceptance rule as it was chosen.
    sampling: the temperature and the limits of sampling. Processors and
      grammars are data of each row, and not of the program.
    length: how much is drafted.
    exact_bits: whether each target call is as wide as the longest draft, so
      that no bit of a row depends on what was drafted.
    is_plain: whether, with `exact_bits`, drafts are made and ignored.
  """

  model: Model
  drafter: DrafterChoice
  rule: Rule
  sampling: TextSettings
  length: Length
  exact_bits: bool = False
  is_plain: bool = False

  @property
  def decodes_plainly(self) -> bool:
    """Whether no draft is ever accepted."""
    return self.is_plain or isinstance(self.drafter, NoDrafter)

  def at(self, gamma: int) -> 'Recipe':
    """Returns the recipe of another gamma.

    Gamma 0 drops the drafter. With `exact_bits` it is kept, since a call must
    stay as wide; its drafts are ignored.
    """
    if gamma:
      return dataclasses.replace(self, length=Fixed(gamma))
    if self.exact_bits:
      return dataclasses.replace(self, is_plain=True)
    return dataclasses.replace(self, drafter=NoDrafter(), length=Fixed(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """The functions of a recipe.

  Attributes:
    target_info: what the drafter knows of the target.
    drafting: the drafter as it was made for the target.
    method: what all loops take.
  """

  target_info: Target
  drafting: Drafting
  method: Method


def parts_of(
  recipe: Recipe, config: families.Config, vocabulary: AnyVocabulary | None
) -> Parts:
  """Makes the functions of a recipe, for a target of these sizes.

  A dry run has no vocabulary. Raises ValueError if the choices do not go
  together.
  """
  target_info = Target(
    name=recipe.model.checkpoint,
    config=config,
    vocabulary=vocabulary,
    sampling=recipe.sampling,
  )
  drafting = recipe.drafter.make(target_info, recipe.length)

  # Beyond the context of a draft model, texts are decoded without drafts.
  limit = draft_positions(drafting)
  if limit < max_positions(config):
    bounded = drafters.within(drafting.drafter, limit)
    drafting = dataclasses.replace(drafting, drafter=bounded)

  method = drafting.method(target_info, recipe.rule)
  if recipe.exact_bits:
    method = exact_bits.of_one_width(method)
  if recipe.is_plain:
    method = exact_bits.plain(method)
  return Parts(target_info=target_info, drafting=drafting, method=method)


def draft_positions(drafting: Drafting) -> int:
  """Returns the longest context of a draft model, without a limit for all other
  drafters: a network that only drafts reads as far as its target does."""
  config = drafting.config
  if config is None or families.only_drafts(config):
    return UNLIMITED
  return max_positions(config)


def max_positions(config: families.AnyConfig) -> int:
  """Returns the longest context of a network."""
  limit = families.of(config).max_positions(config)
  return UNLIMITED if limit is None else limit
