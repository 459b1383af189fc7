"""Copies from the context, as a choice."""

import dataclasses

from specdec_jax import drafters, trees
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.option_fields import option
from specdec_jax.base import Tree
from specdec_jax.launch.numbers import positive_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
  """Copies from the context; see `drafters.prompt_lookup`, and for several
  copies at once, which are a tree, `drafters.continuations`."""

  gamma: lengths.Gamma | None = lengths.gamma_option()
  max_ngram: int = option(
    3, 'longest suffix that prompt_lookup looks up', type=positive_int
  )
  min_ngram: int | None = option(
    None,
    'shortest suffix that prompt_lookup trusts (default: 2, or max_ngram if '
    'that is less)',
    type=positive_int,
  )
  num_continuations: int = lengths.continuations_option()

  def __post_init__(self):
    # Checked here, before a model is loaded, with the names of the options.
    if self.min_ngram is not None and self.min_ngram > self.max_ngram:
      raise ValueError(
        f'min_ngram {self.min_ngram} exceeds max_ngram {self.max_ngram}'
      )

  @property
  def length(self) -> lengths.LengthChoice:
    # Copying costs nothing, so that wide drafts are tried as well.
    return lengths.of(
      gamma=self.gamma,
      usual=8,
      num_continuations=self.num_continuations,
      tried=(3, 11, 23),
    )

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    if isinstance(length, Tree):
      # Each continuation is a chain that hangs from the root.
      drafter = drafters.continuations(
        gamma=trees.depth(length),
        num_continuations=length.parents.count(0),
        max_ngram=self.max_ngram,
        min_ngram=self.min_ngram,
      )
    else:
      drafter = drafters.prompt_lookup(
        gamma=lengths.fixed(length),
        max_ngram=self.max_ngram,
        min_ngram=self.min_ngram,
      )
    return Drafting(drafter=drafter)
