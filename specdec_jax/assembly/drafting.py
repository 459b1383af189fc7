"""Drafters as choices: for flags, gin files, T5X and Python alike; a new one is
a frozen dataclass like `DrafterChoice`, and a row of `DRAFTERS`."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from specdec_jax import drafters
from specdec_jax.assembly import models, one_by_one
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.option_fields import field_names, option
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Drafter, LanguageModel
from specdec_jax.data import ngram_counts
from specdec_jax.drafters.schedules import Schedule
from specdec_jax.drafters.stateless import MAX_GAMMA
from specdec_jax.launch.numbers import number, positive_int
from specdec_jax.models import families
from specdec_jax.models.families import Config, DrafterConfig
from specdec_jax.text.vocabularies import AnyVocabulary

_GAMMA = 'drafted tokens per iteration, at most'
# Measured on the first rows of a run; see docs/design.md.
AUTO = 'auto'
gamma_number = number(
  int, lambda n: 1 <= n <= MAX_GAMMA, f'an integer from 1 to {MAX_GAMMA}'
)


def gamma_type(text: str) -> Any:
  """An argparse type: a number of tokens, or 'auto'."""
  return AUTO if text == AUTO else gamma_number(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """What a drafter may know of the target; a dry run has no vocabulary."""

  name: str
  config: Config
  vocabulary: AnyVocabulary | None
  sampling: Sampling

  @property
  def vocab_size(self) -> int:
    """Ids with a token; the others are padding."""
    if self.vocabulary is None:
      return self.config.vocab_size
    # A tokenizer may have tokens of other models of its family.
    return min(self.vocabulary.vocab_size, self.config.vocab_size)

  @property
  def eos_id(self) -> tuple[int, ...]:
    """Ids that end a row."""
    return (self.vocabulary and self.vocabulary.eos_ids) or (-1,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
  """A drafter made for a target.

  Attributes:
    drafter: its functions.
    model: where its weights are, of the sizes `config`, if it has any.
    target: the target's functions, where the drafter needs others than usual.
    join: from the target's weights and its own to the drafter's params.
  """

  drafter: Drafter
  model: Model | None = None
  config: Config | DrafterConfig | None = None
  target: LanguageModel | None = None
  join: Callable[[Any, Any], Any] = lambda target, own: own


class DrafterChoice(Protocol):
  """What every choice has: the drafter for a target, or ValueError if it does
  not fit it."""

  def make(self, target: Target) -> Drafting: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDrafter:
  """Plain decoding, through the same loop."""

  def make(self, target: Target) -> Drafting:
    return Drafting(drafter=drafters.none())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
  """Copies from the context; see `drafters.prompt_lookup`, and for several
  copies at once `drafters.continuations`."""

  gamma: Any = option(8, _GAMMA, type=gamma_type)
  max_ngram: int = option(
    3, 'longest suffix that prompt_lookup looks up', type=positive_int
  )
  min_ngram: int | None = option(
    None,
    'shortest suffix that prompt_lookup trusts (default: 2, or max_ngram if '
    'that is less)',
    type=positive_int,
  )
  num_continuations: int = option(
    1,
    'several continuations, each of gamma tokens, as a tree',
    type=positive_int,
  )

  def __post_init__(self):
    if self.gamma == AUTO and self.num_continuations > 1:
      raise ValueError(
        'gamma auto measures chains: leave out num_continuations'
      )
    if self.min_ngram is not None and self.min_ngram > self.max_ngram:
      raise ValueError(
        f'min_ngram {self.min_ngram} exceeds max_ngram {self.max_ngram}'
      )

  def make(self, target: Target) -> Drafting:
    options = dict(vars(self))
    if options.pop('num_continuations') == 1:
      return Drafting(drafter=drafters.prompt_lookup(**options))
    return Drafting(drafter=drafters.continuations(**vars(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
  """Guesses at random; see `drafters.uniform`."""

  gamma: Any = option(4, _GAMMA, type=gamma_type)

  def make(self, target: Target) -> Drafting:
    drafter = drafters.uniform(
      gamma=self.gamma,
      vocab_size=target.vocab_size,
      padded_vocab_size=target.config.vocab_size,
    )
    return Drafting(drafter=drafter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram:
  """Counts a text file; see `drafters.ngram`. `is_sampled` draws from counts,
  whose likeliest token is drafted otherwise; None draws where the target does.
  """

  ngram_text: str = option('', 'the text file that ngram counts')
  gamma: Any = option(4, _GAMMA, type=gamma_type)
  is_sampled: bool | None = None

  def __post_init__(self):
    if not self.ngram_text:
      raise ValueError('drafter ngram needs ngram_text, the file to count')

  def make(self, target: Target) -> Drafting:
    if target.vocabulary is None:
      raise ValueError('a dry run counts no text: leave the n-gram drafter out')
    try:
      tokens = ngram_counts.tokens_of_file(self.ngram_text, target.vocabulary)
    except ValueError as error:
      raise ValueError(f'ngram_text: {error}') from error
    table = ngram_counts.estimate(tokens, vocab_size=target.config.vocab_size)
    is_sampled = self.is_sampled
    if is_sampled is None:
      is_sampled = not target.sampling.is_greedy
    to_probs = target.sampling.to_probs(target.vocab_size)
    drafter = drafters.ngram(
      table, gamma=self.gamma, logits_to_probs=to_probs if is_sampled else None
    )
    return Drafting(drafter=drafter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
  """A smaller model; see `drafters.autoregressive`. With a `schedule`, or with
  `min_prob`, gamma is the most that is drafted; see `drafters.adaptive`. With a
  `tree` it is the depth; see `drafters.branching` and `one_by_one.tree_of`."""

  model: Model
  gamma: Any = option(4, _GAMMA, type=gamma_type)
  tree: Any = option(None, one_by_one.TREE, type=one_by_one.tree_type)
  schedule: Schedule | None = None
  min_prob: float = 0.0

  def __post_init__(self):
    one_by_one.check(self)

  def make(self, target: Target) -> Drafting:
    config = models.read_config(self.model)
    models.check_draft_model(
      self.model,
      config,
      target=target.name,
      target_config=target.config,
      vocabulary=target.vocabulary,
    )
    model = families.with_logits_of(
      families.language_model(config), target.config.vocab_size
    )
    drafter = one_by_one.drafter(
      self, model, target.sampling, target.vocab_size
    )
    return Drafting(drafter=drafter, model=self.model, config=config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle:
  """An EAGLE-3 network that was trained for the target; see `drafters.eagle`.

  With a `schedule`, `min_prob` or a `tree`, gamma is as for `DraftModel`. With
  `lookup`, text that the context has already is copied from it, as
  `PromptLookup` does.
  """

  model: Model
  gamma: Any = option(4, _GAMMA, type=gamma_type)
  tree: Any = option(None, one_by_one.TREE, type=one_by_one.tree_type)
  lookup: bool = option(
    False, 'copy where prompt_lookup finds something, let eagle draft elsewhere'
  )
  schedule: Schedule | None = None
  min_prob: float = 0.0

  def __post_init__(self):
    one_by_one.check(self)

  def make(self, target: Target) -> Drafting:
    config = models.read_drafter_config(
      self.model, 'with_features', 'EAGLE-3 drafter'
    )
    models.check_head(self.model, config, target.config, target.vocabulary)
    with_features = families.of(config).with_features
    assert with_features is not None
    keeping, network = with_features(
      target.config, config, width=one_by_one.depth(self) + 1
    )
    first = drafters.prompt_lookup(gamma=self.gamma) if self.lookup else None
    drawn = target.sampling, target.vocab_size, first
    return Drafting(
      drafter=one_by_one.drafter(self, drafters.eagle(network), *drawn),
      model=self.model,
      config=config,
      target=keeping,
      join=lambda target, own: {
        'eagle': own,
        # The target's, unless it has its own.
        'token_embedder': (target | own)['token_embedder'],
      },
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecDrafter:
  """A block of k = gamma tokens in one pass; see `drafters.spec_drafter`.

  Attributes:
    model: the folder that `specdec train` wrote; in a dry run, `sizes` alone,
      a name of `presets.SPEC_DRAFTERS`, will do.
  """

  model: Model
  gamma: Any = option(25, _GAMMA, type=gamma_type)

  def make(self, target: Target) -> Drafting:
    config = models.read_drafter_config(
      self.model, 'block_model', 'Spec-Drafter'
    )
    if config.vocab_size != target.config.vocab_size:
      raise ValueError(
        f'the target has {target.config.vocab_size} logits, the Spec-Drafter '
        f'{config.vocab_size}'
      )
    drafter = drafters.spec_drafter(
      families.block_model(config),
      gamma=self.gamma,
      vocab_size=target.vocab_size,
    )
    return Drafting(drafter=drafter, model=self.model, config=config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeads:
  """Heads on the target's decoder, `gamma` of them, None for all, in a folder
  that `specdec train` wrote; see `drafters.blockwise_heads`."""

  model: Model
  gamma: Any = option(None, _GAMMA, type=gamma_type)

  def make(self, target: Target) -> Drafting:
    config = models.read_drafter_config(
      self.model, 'with_heads', 'set of heads'
    )
    gamma = config.gamma if self.gamma is None else self.gamma
    if gamma > config.gamma:
      raise ValueError(
        f'gamma {gamma} is more than the {config.gamma} heads of '
        f'{self.model.checkpoint}'
      )
    with_heads = families.of(config).with_heads
    assert with_heads is not None
    model, heads = with_heads(target.config, config)

    def first_heads(params, cache, lengths):
      logits, is_ready = heads(params, cache, lengths)
      return logits[:, :gamma], is_ready

    return Drafting(
      drafter=drafters.blockwise_heads(first_heads, gamma=gamma),
      model=self.model,
      config=config,
      target=model,
      join=lambda target, own: {'heads': own, 'target': target},
    )


DRAFTERS: dict[str, type] = {
  'prompt_lookup': PromptLookup,
  'ngram': NGram,
  'uniform': Uniform,
  'model': DraftModel,
  'eagle': Eagle,
  'spec_drafter': SpecDrafter,
  'block_heads': BlockHeads,
  'none': NoDrafter,
}


# What 'auto' tries; each plus 1 divides the next plus 1. Heads have a gamma.
_TRIED = {
  PromptLookup: (3, 11, 23),
  DraftModel: (2, 5, 11),
  SpecDrafter: (5, 11, 23),
}


def is_auto(choice: Any) -> bool:
  """Whether the gamma of a choice is yet to be measured; ValueError if it is
  another word."""
  gamma = getattr(choice, 'gamma', None)
  if isinstance(gamma, str) and gamma != AUTO:
    raise ValueError(f'gamma {gamma!r} is neither a number nor {AUTO!r}')
  return gamma == AUTO


def auto_gammas(choice: Any) -> tuple[int, ...]:
  """What 'auto' tries, ascending: 0, and up to three of which each divides the
  next, all plus 1."""
  if not isinstance(choice, BlockHeads):
    return (0, *_TRIED.get(type(choice), (1, 3, 7)))
  widest = models.read_drafter_config(
    choice.model, 'with_heads', 'set of heads'
  ).gamma
  tried = {(widest + 1) // part - 1 for part in (1, 2, 4)}
  return (0, *sorted(tried - {0, -1}))


def has_model(choice: type) -> bool:
  """Whether a kind of drafter has weights, which a model names."""
  return 'model' in field_names(choice)


def has_schedule(choice: type) -> bool:
  """Whether a kind of drafter drafts one by one, so that gamma may vary."""
  return 'schedule' in field_names(choice)


def with_gamma(choice: Any, gamma: int) -> Any:
  """The same drafter with a gamma that is given and does not vary; none for
  gamma 0."""
  if not gamma:
    return NoDrafter()
  changed: dict[str, Any] = {'gamma': gamma}
  if has_schedule(type(choice)):
    changed |= {'schedule': None, 'min_prob': 0.0}
  return dataclasses.replace(choice, **changed)


def ranked(choice: Any, target: Target, num_children: int) -> Drafter:
  """A drafter that can draft trees, with its likeliest tokens as children of
  the root and nothing below."""
  options = {
    **{'tree': (0,) * num_children, 'num_continuations': num_children},
    **{'schedule': None, 'min_prob': 0.0, 'lookup': False, 'gamma': 1},
  }
  names = field_names(type(choice))
  changed = {name: options[name] for name in options if name in names}
  target = dataclasses.replace(target, sampling=Sampling())
  made: Drafting = dataclasses.replace(choice, **changed).make(target)
  return made.drafter
