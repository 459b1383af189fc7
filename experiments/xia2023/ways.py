"""Ways of decoding one test split, compiled, and what comes of them."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import common
from experiments.beams import plain as plain_beams
from experiments.xia2023 import glancing
from specdec_jax import drafters
from specdec_jax.assembly import lengths, models, rules
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DrafterChoice
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.lengths import Fixed, Length, LengthChoice
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import Rule
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Drafter, LanguageModel, Params
from specdec_jax.contrib.top_beta.choice import TopBeta
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.measure import stopwatch
from specdec_jax.models import families, products
from specdec_jax.models.drafting import block_decoder
from specdec_jax.models.drafting.block_decoder import BlockDecoderConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.theory import estimates

# Rules by the names that the tables have.
RULES: dict[str, Rule] = {
  'strict': rules.Greedy(),
  'top-3 tau 1': TopBeta(beta=3, tau=1.0),
  'top-5 tau 3': TopBeta(beta=5, tau=3.0),
  'top-5 tau 5': TopBeta(beta=5, tau=5.0),
}
HEADS = 'heads'
BLOCK = 'block drafter'
# They read the target's states, and draft as many tokens as they have slots.
ON_TARGET = (HEADS, BLOCK)
# A drafter as it was chosen, and its weights.
Loaded = tuple[DrafterChoice, Any]


def spec_drafter_of(target: T5Config, **own: int) -> BlockDecoderConfig:
  """Returns the sizes of a Spec-Drafter as wide as a target, whose embeddings
  and encoder fit; `own` are its layers and positions."""
  names = {field.name for field in dataclasses.fields(BlockDecoderConfig)}
  names -= {'dropout_rate', *own}
  shared = {name: getattr(target, name) for name in names}
  return BlockDecoderConfig(**shared | own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Untrained:
  """A Spec-Drafter that no file has; see `drafters.SpecDrafter`."""

  config: Any
  gamma: int = 1

  @property
  def length(self) -> LengthChoice:
    return Fixed(self.gamma)

  def make(self, target: Target, length: Length) -> Drafting:
    drafter = drafters.spec_drafter(
      block_decoder.block_model(self.config),
      gamma=lengths.fixed(length),
      vocab_size=target.vocab_size,
    )
    return Drafting(drafter=drafter, config=self.config)


def untrained(config: Any, rng_key: jax.Array) -> Loaded:
  """One with weights drawn at random."""
  params = glancing.init_params(config, rng_key)
  params = products.with_cpu_copies(params, is_tied=True)
  return Untrained(config=config), params


def load(choice: Any, target: Any) -> Loaded:
  """A Spec-Drafter or heads for a target.

  Raises:
    ValueError: if they do not fit it.
  """
  length = lengths.usual(choice.length)
  config: Any = choice.make(common.target_info(target, 0.0), length).config
  params = models.read_params(choice.model, config)
  if families.drafts_for(config) == 'spec_drafter':
    params = products.with_cpu_copies(params, is_tied=True)
  # What decodes with it says its gamma, or takes the usual one.
  return dataclasses.replace(choice, gamma=lengths.fixed(length)), params


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
  """What is measured.

  Attributes:
    chosen: the target by name.
    layout: vocabulary, sizes of the target and buffers.
    target: its parameters.
    rows: the test split.
    drafters: blockwise heads as `HEADS` and a block drafter as `BLOCK`, if
      there are any, and Spec-Drafters by the names of their variants.
    plain: the target in other dtypes, of which plain decoding and beam search
      may take the fastest.
  """

  chosen: Model
  layout: Layout
  target: Any
  rows: Sequence[Row]
  drafters: Mapping[str, Loaded]
  plain: 'Sequence[Pair]' = ()

  @property
  def max_len(self) -> int:
    return 1 + self.layout.targets_length


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Way:
  """A way of decoding in two compiled parts.

  Attributes:
    params: weights.
    init: `(params, prompt) -> state`, encoder and prefill.
    run: `(params, state) -> output`, a `DecodeOutput` or a `BeamOutput`.
    drafter: whose cost is to be told apart, or None.
    target: beside which it drafts, or None.
  """

  params: Params
  init: Callable[[Params, Any], Any]
  run: Callable[[Params, Any], Any]
  drafter: Drafter | None = None
  target: LanguageModel | None = None


@dataclasses.dataclass(kw_only=True)
class Result:
  """What a way made of some examples.

  Attributes:
    texts: the outputs, in the order of the examples.
    ids: their tokens, start token and EOS included.
    num_tokens: new ones, EOS included.
    num_runs: target runs of all rows; 0 for beam search.
    prefill_seconds: of all batches.
    loop_seconds: likewise, after the prefill.
    draft_seconds: of one draft, or None.
    batch_seconds: prefill and loop of every batch.
  """

  texts: list[str] = dataclasses.field(default_factory=list)
  ids: list[list[int]] = dataclasses.field(default_factory=list)
  num_tokens: int = 0
  num_runs: int = 0
  prefill_seconds: float = 0.0
  loop_seconds: float = 0.0
  draft_seconds: float | None = None
  batch_seconds: list[float] = dataclasses.field(default_factory=list)

  @property
  def seconds(self) -> float:
    return self.prefill_seconds + self.loop_seconds

  @property
  def tokens_per_run(self) -> float | None:
    return estimates.quotient(self.num_tokens, self.num_runs)


@functools.cache
def greedy(pair: Pair) -> Way:
  """One token per target run."""
  vocabulary = pair.layout.vocabulary
  target = families.language_model(pair.layout.config)
  method = Method(
    target=target,
    logits_to_probs=TextSettings().to_probs(vocabulary.vocab_size),
    eos_id=vocabulary.eos_ids,
  )

  def init(params, prompt):
    return autoregressive.init(
      params, jax.random.key(0), prompt, method=method, max_len=pair.max_len
    )

  def run(params, state):
    state = autoregressive.run(params, state, method=method)
    return autoregressive.output(state)

  return Way(params=Params(pair.target), init=jax.jit(init), run=jax.jit(run))


@functools.cache
def beam(pair: Pair, num_beams: int) -> Way:
  """Beam search; its encoder pass is part of its loop's time."""
  generate = functools.partial(
    plain_beams.generate,
    target=families.language_model(pair.layout.config),
    num_beams=num_beams,
    max_len=pair.max_len,
    eos_id=pair.layout.vocabulary.eos_ids,
    vocab_size=pair.layout.vocabulary.vocab_size,
  )
  return Way(
    params=Params(pair.target),
    init=lambda params, prompt: prompt,
    run=jax.jit(generate),
  )


@functools.cache
def fastest(make: Callable[[Pair], Way], pair: Pair) -> Way:
  """A way in the dtype in which it takes the least time for ten examples."""
  made = {str(i): make(each) for i, each in enumerate([pair, *pair.plain])}
  if len(made) == 1:
    return made['0']
  results = decode(pair, made, pair.rows[:10], batch_size=1, repeats=3)
  return made[min(made, key=lambda name: results[name].seconds)]


def speculate(pair: Pair, name: str, gamma: int | None, rule: str) -> Way:
  """A drafter of `pair` under a rule of `RULES`; see `decoder`."""
  return under(pair, name, gamma, RULES[rule])


@functools.cache
def under(pair: Pair, name: str, gamma: int | None, rule: Any) -> Way:
  """The same under any rule."""
  made = decoder(pair, name, gamma, rule)

  def init(params, prompt):
    key = jax.random.key(0)
    return speculative.init(
      params, key, prompt, method=made.method, max_len=pair.max_len
    )

  def run(params, state):
    state = speculative.run(params, state, method=made.method)
    return speculative.output(state)

  return Way(
    params=made.params,
    init=jax.jit(init),
    run=jax.jit(run),
    drafter=made.drafter,
    target=made.target,
  )


def decoder(pair: Pair, name: str, gamma: int | None, rule: Rule) -> Decoder:
  """Before it is compiled; without a gamma, with as many tokens as the drafter
  has heads for."""
  choice, params = pair.drafters[name]
  if gamma is not None:
    choice = dataclasses.replace(choice, gamma=gamma)
  params = Params(pair.target, params)
  return common.decoder(pair.chosen, choice, params, rule=rule)


def decode(
  pair: Pair,
  ways: Mapping[str, Way],
  rows: Sequence[Row],
  *,
  batch_size: int,
  repeats: int = 1,
  time_drafts: bool = False,
  is_timed: bool = True,
) -> dict[str, Result]:
  """Decodes `rows` in every way, batch by batch in turns.

  Times are sums over the batches of the median of `repeats` runs, and those of
  warm programs if `is_timed`.
  """
  results = {name: Result() for name in ways}
  batches = common.batches(pair.layout, rows, batch_size)
  for i, (prompt, part) in enumerate(batches):
    if is_timed and i == 0:  # They compile.
      stopwatch.together(
        {
          name: functools.partial(_run, way, prompt)
          for name, way in ways.items()
        }
      )
    timed: dict[str, list] = {name: [] for name in ways}
    outputs = {}
    for _ in range(repeats):
      for name, way in ways.items():
        outputs[name], *seconds = _run(way, prompt)
        timed[name].append(seconds)
    for name in ways:
      _add(results[name], pair, outputs[name], len(part), timed[name])
  if time_drafts:
    for name, way in ways.items():
      if way.drafter is not None and way.target is not None:
        results[name].draft_seconds = _draft_seconds(
          way.params, way.init(way.params, prompt), way.drafter, way.target
        )
  return results


def _draft_seconds(*made: Any) -> float:
  """Times `propose` by itself; arguments as for `propose_programs`."""
  programs = stopwatch.propose_programs(*made)
  seconds, _ = stopwatch.alternate(dict(enumerate(programs)), 3)
  return stopwatch.propose_seconds(programs, list(seconds.values()))


def _run(way: Way, prompt: Any) -> tuple[Any, float, float]:
  """An output, and seconds of prefill and loop."""
  started = time.perf_counter()
  state = jax.block_until_ready(way.init(way.params, prompt))
  middle = time.perf_counter()
  output = jax.block_until_ready(way.run(way.params, state))
  return output, middle - started, time.perf_counter() - middle


def _add(
  result: Result, pair: Pair, output: Any, num_rows: int, timed: list
) -> None:
  """Puts a batch into a result."""
  prefill, loop = np.median(np.array(timed), axis=0)
  result.prefill_seconds += float(prefill)
  result.loop_seconds += float(loop)
  result.batch_seconds.append(float(prefill + loop))
  tokens, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
  if tokens.ndim == 3:  # The best beam is the last.
    tokens, lengths = tokens[:, -1], lengths[:, -1]
  else:
    runs = output.statistics.num_target_runs[:num_rows]
    result.num_runs += int(np.sum(runs))
  vocabulary = pair.layout.vocabulary
  for row in range(num_rows):
    result.ids.append(tokens[row, : lengths[row]].tolist())
    ids = result.ids[-1][1:]
    result.num_tokens += len(ids)
    if ids and ids[-1] in vocabulary.eos_ids:
      ids.pop()
    result.texts.append(vocabulary.decode(ids))
