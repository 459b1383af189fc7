"""From choices to a decoder: the one way, for every entry point."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.stages import Compiled

from specdec_jax import drafters
from specdec_jax.assembly import constraints, models
from specdec_jax.assembly.drafters import DrafterChoice, NoDrafter
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.assembly.lengths import Auto, Fixed, Length, usual
from specdec_jax.assembly.models import Model, Waiting
from specdec_jax.assembly.rules import Rule, SpeculativeSampling
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Drafter, LanguageModel, Params, Tree
from specdec_jax.checkpoints import formats, loading
from specdec_jax.checkpoints.formats import Shardings
from specdec_jax.decoding import exact_bits as exact_bits_lib
from specdec_jax.decoding.method import Method
from specdec_jax.drafters import Pool, text_pool
from specdec_jax.launch import agreement
from specdec_jax.models import families
from specdec_jax.text import generation_config
from specdec_jax.text.stop_strings import split_stops
from specdec_jax.text.vocabularies import AnyVocabulary


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
  """Models and rules, ready to be jitted.

  Attributes:
    model: the target by name.
    choice: the drafter as it was chosen.
    length: how much it drafts. If that is `Auto`, all else is of the widest
      gamma that will be tried; `at` gives the decoder of one.
    target_info: what the drafter knows of the target.
    drafting: the drafter as it was made for the target.
    rule: the acceptance rule as it was chosen.
    method: see `Drafting.method`.
    params: weights of both sides; `jax.ShapeDtypeStruct`s until `load`.
    exact_bits: whether each target call is as wide as the longest draft, so
      that no bit of a row depends on what was drafted.
    is_plain: whether, with `exact_bits`, no draft counts.
    stop: the model's own strings that end a text, unless others are given.
    programs: what was compiled, by parts, shapes and devices.
    gammas: what was measured for `Auto`, by rows and devices of a batch.
    others: the decoders of `at`, by gamma, and that of `sampled`, by None.
  """

  model: Model
  choice: DrafterChoice
  length: Length
  target_info: Target
  drafting: Drafting
  rule: Rule
  method: Method
  params: Params = dataclasses.field(repr=False)
  exact_bits: bool = False
  is_plain: bool = False
  stop: tuple[str, ...] = ()
  programs: dict[Hashable, Sequence[Compiled]] = dataclasses.field(
    default_factory=dict, repr=False
  )
  gammas: dict[tuple[int, int], RememberedGamma] = dataclasses.field(
    default_factory=dict, repr=False
  )
  others: dict[int | None, 'Decoder'] = dataclasses.field(
    default_factory=dict, repr=False
  )

  @property
  def config(self) -> families.Config:
    return self.target_info.config

  @property
  def vocabulary(self) -> AnyVocabulary:
    """That of both models; ValueError for a dry run, which has none."""
    if self.target_info.vocabulary is None:
      raise ValueError('a dry run has no vocabulary')
    return self.target_info.vocabulary

  @property
  def sampling(self) -> Sampling:
    """How the target is sampled."""
    return self.target_info.sampling

  @property
  def target(self) -> LanguageModel:
    return self.method.target

  @property
  def drafter(self) -> Drafter:
    return self.method.drafter

  @property
  def is_auto(self) -> bool:
    """Whether gamma is yet to be measured."""
    return isinstance(self.length, Auto)

  @property
  def tried_gammas(self) -> tuple[int, ...]:
    """What `Auto` tries, ascending, 0 among them; empty if gamma is given."""
    return self.length.gammas if isinstance(self.length, Auto) else ()

  @property
  def shapes(self) -> Params:
    """The shapes of the weights, without reading them."""
    made, own = self.drafting, ()
    target = models.param_shapes(self.model, self.config)
    if made.config is not None:
      own = models.param_shapes(made.model, made.config)
    return Params(target=target, drafter=made.join(target, own))

  def at(self, gamma: int) -> 'Decoder':
    """Returns the decoder with a given gamma that does not vary; for 0 without
    a drafter and its weights, but with `exact_bits` with drafts that do not
    count. It is made once, for what it has compiled. TypeError for what is no
    integer, and ValueError above 0 for plain decoding."""
    is_plain = self.is_plain or isinstance(self.choice, NoDrafter)
    if (gamma := operator.index(gamma)) and is_plain:
      raise ValueError('plain decoding has no gamma: ask the one that drafts')
    if gamma not in self.others and self.exact_bits and not gamma:
      method = exact_bits_lib.plain(self.method)
      self.others[gamma] = self._uncompiled(is_plain=True, method=method)
    if gamma not in self.others:
      # All gammas share the weights: only functions are made anew.
      choice, length = self.choice if gamma else NoDrafter(), Fixed(gamma)
      chosen = choice, self.rule, length
      made = _made(self.target_info, *chosen, exact_bits=self.exact_bits)
      self.others[gamma] = self._uncompiled(
        choice=choice, length=length, **made
      )
    # `remember` may have replaced the pool of texts since.
    params = self.params
    if not (gamma or self.exact_bits):
      params = Params(target=params.target)
    return dataclasses.replace(self.others[gamma], params=params)

  @property
  def sampled(self) -> 'Decoder':
    """The decoder of batches that say how each row is sampled: itself, unless
    it is greedy. ValueError if its rule is for greedy decoding alone."""
    if not self.sampling.is_greedy:
      return self
    if None not in self.others:
      # Whatever temperature above 0 will do: each row has its own.
      sampling = dataclasses.replace(self.sampling, temperature=1.0)
      target_info = dataclasses.replace(self.target_info, sampling=sampling)
      chosen = self.choice, self.rule, self.length
      made = _made(target_info, *chosen, exact_bits=self.exact_bits)
      if self.is_plain:
        made['method'] = exact_bits_lib.plain(made['method'])
      self.others[None] = self._uncompiled(**made)
    return dataclasses.replace(self.others[None], params=self.params)

  def _uncompiled(self, **fields: Any) -> 'Decoder':
    """Returns a copy with other `fields` that has compiled nothing yet."""
    return dataclasses.replace(
      self, programs={}, gammas={}, others={}, **fields
    )

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
    ids = [encode(each) if isinstance(each, str) else each for each in texts]
    most = self.target_info.vocab_size - 1
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
    greedy = dataclasses.replace(self.target_info, sampling=Sampling())
    return self.choice.make(greedy, Tree((0,) * num_children)).drafter

  @property
  def max_positions(self) -> int:
    """The longest context of the target."""
    return _shortest(self.config)

  @property
  def draft_positions(self) -> int:
    """The longest context of a draft model: beyond it, texts are decoded on
    without drafts."""
    return _draft_positions(self.drafting)

  @property
  def max_drafted(self) -> int:
    """The longest text that a network that only drafts has positions for."""
    own = self.drafting.config
    if own is None or not families.only_drafts(own):
      return _shortest()
    return _shortest(own)

  def digests(self) -> dict[str, str]:
    """Returns digests of the weights on disk, by side, of the vocabulary, and
    of what is stated in other files; see `agreement`."""
    # Random weights are no files, and the same in every run.
    sides = {'target': self.model, 'drafter': self.drafting.model}
    stated: list[object] = [self.config, self.drafting.config, self.sampling]
    if (schema := self.sampling.json_schema) is not None:
      stated.append(constraints.schema_text(schema))
    texts = {
      'sizes and sampling': repr([*stated, self.target_info.eos_id]),
      'the vocabulary': repr(self.vocabulary.tokens()),
    }
    found = {
      f'digest of {name}': agreement.of_settings({'': text})[:16]
      for name, text in texts.items()
    }
    return found | {
      f"digest of the {side}'s weights": agreement.of_files(
        formats.parts(loading.locate(model.checkpoint))
      )
      for side, model in sides.items()
      if model is not None and not model.is_random
    }


def outline(
  model: Model,
  *,
  drafter: DrafterChoice,
  rule: Rule = SpeculativeSampling(),
  sampling: Sampling = Sampling(),
  is_dry_run: bool = False,
  exact_bits: bool = False,
) -> Decoder:
  """Makes a decoder without reading its weights, nor in a dry run a vocabulary;
  raises as `api.load`."""
  length, judge = drafter.length, rule.judge(sampling)
  if isinstance(drafter, NoDrafter):
    length = drafter.width(exact_bits)
  judge.sampling.check_is_used()
  config = models.read_config(model)
  is_free = judge.is_lossless and not exact_bits
  length = _fitting(length, is_free, _shortest(config))
  if isinstance(length, Auto) and not is_free:
    needs, what = 'exact_bits', 'bits depend on the width of the call'
    if not exact_bits:
      needs, what = 'a rule that is not lossless', 'texts depend on gamma'
    raise ValueError(f'{needs} needs a gamma that is a number: {what}')
  vocabulary = None if is_dry_run else models.read_vocabulary(model, config)
  stop: tuple[str, ...] = ()
  if vocabulary is not None and not model.is_random:
    path = loading.locate(model.checkpoint)
    loading.warn_of(path)
    sampling = sampling.with_defaults(*generation_config.stated(path))
    stop, vocabulary = split_stops(
      generation_config.read_stops(path), vocabulary
    )
  target_info = Target(
    name=model.checkpoint,
    config=config,
    vocabulary=vocabulary,
    sampling=sampling,
  )
  made = assembled(
    model,
    target_info,
    drafter=drafter,
    rule=rule,
    length=length,
    exact_bits=exact_bits,
  )
  return dataclasses.replace(made, stop=stop)


def assembled(
  model: Model,
  target_info: Target,
  *,
  drafter: DrafterChoice,
  rule: Rule,
  length: Length,
  exact_bits: bool = False,
) -> Decoder:
  """Makes a decoder for a target whose sizes and vocabulary are at hand, with
  `shapes` in place of weights; those of a network whose gamma is yet to be
  measured are left out. ValueError if a draft does not fit into a context."""
  result = Decoder(
    model=model,
    choice=drafter,
    length=length,
    rule=rule,
    **_made(target_info, drafter, rule, length, exact_bits=exact_bits),
    params=Params(target=models.param_shapes(model, target_info.config)),
    exact_bits=exact_bits,
  )
  # Plain decoding may be chosen, and to trace a draft model takes a while.
  if result.drafting.config is None or not result.is_auto:
    result = dataclasses.replace(result, params=result.shapes)
  # Each call needs gamma + 1 positions, of which one is of the prompt.
  gamma = result.drafter.gamma
  limit = min(result.max_positions, result.draft_positions)
  if gamma >= limit:
    raise ValueError(f'gamma {gamma} is too large for a context of {limit}')
  return result


def own_params(params: Params) -> Any:
  """Returns the drafter's tree with None for arrays, or shapes, that are the
  target's very own."""
  shared = {id(leaf) for leaf in jax.tree.leaves(params.target)}
  return jax.tree.map(
    lambda leaf: None if id(leaf) in shared else leaf, params.drafter
  )


def _made(
  target_info: Target,
  choice: DrafterChoice,
  rule: Rule,
  length: Length,
  *,
  exact_bits: bool,
) -> dict[str, Any]:
  """Makes the parts of a decoder that depend on how the target is sampled."""
  # Of a gamma that is yet to be measured, the widest needs the most room.
  if isinstance(length, Auto):
    length = Fixed(length.gammas[-1])
  made = choice.make(target_info, length)
  limit = _draft_positions(made)
  if limit < _shortest(target_info.config):
    drafter = drafters.within(made.drafter, limit)
    made = dataclasses.replace(made, drafter=drafter)
  method = made.method(target_info, rule)
  if exact_bits:
    method = exact_bits_lib.of_one_width(method)
  return {'target_info': target_info, 'drafting': made, 'method': method}


def _draft_positions(drafting: Drafting) -> int:
  """Returns the longest context of a draft model, without a limit for all other
  drafters: a network that only drafts reads as far as its target does."""
  config = drafting.config
  if config is None or families.only_drafts(config):
    return _shortest()
  return _shortest(config)


def _fitting(length: Length, is_free: bool, limit: int) -> Length:
  """Fits a gamma that was not given: to a fixed one if texts would depend on
  the choice, otherwise to trials of drafts that have room."""
  if not isinstance(length, Auto) or length.usual is None:
    return length
  gammas = tuple(gamma for gamma in length.gammas if gamma < limit)
  # Otherwise texts would depend on speed, which chooses gamma.
  if not is_free or len(gammas) < 2:
    return usual(length)
  return dataclasses.replace(length, gammas=gammas)


def _shortest(*configs: families.AnyConfig) -> int:
  limits = [families.of(each).max_positions(each) for each in configs]
  return min((n for n in limits if n is not None), default=2**30)


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
  made = decoder.drafting
  own: Any = ()
  with waiting(f'loading {decoder.model.checkpoint}'):
    target = models.read_params(decoder.model, decoder.config, target_shardings)
  # A model that drafts for itself is read once, and lies on a mesh once.
  if made.model == decoder.model:
    own = target
  elif made.model is not None and made.config is not None:
    with waiting(f'loading {made.model.checkpoint}'):
      own = models.read_params(made.model, made.config, drafter_shardings)
  params = Params(target=target, drafter=made.join(target, own))
  return decoder._uncompiled(params=params)


def build(
  model: Model,
  *,
  drafter: DrafterChoice,
  rule: Rule = SpeculativeSampling(),
  sampling: Sampling = Sampling(),
  exact_bits: bool = False,
  waiting: Waiting = contextlib.nullcontext,
) -> Decoder:
  """Makes a decoder for one device; see `outline` and `load`."""
  made = outline(
    model, drafter=drafter, rule=rule, sampling=sampling, exact_bits=exact_bits
  )
  return load(made, waiting=waiting)
