"""A cell of the benchmark suite: prompts of one shape, decoded in every way in
turns."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array, Drafter, LanguageModel, Params, Prompt
from specdec_jax.decoding import autoregressive, speculative, statistics
from specdec_jax.decoding.state import DecodeState
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.measure import benchmark, metrics, stopwatch
from specdec_jax.measure import sides as sides_lib
from specdec_jax.measure.sides import Side
from specdec_jax.theory import estimates

# Keys of plain decoding: in the dtype that drafts are verified in, and in the
# fastest one.
PLAIN, BASELINE = 'plain', 'baseline'
# Positions whose conditional acceptance is reported.
_NUM_ALPHAS = 3
# A smaller logit margin is within the rounding of the dtype.
_NEAR_TIES = {'float32': 1e-3, 'bfloat16': 0.25}


class Way(NamedTuple):
  """A way of decoding.

  Attributes:
    params: weights.
    target: the target's functions.
    rule: the other arguments of `speculative.run`, or `autoregressive.run`.
    drafter: None for plain decoding.
    prefill: ways with the same name for it share theirs.
  """

  params: Params
  target: LanguageModel
  rule: Mapping[str, Any]
  drafter: Drafter | None = None
  prefill: str = ''

  @property
  def gamma(self) -> int:
    return self.drafter.gamma if self.drafter else 0

  def run(self, params: Params, state: DecodeState) -> DecodeState:
    """Decodes a batch to its end."""
    rule: dict[str, Any] = {'target': self.target, **self.rule}
    if self.drafter is None:
      return autoregressive.run(params, state, **rule)
    return speculative.run(params, state, drafter=self.drafter, **rule)

  def start(self, states: Mapping[str, DecodeState]) -> DecodeState:
    """What it begins with, of the states after each prefill."""
    state = states[self.prefill]
    counters = statistics.init(state.done.size, self.gamma)
    return dataclasses.replace(state, statistics=counters)

  def full(self, state: DecodeState) -> 'Way':
    """The same loop when each iteration scores gamma + 1 positions and drafts
    cost nothing."""
    assert self.drafter is not None
    propose = functools.partial(speculative.propose, drafter=self.drafter)
    draft, _ = jax.eval_shape(propose, self.params, state)
    may_abstain = self.drafter.may_abstain
    return self._replace(
      params=Params(self.params.target, jnp.bool_(True) if may_abstain else ()),
      drafter=stopwatch.always_full(
        self.gamma,
        None if draft.probs is None else self.target.vocab_size,
        may_abstain=may_abstain,
      ),
    )


class Programs(NamedTuple):
  """Ways of decoding batches of one shape, compiled.

  Attributes:
    ways: by key, `PLAIN` among them, and `BASELINE` if it is another. `cost`
      and the key of one that drafts is the same at full width.
    prefills: from a prompt to a state, by name.
    runs: from weights and a state to a state, by key.
    propose: what times a draft, by key of a way that drafts.
    compile_seconds: of all of them.
  """

  ways: Mapping[Any, Way]
  prefills: Mapping[str, Callable[[Prompt], DecodeState]]
  runs: Mapping[Any, Callable[[Params, DecodeState], DecodeState]]
  propose: Mapping[Any, Sequence[stopwatch.Repeated]]
  compile_seconds: float

  def side(self, key: Any, states: Mapping[str, DecodeState]) -> Side:
    """A way with the state that it begins with."""
    way = self.ways[key]
    return Side(
      run=self.runs[key],
      params=way.params,
      states=[way.start(states)],
      compile_seconds=0.0,
      prefill_seconds=0.0,
    )


def compile_ways(
  ways: Mapping[Any, Way], rng_key: Array, prompt: Prompt, max_len: int
) -> Programs:
  """Compiles all that times `ways` on batches of the shape of `prompt`; its
  other arguments are those of `speculative.generate`."""
  started = time.perf_counter()
  prefills = {}
  for way in sorted(ways.values(), key=lambda way: way.gamma, reverse=True):
    if way.prefill not in prefills:
      drafter = way.drafter or stopwatch.always_full(0)
      init = functools.partial(
        speculative.init, target=way.target, drafter=drafter, max_len=max_len
      )
      init, _ = stopwatch.compile_seconds(init, way.params, rng_key, prompt)
      prefills[way.prefill] = functools.partial(init, way.params, rng_key)
  states = {name: prefill(prompt) for name, prefill in prefills.items()}
  drafting = {key: way for key, way in ways.items() if way.gamma}
  every = {**ways}
  for key, way in drafting.items():
    every['cost', key] = way.full(way.start(states))

  def compiled(way: Way) -> Any:
    args = way.params, way.start(states)
    return stopwatch.compile_seconds(way.run, *args)[0]

  runs = stopwatch.together(
    {key: functools.partial(compiled, way) for key, way in every.items()}
  )
  propose = {
    key: stopwatch.propose_programs(
      way.params, way.start(states), way.drafter, way.target
    )
    for key, way in drafting.items()
    if way.drafter
  }
  seconds = time.perf_counter() - started
  return Programs(every, prefills, runs, propose, seconds)


@dataclasses.dataclass(frozen=True)
class Timed:
  """What was measured of one way, an entry per batch.

  Attributes:
    seconds: of each turn, `[N][R]`.
    statistics: of its rows, in numpy.
    margins: logit margins of first differences from plain decoding, infinite
      where one text is the beginning of the other; None if not compared.
  """

  seconds: list[np.ndarray] = dataclasses.field(default_factory=list)
  statistics: list[Statistics] = dataclasses.field(default_factory=list)
  margins: list[float] | None = None

  def medians(self) -> np.ndarray:
    """Seconds of each batch, `[N]`."""
    return np.median(self.seconds, axis=1)

  def tokens(self) -> np.ndarray:
    """Tokens of each batch, `[N]`."""
    return np.array([s.num_tokens.sum() for s in self.statistics])

  def per_iteration(self) -> float:
    """Seconds of an iteration."""
    counts = benchmark.count(self.statistics)
    return float(self.medians().sum() / counts.iterations)


def measure(
  programs: Programs,
  prompts: Sequence[Prompt],
  *,
  repeats: int,
  is_greedy: bool,
  is_cold: bool,
  advance: Callable[[int], None] = lambda num_done: None,
) -> tuple[dict[Any, Timed], dict[Any, dict[str, Any]]]:
  """Decodes every prompt in every way, in turns.

  Args:
    programs: of `compile_ways`.
    prompts: batches of their shape.
    repeats: turns.
    is_greedy: whether texts are compared with plain decoding's.
    is_cold: whether programs are run once before they are timed.
    advance: progress, called with 1 after every batch.

  Returns:
    What was measured of each way; and `c`, `verify_cost_ratio` and
    `without_draft_cost_ratio` of each that drafts, over T(1) in the same turns,
    those of the first batch.

  Raises:
    ValueError: if a model returned logits that are not numbers.
  """
  timed = {
    key: Timed(
      margins=[] if is_greedy and key not in (PLAIN, BASELINE) else None
    )
    for key in programs.ways
    if 'cost' not in key
  }
  costs: dict[Any, dict[str, Any]] = {}
  plain = programs.ways[PLAIN]
  for prompt in prompts:
    states = {name: fill(prompt) for name, fill in programs.prefills.items()}
    keys = timed if costs else programs.ways
    sides = {key: programs.side(key, states) for key in keys}
    calls: dict[Any, Callable] = {
      key: side.decode for key, side in sides.items()
    }
    if not costs:
      calls |= _draft_calls(programs, sides)
    warm_up = None if is_cold and not costs else ()
    seconds, finals = stopwatch.alternate(calls, repeats, warm_up=warm_up)
    for key, found in timed.items():
      [final] = finals[key]
      if np.any(final.has_nan):
        raise ValueError('the logits were not numbers (NaN): nothing to time')
      found.seconds.append(seconds[key])
      found.statistics.append(jax.device_get(final.statistics))
      if found.margins is not None:
        same = benchmark.sameness(
          plain.target, plain.params, finals[PLAIN], [final]
        )
        margins = same['divergence_margins']
        unequal = same['num_divergent_rows'] - len(margins)
        found.margins.extend([*margins, *[np.inf] * unequal])
    costs = costs or _costs(programs, seconds, finals)
    advance(1)
  return timed, costs


def _draft_calls(
  programs: Programs, sides: Mapping[Any, Side]
) -> dict[Any, Callable]:
  """What times iterations without a draft, and drafts themselves."""
  calls: dict[Any, Callable] = {}
  for key, made in programs.propose.items():
    drafter = programs.ways[key].drafter
    if drafter and drafter.may_abstain:
      calls['without', key] = sides_lib.without_drafts(
        sides['cost', key]
      ).decode
    calls |= {('draft', key, i): call for i, call in enumerate(made)}
  return calls


def _costs(
  programs: Programs, seconds: Mapping[Any, np.ndarray], finals: Mapping
) -> dict[Any, dict[str, Any]]:
  """What drafted tokens and target calls cost, by the way that drafts."""

  def iteration(key: Any) -> float:
    counts = benchmark.count([state.statistics for state in finals[key]])
    return float(np.median(seconds[key]) / counts.iterations)

  found: dict[Any, dict[str, Any]] = {}
  one = iteration(PLAIN)
  for key, made in programs.propose.items():
    turns = [seconds['draft', key, i] for i in range(len(made))]
    draft = stopwatch.propose_seconds(made, turns)
    without = ('without', key)
    found[key] = {
      'c': draft / programs.ways[key].gamma / one,
      'verify_cost_ratio': iteration(('cost', key)) / one,
      'without_draft_cost_ratio': iteration(without) / one
      if without in finals
      else None,
    }
  return found


def figures(
  timed: Mapping[Any, Timed], key: Any, costs: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
  """What the table says of the way `key`.

  Args:
    timed: of `measure`.
    key: of a way that is not plain.
    costs: of `measure`; of a way that drafts nothing, none.
    dtype: whose rounding makes near ties.

  Returns:
    Figures by name. Rates are None where nothing was drafted, and the interval,
    over batches, with fewer than two of them.
  """
  drafted, baseline = timed[key], timed.get(BASELINE, timed[PLAIN])
  counts = benchmark.count(drafted.statistics)
  of_rows = counts.statistics
  rates = metrics.rates(of_rows)
  alphas = [
    estimates.alpha(accepted, tested)
    for accepted, tested in zip(
      of_rows.num_accepted.sum(0), of_rows.num_tested.sum(0), strict=True
    )
  ]
  alphas = [*alphas, *[None] * _NUM_ALPHAS][:_NUM_ALPHAS]
  # Plain decoding's time for as many tokens.
  plain_seconds = baseline.medians() / baseline.tokens() * drafted.tokens()
  speedup, interval = estimates.ratio(plain_seconds, drafted.medians())
  speed = lambda side: float(side.tokens().sum() / side.medians().sum())
  costs = {'c': 0.0, 'verify_cost_ratio': 1.0, **costs}
  num_rows = int(np.count_nonzero(of_rows.num_tokens))
  margins = drafted.margins
  return {
    'tokens_per_target_run': rates.block_efficiency,
    **{f'alpha_{i}': alpha for i, alpha in enumerate(alphas, start=1)},
    'alpha': rates.alpha,
    **costs,
    'plain_tokens_per_second': speed(baseline),
    'speculative_tokens_per_second': speed(drafted),
    'speedup': speedup,
    'speedup_interval': interval,
    'predicted_speedup': benchmark.predict_speedup(
      benchmark.count(baseline.statistics),
      counts,
      num_drafted=counts.iterations * of_rows.num_tested.shape[1],
      baseline_cost=baseline.per_iteration() / timed[PLAIN].per_iteration(),
      **costs,
    ),
    'rows': num_rows,
    'identical_rows': None if margins is None else num_rows - len(margins),
    'near_ties': None
    if margins is None
    else sum(margin < _NEAR_TIES[dtype] for margin in margins),
  }
