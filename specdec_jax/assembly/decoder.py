"""From choices to a decoder: the one way, for every entry point."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.stages import Compiled

from specdec_jax.assembly import models
from specdec_jax.assembly import recipe as recipe_lib
from specdec_jax.assembly.drafters import DrafterChoice, NoDrafter
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.assembly.lengths import Auto, Fixed, LengthChoice, usual
from specdec_jax.assembly.models import Model, Waiting
from specdec_jax.assembly.option_fields import hashable
from specdec_jax.assembly.recipe import Parts, Recipe, parts_of
from specdec_jax.assembly.rules import Rule, SpeculativeSampling
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Drafter, LanguageModel, Params, Tree
from specdec_jax.checkpoints import formats, loading
from specdec_jax.checkpoints.formats import Shardings
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.program import Part, Program
from specdec_jax.drafters import Pool, text_pool
from specdec_jax.launch import agreement
from specdec_jax.models import families
from specdec_jax.text import generation_config
from specdec_jax.text.stop_strings import split_stops
from specdec_jax.text.vocabularies import AnyVocabulary


class ProgramKey(NamedTuple):
  """What a compiled program depends on.

  Attributes:
    recipe: that of the decoder.
    parts: the function that chose the parts of `decoding.program` to compile.
    shapes: of the prompts of a batch, as text.
    max_len: the room of a row.
    num_devices: that share a batch.
  """

  recipe: Recipe
  parts: Callable[[Program], Sequence[Part]]
  shapes: str
  max_len: int
  num_devices: int


@dataclasses.dataclass(frozen=True)
class Cache:
  """What the decoders that are derived from one share.

  Attributes:
    parts: the functions of each recipe.
    programs: what was compiled.
    gammas: what was measured, by recipe; see `Decoder.gammas`.
  """

  parts: dict[Recipe, Parts] = dataclasses.field(default_factory=dict)
  programs: dict[ProgramKey, Sequence[Compiled]] = dataclasses.field(
    default_factory=dict
  )
  gammas: dict[Recipe, dict[tuple[int, int], RememberedGamma]] = (
    dataclasses.field(default_factory=dict)
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
  """Models and rules, ready to be jitted.

  Attributes:
    recipe: what was chosen. If gamma is yet to be chosen, it has the widest one
      that may be.
    parts: the functions of the recipe.
    params: weights of target and drafter; `jax.ShapeDtypeStruct`s until `load`.
    sampling: how texts are sampled that do not say.
    auto: the gammas of which one is chosen once the rows of a batch are known,
      see `settled_gamma`; None: gamma is that of the recipe. `at` gives the
      decoder of one gamma.
    stop: the model's own strings that end a text, unless others are given.
    cache: what is compiled, for this decoder and those derived from it.
  """

  recipe: Recipe
  parts: Parts
  params: Params = dataclasses.field(repr=False)
  sampling: TextSettings
  auto: Auto | None = None
  stop: tuple[str, ...] = ()
  cache: Cache = dataclasses.field(default_factory=Cache, repr=False)

  @property
  def model(self) -> Model:
    return self.recipe.model

  @property
  def config(self) -> families.Config:
    return self.parts.target_info.config

  @property
  def vocabulary(self) -> AnyVocabulary:
    """That of both models; ValueError for a dry run, which has none."""
    if self.parts.target_info.vocabulary is None:
      raise ValueError('a dry run has no vocabulary')
    return self.parts.target_info.vocabulary

  @property
  def method(self) -> Method:
    return self.parts.method

  @property
  def target(self) -> LanguageModel:
    return self.method.target

  @property
  def drafter(self) -> Drafter:
    return self.method.drafter

  @property
  def is_auto(self) -> bool:
    """Whether gamma is yet to be chosen."""
    return self.auto is not None

  @property
  def tried_gammas(self) -> tuple[int, ...]:
    """The gammas to choose from, ascending, 0 among them; empty if gamma is
    given."""
    return () if self.auto is None else self.auto.gammas

  @property
  def programs(self) -> dict[ProgramKey, Sequence[Compiled]]:
    """What was compiled, also by decoders that share the cache."""
    return self.cache.programs

  @property
  def gammas(self) -> dict[tuple[int, int], RememberedGamma]:
    """The gammas that were measured, by the rows and devices of a batch."""
    return self.cache.gammas.setdefault(self.recipe, {})

  @property
  def shapes(self) -> Params:
    """The shapes of the weights, without reading them."""
    drafting = self.parts.drafting
    target = models.param_shapes(self.model, self.config)
    draft_model: Any = ()
    if drafting.config is not None:
      draft_model = models.param_shapes(drafting.model, drafting.config)
    return Params(target=target, drafter=drafting.join(target, draft_model))

  def at(self, gamma: int) -> 'Decoder':
    """Returns the decoder with a gamma; see `Recipe.at`.

    Its programs are compiled once, however often it is asked for. TypeError for
    what is no integer, and ValueError above 0 for plain decoding.
    """
    gamma = operator.index(gamma)
    if gamma and self.recipe.decodes_plainly:
      raise ValueError('plain decoding has no gamma: ask the one that drafts')
    params = self.params
    if not (gamma or self.recipe.exact_bits):
      params = Params(target=params.target)
    derived = self._with_recipe(self.recipe.at(gamma))
    return dataclasses.replace(derived, params=params, auto=None)

  @property
  def sampled(self) -> 'Decoder':
    """The decoder of batches that say how each row is sampled: itself, unless
    it is greedy. ValueError if its rule is for greedy decoding alone."""
    if not self.sampling.is_greedy:
      return self
    # Whatever temperature above 0 will do: each row has its own.
    drawn = dataclasses.replace(self.recipe.sampling, temperature=1.0)
    derived = self._with_recipe(
      dataclasses.replace(self.recipe, sampling=drawn)
    )
    sampling = dataclasses.replace(self.sampling, temperature=1.0)
    return dataclasses.replace(derived, sampling=sampling)

  def with_method(self, method: Method) -> 'Decoder':
    """Returns a decoder with another method than that of its recipe, which
    shares no programs."""
    parts = dataclasses.replace(self.parts, method=method)
    return dataclasses.replace(self, parts=parts, cache=Cache())

  def _with_recipe(self, recipe: Recipe) -> 'Decoder':
    """Returns the decoder of another recipe, with these weights."""
    cached = self.cache.parts
    if recipe not in cached:
      info = self.parts.target_info
      cached[recipe] = parts_of(recipe, info.config, info.vocabulary)
    return dataclasses.replace(self, recipe=recipe, parts=cached[recipe])

  def remember(self, texts: Iterable[str | Sequence[int]]) -> 'Decoder':
    """Returns the decoder with more texts to copy from, strings or token ids
    such as `Completion.context`; the oldest make room.

    All are sorted anew, so that many are better given at once; nothing is
    compiled again. ValueError if the drafter is not 'suffix', a text is
    neither, or an id is none of the target.
    """
    if isinstance(texts, str):
      raise ValueError('texts is a string: give a list of them')
    if not isinstance(pool := self.params.drafter, Pool):
      raise ValueError("only a decoder with drafter='suffix' remembers texts")
    encode = functools.partial(self.vocabulary.encode, add_special_tokens=False)
    ids = [encode(text) if isinstance(text, str) else text for text in texts]
    most = self.parts.target_info.vocab_size - 1
    for i, row in enumerate(ids, start=1):
      if not isinstance(row, Iterable):
        raise ValueError(f'text {i} is neither a string nor ids: {row!r}')
      row = ids[i - 1] = list(row)  # An iterator is read once.
      if min(row, default=0) < 0 or max(row, default=0) > most:
        raise ValueError(f'text {i} has ids that are not from 0 to {most}')
    pool = jax.device_put(text_pool.remember(pool, ids))
    params = self.params._replace(drafter=pool)
    return dataclasses.replace(self, params=params)

  def ranked_drafter(self, num_children: int) -> Drafter:
    """Makes a drafter of trees of depth 1, the likeliest tokens first."""
    # Ranks are of the drafter's own distribution, whatever is sampled.
    target_info = self.parts.target_info
    greedy = dataclasses.replace(target_info, sampling=TextSettings())
    tree = Tree((0,) * num_children)
    return self.recipe.drafter.make(greedy, tree).drafter

  @property
  def max_positions(self) -> int:
    """The longest context of the target."""
    return recipe_lib.max_positions(self.config)

  @property
  def draft_positions(self) -> int:
    """The longest context of a draft model: beyond it, texts are decoded on
    without drafts."""
    return recipe_lib.draft_positions(self.parts.drafting)

  @property
  def max_drafted(self) -> int:
    """The longest text that a network that only drafts has positions for."""
    config = self.parts.drafting.config
    if config is None or not families.only_drafts(config):
      return recipe_lib.UNLIMITED
    return recipe_lib.max_positions(config)

  def digests(self) -> dict[str, str]:
    """Returns digests of the weights on disk, by role, of the vocabulary, and
    of what is stated in other files; see `agreement`."""
    # Random weights are no files, and the same in every run.
    drafting = self.parts.drafting
    models_by_role = {'target': self.model, 'drafter': drafting.model}
    stated: list[object] = [self.config, drafting.config, self.sampling]
    grammar = self.sampling.grammar_text()
    if grammar is not None:
      stated.append(grammar)
    texts = {
      'sizes and sampling': repr([*stated, self.parts.target_info.eos_id]),
      'the vocabulary': repr(self.vocabulary.tokens()),
    }
    digests = {
      f'digest of {name}': agreement.of_settings({'': text})[:16]
      for name, text in texts.items()
    }
    for role, model in models_by_role.items():
      if model is not None and not model.is_random:
        files = formats.parts(loading.locate(model.checkpoint))
        digest = agreement.of_files(files)
        digests[f"digest of the {role}'s weights"] = digest
    return digests


def outline(
  model: Model,
  *,
  drafter: DrafterChoice,
  rule: Rule = SpeculativeSampling(),
  sampling: TextSettings = TextSettings(),
  is_dry_run: bool = False,
  exact_bits: bool = False,
) -> Decoder:
  """Makes a decoder without reading its weights, nor in a dry run a vocabulary;
  raises as `api.load`."""
  length, judge = drafter.length, rule.judge(sampling)
  if isinstance(drafter, NoDrafter):
    length = drafter.width(exact_bits)
  judge.sampling.check_is_used()

  # Where texts would depend on gamma, speed may not choose it.
  config = models.read_config(model)
  is_free = judge.is_lossless and not exact_bits
  length = _fitting(length, is_free, recipe_lib.max_positions(config))
  if isinstance(length, Auto) and not is_free:
    needs, what = 'exact_bits', 'bits depend on the width of the call'
    if not exact_bits:
      needs, what = 'a rule that is not lossless', 'texts depend on gamma'
    raise ValueError(f'{needs} needs a gamma that is a number: {what}')

  # The model's own files may change the sampling, and end texts.
  vocabulary = None if is_dry_run else models.read_vocabulary(model, config)
  stop: tuple[str, ...] = ()
  if vocabulary is not None and not model.is_random:
    path = loading.locate(model.checkpoint)
    loading.warn_of(path)
    sampling = _with_stated(sampling, *generation_config.stated(path))
    stop, vocabulary = split_stops(
      generation_config.read_stops(path), vocabulary
    )
  decoder = assembled(
    model,
    config,
    vocabulary,
    drafter=drafter,
    rule=rule,
    sampling=sampling,
    length=length,
    exact_bits=exact_bits,
  )
  return dataclasses.replace(decoder, stop=stop)


def _with_stated(
  sampling: TextSettings, path: str, stated: Mapping[str, Any]
) -> TextSettings:
  """Adds what a file states of sampling, and the user does not.

  ValueError, which names the file, if a value is out of range.
  """
  explicit = sampling.explicit()
  added = {name: x for name, x in stated.items() if name not in explicit}
  try:
    return sampling.over(TextSettings(**added))
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def assembled(
  model: Model,
  config: families.Config,
  vocabulary: AnyVocabulary | None,
  *,
  drafter: DrafterChoice,
  rule: Rule,
  sampling: TextSettings,
  length: LengthChoice,
  exact_bits: bool = False,
) -> Decoder:
  """Makes a decoder for a target whose sizes and vocabulary are at hand, with
  `shapes` in place of weights; those of a network whose gamma is yet to be
  chosen are left out. ValueError if a draft does not fit into a context."""
  auto: Auto | None = None
  if isinstance(length, Auto):
    # The widest gamma needs the most room.
    auto, length = length, Fixed(length.gammas[-1])
  recipe = Recipe(
    model=model,
    drafter=hashable(drafter),
    rule=hashable(rule),
    sampling=sampling.drawing,
    length=length,
    exact_bits=exact_bits,
  )
  parts = parts_of(recipe, config, vocabulary)
  target_shapes = models.param_shapes(model, config)
  decoder = Decoder(
    recipe=recipe,
    parts=parts,
    params=Params(target=target_shapes),
    sampling=sampling.over(TextSettings(temperature=0.0)),
    auto=auto,
    cache=Cache(parts={recipe: parts}),
  )
  # Plain decoding may be chosen, and to trace a draft model takes a while.
  if parts.drafting.config is None or not decoder.is_auto:
    decoder = dataclasses.replace(decoder, params=decoder.shapes)
  # Each call needs gamma + 1 positions, of which one is of the prompt.
  gamma = decoder.drafter.gamma
  limit = min(decoder.max_positions, decoder.draft_positions)
  if gamma >= limit:
    raise ValueError(f'gamma {gamma} is too large for a context of {limit}')
  return decoder


def own_params(params: Params) -> Any:
  """Returns the drafter's tree with None for arrays, or shapes, that are the
  target's very own."""
  shared = {id(leaf) for leaf in jax.tree.leaves(params.target)}
  return jax.tree.map(
    lambda leaf: None if id(leaf) in shared else leaf, params.drafter
  )


def _fitting(length: LengthChoice, is_free: bool, limit: int) -> LengthChoice:
  """Fits a gamma that was not given: to a fixed one if texts would depend on
  the choice, otherwise to trials of drafts that have room."""
  if not isinstance(length, Auto) or length.usual is None:
    return length
  gammas = tuple(gamma for gamma in length.gammas if gamma < limit)
  # Otherwise texts would depend on speed, which chooses gamma.
  if not is_free or len(gammas) < 2:
    return usual(length)
  return dataclasses.replace(length, gammas=gammas)


def load(
  decoder: Decoder,
  *,
  target_shardings: Shardings | None = None,
  drafter_shardings: Shardings | None = None,
  waiting: Waiting = contextlib.nullcontext,
) -> Decoder:
  """Reads the weights, to where `models.read_params` puts them.

  `waiting` is entered with a sentence while a model is read. Raises ValueError
  if a checkpoint has other arrays.
  """
  drafting = decoder.parts.drafting
  draft_model: Any = ()
  with waiting(f'loading {decoder.model.checkpoint}'):
    target = models.read_params(decoder.model, decoder.config, target_shardings)
  # A model that drafts for itself is read once, and lies on a mesh once.
  if drafting.model == decoder.model:
    draft_model = target
  elif drafting.model is not None and drafting.config is not None:
    with waiting(f'loading {drafting.model.checkpoint}'):
      draft_model = models.read_params(
        drafting.model, drafting.config, drafter_shardings
      )
  drafter = drafting.join(target, draft_model)
  params = Params(target=target, drafter=drafter)
  return dataclasses.replace(decoder, params=params)


def build(
  model: Model,
  *,
  drafter: DrafterChoice,
  rule: Rule = SpeculativeSampling(),
  sampling: TextSettings = TextSettings(),
  exact_bits: bool = False,
  waiting: Waiting = contextlib.nullcontext,
) -> Decoder:
  """Makes a decoder for one device; see `outline` and `load`."""
  decoder = outline(
    model, drafter=drafter, rule=rule, sampling=sampling, exact_bits=exact_bits
  )
  return load(decoder, waiting=waiting)
