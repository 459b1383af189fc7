"""What is measured on a pair: acceptance along the target's text, and the times
of plain and speculative decoding of the same examples, in turns."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import common
from experiments.leviathan2023 import pairs, paper
from experiments.leviathan2023.pairs import TRAINED, Pair
from experiments.leviathan2023.timed import Sweep, Timed
from specdec_jax import theory, verification
from specdec_jax.assembly.rules import SpeculativeSampling
from specdec_jax.base import Drafter, Params
from specdec_jax.decoding.method import Method
from specdec_jax.measure import calibration, iteration_costs, stopwatch
from specdec_jax.measure import loops as loops_lib
from specdec_jax.measure.loops import CompiledLoop
from specdec_jax.models import families, layers
from specdec_jax.theory.costs import Costs

RULE = SpeculativeSampling()
# Under which the draft model's own probability ends a draft.
THRESHOLDS = (0.3, 0.6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How much is measured.

  Attributes:
    num_alpha: examples that acceptance is measured on.
    num_timed: examples that are timed, at batch 1.
    repeats: of every timed decode.
    max_gamma: the largest gamma.
    batch_size: of what is not timed.
  """

  num_alpha: int
  num_timed: int
  repeats: int
  max_gamma: int
  batch_size: int


def acceptance(
  pair: Pair, name: str, temperature: float, settings: Settings
) -> dict[str, Any]:
  """Figures of `calibration.acceptance` for a drafter."""
  return lenient_alphas(pair, temperature, settings)[name][0]


@functools.cache
def lenient_alphas(
  pair: Pair, temperature: float, settings: Settings
) -> dict[str, list[dict[str, Any]]]:
  """The same of every drafter, for each of `paper.LENIENCES`, whose first is
  none; all along one text."""
  share_fns = [
    functools.partial(calibration.shared_mass, lenience=lenience)
    for lenience in paper.LENIENCES
  ]
  found = _overlaps(
    pair, pairs.DRAFTERS, temperature, settings, share_fns=share_fns
  )
  return {
    name: _figures(own, settings)
    for name, own in zip(pairs.DRAFTERS, found, strict=True)
  }


@functools.cache
def argmax_alphas(pair: Pair, settings: Settings) -> list[dict[str, Any]]:
  """The trained drafter's at temperature 0, under the rule for the argmax."""
  [found] = _overlaps(
    pair,
    [TRAINED],
    0.0,
    settings,
    share_fns=[
      functools.partial(
        calibration.passes_rule,
        verify_fn=functools.partial(verification.greedy, lenience=lenience),
      )
      for lenience in paper.LENIENCES
    ],
    verify_fn=verification.greedy,
    # That rule reads the target's distribution before the argmax.
    method=method(pair, 0.0, logits_to_probs=method(pair, 1.0).logits_to_probs),
  )
  return _figures(found, settings)


def _figures(
  found: Sequence[calibration.Overlaps], settings: Settings
) -> list[dict[str, Any]]:
  return [
    calibration.acceptance(each, max_gamma=settings.max_gamma) for each in found
  ]


@functools.cache
def texts(
  pair: Pair, temperature: float, settings: Settings
) -> list[np.ndarray]:
  """Returns, for each timed text, the chance that the trained drafter's guess
  of each token is accepted."""
  [[found]] = _overlaps(
    pair, [TRAINED], temperature, settings, num_examples=settings.num_timed
  )
  rows = zip(found.values, found.is_text, strict=True)
  return [values[is_text] for values, is_text in rows if is_text.any()]


def predicted_speed(
  pair: Pair,
  temperature: float,
  settings: Settings,
  gamma: int,
  parts: Costs | None = None,
) -> float:
  """The speed that acceptance and costs promise, without anything that was
  decoded speculatively; 1 for gamma 0. `parts` instead of `costs`."""
  if gamma == 0:
    return 1.0
  parts = parts or costs(pair, temperature, settings)
  found = texts(pair, temperature, settings)
  plain = sum(parts.decode_seconds(0, len(text)) for text in found)
  drafted = sum(
    parts.decode_seconds(gamma, theory.expected_runs(text, gamma))
    for text in found
  )
  return plain / drafted


def planned_gamma(
  pair: Pair,
  temperature: float,
  settings: Settings,
  parts: Costs | None = None,
) -> int:
  """The gamma that promises most; 0 if plain decoding does."""
  args = pair, temperature, settings
  return max(
    range(settings.max_gamma + 1),
    key=lambda gamma: predicted_speed(*args, gamma, parts),
  )


def _overlaps(
  pair: Pair,
  names: Sequence[str],
  temperature: float,
  settings: Settings,
  num_examples: int | None = None,
  **options: Any,
) -> list[list[calibration.Overlaps]]:
  """Measures how much of the target's probability each drafter's guesses cover,
  along texts that the target writes."""
  target, draft_model = pair.joined
  return calibration.overlaps(
    Params(target, [draft_model] * len(names)),
    jax.random.key(0),
    pairs.prompts(
      pair, num_examples or settings.num_alpha, settings.batch_size
    ),
    drafters=[pairs.drafter(pair, name, 1, temperature) for name in names],
    num_tokens=pair.kind.targets_length,
    max_len=pair.max_len,
    **{'method': method(pair, temperature)} | options,
  )


def method(pair: Pair, temperature: float, **changes: Any) -> Method:
  """Plain decoding, which all measurements share, and what is `changed`."""
  target_info = pair.target_info(temperature)
  shared = Method(
    target=pair.model,
    verify_fn=RULE.judge(target_info.sampling).verify_fn(None),
    logits_to_probs=target_info.sampling.to_probs(target_info.vocab_size),
    eos_id=target_info.eos_id,
  )
  return dataclasses.replace(shared, **changes)


def costs(pair: Pair, temperature: float, settings: Settings) -> Costs:
  """Times of an iteration's parts with the trained drafter, batch 1: where all
  of it is timed, in turns with what they are to predict. A plain step is one in
  the fastest dtype."""
  if temperature == 0:
    parts = whole_sweep(pair, temperature, settings).costs
    assert parts is not None
    return parts
  return _costs_by_themselves(pair, temperature, settings)


@functools.cache
def _costs_by_themselves(
  pair: Pair, temperature: float, settings: Settings
) -> Costs:
  made = _cost_programs(pair, temperature, settings)
  # At temperature 0 they only plan a gamma.
  repeats = settings.repeats if temperature else 2
  timed = stopwatch.alternate(made.programs, repeats)
  return _as_costs(pair, made.costs(*timed))


@functools.cache
def _cost_programs(
  pair: Pair, temperature: float, settings: Settings
) -> iteration_costs.CostPrograms:
  make = functools.partial(
    pairs.drafter, pair, TRAINED, temperature=temperature
  )
  last = settings.max_gamma
  # What is planned at temperature 1 is not compared gamma by gamma.
  widths = None
  if temperature == 0:
    widths = {1, *range(2, min(last, 4)), *range(5, last, 4), last + 1}
  made = iteration_costs.cost_programs(
    pair.joined,
    jax.random.key(0),
    pairs.prompts(pair, 1, 1)[0],
    drafters={gamma: make(gamma=gamma) for gamma in (1, last)},
    widths=widths and sorted(widths),
    # No text ends early: an iteration costs what it costs.
    method=method(pair, temperature, eos_id=(-1,)),
    max_len=pair.max_len,
    plain=_plain_side(
      pair,
      _fastest_plain(pair, settings),
      temperature,
      dataclasses.replace(settings, num_timed=1),
      eos_id=(-1,),
    ),
  )
  # Of four decodes in a turn, the median ignores the first, which finds cold
  # caches.
  loops = {
    name: dataclasses.replace(loop, states=[*loop.states] * 4)
    for name, loop in made.loops.items()
  }
  return dataclasses.replace(made, loops=loops)


@functools.cache
def _fastest_plain(pair: Pair, settings: Settings) -> str:
  """In which dtype the target decodes these texts plainly most quickly."""
  loops = {
    dtype: _plain_side(pair, dtype, 0.0, settings) for dtype in pair.plain
  }
  if len(loops) == 1:
    return next(iter(loops))
  num_texts = -(-settings.num_timed // 2)
  return loops_lib.fastest(loops, num_texts, settings.repeats + 2)[0]


def _plain_side(
  pair: Pair,
  dtype: str,
  temperature: float,
  settings: Settings,
  **changes: Any,
) -> CompiledLoop:
  """Plain decoding of the examples that are timed."""
  model = pair.plain[dtype]
  target = families.language_model(model.config)
  return loops_lib.plain_loop(
    Params(model.params),
    jax.random.key(0),
    pairs.prompts(pair, settings.num_timed, 1),
    method=method(pair, temperature, target=target, **changes),
    max_len=pair.max_len,
  )


def _as_costs(pair: Pair, found: dict[str, Any]) -> Costs:
  target, drafter = map(layers.num_params, pair.params)
  return Costs.among(found | {'c_hat': drafter / target})


@functools.cache
def sweep(
  pair: Pair,
  temperature: float,
  settings: Settings,
  gammas: tuple[int, ...],
  has_adaptive: bool = False,
) -> Sweep:
  """Times all of them in turns, at batch 1; with drafts that end early, the
  parts of an iteration take turns, too."""
  make = functools.partial(
    pairs.drafter, pair, TRAINED, temperature=temperature
  )
  ways: dict[Any, Drafter] = {gamma: make(gamma=gamma) for gamma in gammas}
  if has_adaptive:
    ways |= _adaptive(pair, temperature, settings)
  found, parts = _time(pair, temperature, settings, ways, has_adaptive)
  return Sweep(
    plain=found[None],
    fixed={gamma: found[gamma] for gamma in gammas},
    adaptive={way: found[way] for way in ways if isinstance(way, tuple)},
    costs=parts,
  )


def whole_sweep(pair: Pair, temperature: float, settings: Settings) -> Sweep:
  """Every gamma, and every threshold."""
  gammas = tuple(range(1, settings.max_gamma + 1))
  return sweep(pair, temperature, settings, gammas, True)


def at_planned(
  pair: Pair, temperature: float, settings: Settings
) -> tuple[int, Sweep]:
  """The planned gamma, at least 1, and a sweep that has it."""
  gamma = max(planned_gamma(pair, temperature, settings), 1)
  if temperature == 0:
    return gamma, whole_sweep(pair, temperature, settings)
  return gamma, sweep(pair, temperature, settings, (gamma,))


def _adaptive(
  pair: Pair, temperature: float, settings: Settings
) -> dict[tuple[str, int], Drafter]:
  """Drafters whose drafts end early, by threshold and cap.

  Scoring is always as wide as the cap: where width is dear, a cap at the
  planned gamma saves drafting and no more.
  """
  limit = settings.max_gamma
  make = functools.partial(
    pairs.drafter, pair, TRAINED, temperature=temperature
  )
  parts = _costs_by_themselves(pair, temperature, settings)
  ways = {}
  planned = max(planned_gamma(pair, temperature, settings, parts), 2)
  planned = min(planned, limit)  # Wider scoring was not timed.
  thresholds = [(limit, least) for least in THRESHOLDS]
  for cap, least in [(planned, min(THRESHOLDS)), *thresholds]:
    ways[f'threshold {least}', cap] = make(gamma=cap, min_prob=least)
  return ways


def _time(
  pair: Pair,
  temperature: float,
  settings: Settings,
  ways: Mapping[Any, Drafter],
  has_costs: bool,
) -> tuple[dict[Any, Timed], Costs | None]:
  """Every way, and plain decoding as None; and the parts of an iteration."""
  args = (
    pair.joined,
    jax.random.key(0),
    pairs.prompts(pair, settings.num_timed, 1),
  )
  dtype = _fastest_plain(pair, settings)
  loops: dict[Any, CompiledLoop] = {
    None: _plain_side(pair, dtype, temperature, settings)
  }

  # Drafters of one kind share the prefill and the buffers of the longest.
  kinds: dict[str, dict[Any, Method]] = {}
  for way, drafter in ways.items():
    kind = way[0].split()[0] if isinstance(way, tuple) else 'fixed'
    own = kinds.setdefault(kind, {})
    own[way] = method(pair, temperature, drafter=drafter)
  for methods in kinds.values():
    loops |= common.speculative_loops(
      *args, methods=methods, max_len=pair.max_len
    )
  programs: dict[Any, Any] = {
    ('decode', way, i): functools.partial(loop.run, loop.params, state)
    for way, loop in loops.items()
    for i, state in enumerate(loop.states)
  }
  made = None
  warm_up: list[Any] = [('decode', way, 0) for way in loops]
  if has_costs:
    made = _cost_programs(pair, temperature, settings)
    programs |= made.programs
    warm_up += made.programs
  seconds, results = stopwatch.alternate(
    programs, settings.repeats, warm_up=warm_up
  )
  parts = made and _as_costs(pair, made.costs(seconds, results))
  timed = {}
  for way, loop in loops.items():
    names = [('decode', way, i) for i in range(len(loop.states))]
    launch = 0.0
    if parts is not None:
      launch = (
        parts.plain_launch_seconds if way is None else parts.launch_seconds
      )
    timed[way] = _timed(
      loop,
      np.stack([seconds[name] for name in names], axis=1),
      [results[name] for name in names],
      launch,
    )
  return timed, parts


def _timed(
  loop: CompiledLoop,
  turns: np.ndarray,
  states: Sequence[Any],
  launch_seconds: float,
) -> Timed:
  counters = [jax.device_get(state.statistics) for state in states]
  return Timed(
    turns=turns,
    launch_seconds=launch_seconds,
    prefill_seconds=loop.prefill_seconds,
    lengths=tuple(int(each.num_tokens[0]) for each in counters),
    num_runs=sum(int(each.num_target_runs[0]) for each in counters),
    num_drafted=sum(int(each.num_drafted[0]) for each in counters),
  )
