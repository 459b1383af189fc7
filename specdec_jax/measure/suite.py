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

from specdec_jax.base import Array, Params, Prompt
from specdec_jax.decoding import autoregressive, speculative, statistics
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeState
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.measure import benchmark, metrics, sides, stopwatch
from specdec_jax.theory import estimates

# What is decoded to time iterations at full width, or without a draft.
_NUM_COST_TOKENS = 12
# Positions whose conditional acceptance is reported.
_NUM_ALPHAS = 3
# A smaller logit margin is within the rounding of the dtype.
_NEAR_TIES = {'float32': 1e-3, 'bfloat16': 0.25}
# Plain loops with this share of the fastest one's speed on the first prompt are
# timed on.
_CLOSE = 0.8
# Prompts are padded to one of these, and to a single one up to the second: few
# shapes are compiled.
_WIDTHS = (64, 256, 1024, 4096)


def widths(longest: Mapping[str, int]) -> dict[str, int]:
  """What prompts are padded to, by category; from tokens of the longest."""
  found = {
    name: next(width for width in (*_WIDTHS, length) if width >= length)
    for name, length in longest.items()
  }
  short = [width for width in found.values() if width <= _WIDTHS[1]]
  return {n: max(short) if w in short else w for n, w in found.items()}


class Way(NamedTuple):
  """A way of decoding.

  Attributes:
    params: weights.
    method: functions and rule.
    is_plain: whether it is plain decoding, by `autoregressive.run`.
    prefill: ways with the same name for it share theirs.
  """

  params: Params
  method: Method
  is_plain: bool = False
  prefill: str = ''

  @property
  def gamma(self) -> int:
    return self.method.drafter.gamma

  def run(self, params: Params, state: DecodeState) -> DecodeState:
    """Decodes a batch to its end."""
    loop = autoregressive if self.is_plain else speculative
    return loop.run(params, state, method=self.method)

  def full(self) -> 'Way':
    """The same loop if each iteration scores gamma + 1 positions, and drafts
    cost nothing: see `stopwatch.always_full`."""
    may_abstain = self.method.drafter.may_abstain
    drafter = stopwatch.always_full(self.gamma, may_abstain=may_abstain)
    return self._replace(
      params=Params(self.params.target, jnp.bool_(True) if may_abstain else ()),
      method=dataclasses.replace(self.method, drafter=drafter),
    )


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

  def speed(self) -> float:
    """Tokens per second."""
    return float(self.tokens().sum() / self.medians().sum())


class Programs:
  """Ways of decoding batches of one shape, compiled.

  Attributes:
    ways: those that are timed.
    baseline: the fastest plain way of the last `measure`.
    compile_seconds: of all of them.
  """

  def __init__(
    self,
    ways: Mapping[Any, Way],
    rng_key: Array,
    prompt: Prompt,
    *,
    plain: str,
    max_len: int,
  ):
    """Compiles.

    Args:
      ways: by key; plain ones by their dtypes.
      rng_key: as for `speculative.generate`.
      prompt: a batch of the shape.
      plain: the dtype that drafts are verified in.
      max_len: as for `speculative.generate`.
    """
    started = time.perf_counter()
    self.ways, self._plain, self._is_warm = {**ways}, plain, False
    self.baseline = ''
    self._prefills: dict[str, Callable[[Prompt], DecodeState]] = {}
    # The widest draft needs the largest buffers.
    for way in sorted(ways.values(), key=lambda way: -way.gamma):
      if way.prefill not in self._prefills:
        init = functools.partial(
          speculative.init, method=way.method, max_len=max_len
        )
        args = way.params, rng_key
        init, _ = stopwatch.compile_seconds(init, *args, prompt)
        self._prefills[way.prefill] = functools.partial(init, *args)
    states = self._states(prompt)
    drafting = {key: way for key, way in ways.items() if way.gamma}
    self._full = {key: way.full() for key, way in drafting.items()}
    self._propose = {
      key: stopwatch.propose_programs(
        w.params, states[key], w.method.drafter, w.method.target
      )
      for key, w in drafting.items()
    }
    loops = {key: (way, states[key]) for key, way in ways.items()}
    loops |= {('cost', k): (way, states[k]) for k, way in self._full.items()}

    def compiled(way: Way, state: DecodeState) -> Any:
      return stopwatch.compile_seconds(way.run, way.params, state)[0]

    self._runs = stopwatch.together(
      {key: functools.partial(compiled, *loop) for key, loop in loops.items()}
    )
    self.compile_seconds = time.perf_counter() - started

  def _states(self, prompt: Prompt) -> dict[Any, DecodeState]:
    """What every way begins with."""
    names = {way.prefill for way in self.ways.values()}
    filled = {name: self._prefills[name](prompt) for name in names}
    num_rows = prompt.decoder_lengths.size
    return {
      key: dataclasses.replace(
        filled[way.prefill], statistics=statistics.init(num_rows, way.gamma)
      )
      for key, way in self.ways.items()
    }

  def _calls(self, prompt: Prompt) -> dict[Any, Callable]:
    """What is timed in turns: ways by key, and by longer keys target calls at
    full width (`cost`), those without a draft (`without`), and drafts."""
    states, runs = self._states(prompt), self._runs
    calls: dict[Any, Callable] = {
      key: functools.partial(runs[key], way.params, states[key])
      for key, way in self.ways.items()
    }
    for key, way in self._full.items():
      state = sides.shorten(states[key], _NUM_COST_TOKENS)
      run = runs['cost', key]
      calls['cost', key] = functools.partial(run, way.params, state)
      if way.method.drafter.may_abstain:
        params = Params(way.params.target, jnp.bool_(False))
        calls['without', key] = functools.partial(run, params, state)
    for key, made in self._propose.items():
      calls |= {('draft', key, i): call for i, call in enumerate(made)}
    return calls

  def measure(
    self,
    prompts: Sequence[Prompt],
    *,
    repeats: int,
    is_greedy: bool,
    advance: Callable[[int], None] = lambda num_done: None,
  ) -> dict[Any, dict[str, Any]]:
    """Decodes every prompt in every way, in turns; all once before, the first
    time. Plain ways that are far from the fastest on the first prompt are not
    timed further, but for the one that drafts are compared with.

    Args:
      prompts: batches.
      repeats: turns.
      is_greedy: whether texts are compared with plain decoding's.
      advance: progress, called with 1 after every batch.

    Returns:
      `figures` of each speculative way, by key.

    Raises:
      ValueError: if a model returned logits that are not numbers.
    """
    plain = self.ways[self._plain]
    timed = {
      key: Timed(margins=[] if is_greedy and not way.is_plain else None)
      for key, way in self.ways.items()
    }
    costs = []
    for prompt in prompts:
      seconds, finals = stopwatch.alternate(
        self._calls(prompt), repeats, warm_up=() if self._is_warm else None
      )
      self._is_warm = True
      for key in self.ways:
        found, final = timed[key], finals[key]
        if np.any(final.has_nan):
          raise ValueError('the logits were not numbers (NaN)')
        found.seconds.append(seconds[key])
        found.statistics.append(jax.device_get(final.statistics))
        if found.margins is not None:
          same = benchmark.sameness(
            plain.method.target, plain.params, [finals[self._plain]], [final]
          )
          margins = same['divergence_margins']
          num_ended = same['num_divergent_rows'] - len(margins)
          found.margins.extend([*margins, *[np.inf] * num_ended])
      costs.append(self._costs(seconds, finals))
      if not self.baseline and len(costs) == 1:
        self._keep_fast(timed)
      advance(1)
    self.baseline = max(self._plain_ways(), key=lambda key: timed[key].speed())
    medians = jax.tree.map(lambda *each: float(np.median(each)), *costs)
    return {
      key: figures(
        timed[key],
        plain=timed[self._plain],
        baseline=timed[self.baseline],
        costs=medians.get(key, {}),
        dtype=self._plain,
      )
      for key, way in self.ways.items()
      if not way.is_plain
    }

  def _plain_ways(self) -> list[Any]:
    return [key for key, way in self.ways.items() if way.is_plain]

  def _keep_fast(self, timed: Mapping[Any, Timed]) -> None:
    """Drops plain ways that cannot be the fastest."""
    speeds = {key: timed[key].speed() for key in self._plain_ways()}
    for key, speed in speeds.items():
      if key != self._plain and speed < _CLOSE * max(speeds.values()):
        del self.ways[key]

  def _costs(
    self, seconds: Mapping[Any, np.ndarray], finals: Mapping[Any, Any]
  ) -> dict[Any, dict[str, float]]:
    """What drafts and target calls cost over T(1), in the turns of a batch."""

    def iteration(key: Any) -> float:
      num_iterations = int(finals[key].statistics.num_target_runs.max())
      return float(np.median(seconds[key])) / num_iterations

    one, found = iteration(self._plain), {}
    for key, made in self._propose.items():
      turns = [seconds['draft', key, i] for i in range(len(made))]
      draft = stopwatch.propose_seconds(made, turns) / self.ways[key].gamma
      full = iteration(('cost', key))
      found[key] = {'c': draft / one, 'verify_cost_ratio': full / one}
      if ('without', key) in finals:
        without = iteration(('without', key))
        found[key]['without_draft_cost_ratio'] = without / one
    return found


def figures(
  drafted: Timed,
  *,
  plain: Timed,
  baseline: Timed,
  costs: Mapping[str, Any],
  dtype: str,
) -> dict[str, Any]:
  """What the table says of a speculative way.

  Args:
    drafted: what was measured of it.
    plain: the same of plain decoding in its dtype.
    baseline: the same of the fastest plain decoding.
    costs: `c`, `verify_cost_ratio` and, for a drafter that may abstain,
      `without_draft_cost_ratio`, over T(1); none if nothing is drafted.
    dtype: whose rounding makes near ties.

  Returns:
    Figures by name. Rates are None where nothing was drafted, and the interval,
    over batches, with fewer than two of them.
  """
  count = lambda timed: benchmark.count(timed.statistics)
  counts, margins = count(drafted), drafted.margins
  of_rows = counts.statistics
  passed = zip(
    of_rows.num_accepted.sum(0), of_rows.num_tested.sum(0), strict=True
  )
  alphas = [*(estimates.alpha(*each) for each in passed), *[None] * _NUM_ALPHAS]
  # Plain decoding's time for as many tokens.
  plain_seconds = baseline.medians() / baseline.tokens() * drafted.tokens()
  speedup, interval = estimates.ratio(plain_seconds, drafted.medians())
  iteration = lambda timed: timed.medians().sum() / count(timed).iterations
  costs = {'c': 0.0, 'verify_cost_ratio': 1.0, **costs}
  num_rows = int(np.count_nonzero(of_rows.num_tokens))
  identical = near = None
  if margins is not None:
    identical = num_rows - len(margins)
    near = sum(margin < _NEAR_TIES[dtype] for margin in margins)
  rates = metrics.rates(of_rows)
  return {
    'tokens_per_target_run': rates.block_efficiency,
    **{f'alpha_{i + 1}': alphas[i] for i in range(_NUM_ALPHAS)},
    'alpha': rates.alpha,
    **costs,
    'plain_tokens_per_second': baseline.speed(),
    'speculative_tokens_per_second': drafted.speed(),
    'speedup': speedup,
    'speedup_interval': interval,
    'predicted_speedup': benchmark.predict_speedup(
      count(baseline),
      counts,
      num_drafted=counts.iterations * of_rows.num_tested.shape[1],
      baseline_cost=iteration(baseline) / iteration(plain),
      **costs,
    ),
    'rows': num_rows,
    'identical_rows': identical,
    'near_ties': near,
  }
