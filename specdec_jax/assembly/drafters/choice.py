"""What every choice of a drafter has, and what a drafter is made for."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from specdec_jax.assembly.lengths import Length, LengthChoice
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.option_fields import field_names
from specdec_jax.assembly.rules import Rule
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Drafter, LanguageModel
from specdec_jax.checkpoints import loading
from specdec_jax.decoding.method import Method
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.models import families
from specdec_jax.text.vocabularies import AnyVocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """What a drafter may know of the target; a dry run has no vocabulary."""

  name: str
  config: families.Config
  vocabulary: AnyVocabulary | None
  sampling: TextSettings

  @property
  def vocab_size(self) -> int:
    """Ids with a token; the others are padding."""
    if self.vocabulary is None:
      return self.config.vocab_size
    # A tokenizer may have tokens of other models of its family.
    # Of 32,100 pieces and 32,128 logits, the last 28 are padding.
    return min(self.vocabulary.vocab_size, self.config.vocab_size)

  @property
  def eos_id(self) -> tuple[int, ...]:
    """Ids that end a row."""
    # -1 is no token: nothing ends a row of a dry run but its limit.
    return (self.vocabulary and self.vocabulary.eos_ids) or (-1,)

  def check_num_logits(self, num_logits: int) -> None:
    """Raises ValueError unless a drafter has as many logits but for padding."""
    target_logits = self.config.vocab_size
    if not loading.is_padding(num_logits - target_logits):
      raise ValueError(
        f'the target has {target_logits} logits, the drafter {num_logits}'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
  """A drafter made for a target.

  Attributes:
    drafter: its functions.
    model: where its weights are, of the sizes `config`, if it has any.
    target: the target's functions, where the drafter needs others than usual.
    join: from the weights of the target and of `model` to the drafter's params.
    chain: what it drafts with, if token after token.
  """

  drafter: Drafter
  model: Model | None = None
  config: families.Config | families.DrafterConfig | None = None
  target: LanguageModel | None = None
  join: Callable[[Any, Any], Any] = lambda target, draft_model: draft_model
  chain: Chain | None = None

  def target_of(self, target: Target) -> LanguageModel:
    """Returns the target's functions."""
    return self.target or families.language_model(target.config)

  def method(self, target: Target, rule: Rule) -> Method:
    """Returns what all loops take; its sampling is the target's as the rule
    sees it. ValueError if the rule does not fit the drafts or the sampling."""
    judge = rule.judge(target.sampling)
    return Method(
      target=self.target_of(target),
      drafter=self.drafter,
      verify_fn=judge.verify_fn(self.drafter.tree),
      logits_to_probs=judge.sampling.to_probs(target.vocab_size),
      eos_id=target.eos_id,
      num_ids=target.vocab_size,
    )


class DrafterChoice(Protocol):
  """A drafter as users choose it.

  Attributes:
    length: how much is drafted.
    make: the drafter for a target and a length, which is `length` unless that
      is `Auto`; ValueError if they do not go together.
  """

  @property
  def length(self) -> LengthChoice: ...

  def make(self, target: Target, length: Length) -> Drafting: ...


def has_model(choice: type) -> bool:
  """Returns whether a drafter has weights, which a model names."""
  return 'model' in field_names(choice)
