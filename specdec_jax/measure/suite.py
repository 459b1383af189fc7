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
from specdec_jax.theory import estimates

# Keys of plain decoding: in the dtype that drafts are verified in, and in the
# fastest one.
PLAIN, BASELINE = 'plain', 'baseline'
# What is decoded to time iterations at full width, or without a draft.
_NUM_COST_TOKENS = 12
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
    if self.drafter is None:
      return autoregressive.run(params, state, target=self.target, **self.rule)
    models: dict[str, Any] = {'target': self.target, 'drafter': self.drafter}
    return speculative.run(params, state, **models, **self.rule)

  def full(self) -> 'Way':
    """The same loop if each iteration scores gamma + 1 positions, and drafts
    cost nothing: see `stopwatch.always_full`."""
    may_abstain = bool(self.drafter and self.drafter.may_abstain)
    return self._replace(
      params=Params(self.params.target, jnp.bool_(True) if may_abstain else ()),
      drafter=stopwatch.always_full(self.gamma, may_abstain=may_abstain),
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

  def per_iteration(self) -> float:
    """Seconds of an iteration."""
    counts = benchmark.count(self.statistics)
    return float(self.medians().sum() / counts.iterations)


class Programs:
  """Ways of decoding batches of one shape, compiled.

  Attributes:
    compile_seconds: of all of them.
  """

  def __init__(
    self,
    ways: Mapping[Any, Way],
    rng_key: Array,
    prompt: Prompt,
    max_len: int,
  ):
    """Compiles.

    Args:
      ways: by key, `PLAIN` among them, and `BASELINE` if it is another.
      rng_key: as for `speculative.generate`.
      prompt: a batch of the shape.
      max_len: as for `speculative.generate`.
    """
    started = time.perf_counter()
    self._ways, self._is_warm = {**ways}, False
    self._prefills: dict[str, Callable[[Prompt], DecodeState]] = {}
    # The widest draft needs the largest buffers.
    for way in sorted(ways.values(), key=lambda way: -way.gamma):
      if way.prefill not in self._prefills:
        drafter = way.drafter or stopwatch.always_full(0)
        init = functools.partial(
          speculative.init, target=way.target, drafter=drafter, max_len=max_len
        )
        args = way.params, rng_key
        init, _ = stopwatch.compile_seconds(init, *args, prompt)
        self._prefills[way.prefill] = functools.partial(init, *args)
    states = self._states(prompt)
    self._propose = {}
    for key, way in ways.items():
      if way.drafter and way.gamma:
        self._ways['cost', key] = way.full()
        states['cost', key] = states[key]
        self._propose[key] = stopwatch.propose_programs(
          way.params, states[key], way.drafter, way.target
        )

    def compiled(key: Any) -> Any:
      way = self._ways[key]
      return stopwatch.compile_seconds(way.run, way.params, states[key])[0]

    self._runs = stopwatch.together(
      {key: functools.partial(compiled, key) for key in self._ways}
    )
    self.compile_seconds = time.perf_counter() - started

  def _states(self, prompt: Prompt) -> dict[Any, DecodeState]:
    """What every way begins with."""
    filled = {name: fill(prompt) for name, fill in self._prefills.items()}
    num_rows = prompt.decoder_lengths.size
    return {
      key: dataclasses.replace(
        filled[way.prefill], statistics=statistics.init(num_rows, way.gamma)
      )
      for key, way in self._ways.items()
    }

  def _calls(self, prompt: Prompt) -> dict[Any, Callable]:
    """What is timed in turns, by key. Target calls at full width have `cost` in
    theirs, those without a draft `without`, and drafts `draft`."""
    calls: dict[Any, Callable] = {}
    for key, state in self._states(prompt).items():
      way = self._ways[key]
      if key[0] == 'cost':
        limits = state.context.lengths + _NUM_COST_TOKENS
        limits = jnp.minimum(limits, state.max_lengths)
        state = dataclasses.replace(state, max_lengths=limits)
        if way.drafter and way.drafter.may_abstain:
          params = Params(way.params.target, jnp.bool_(False))
          run = functools.partial(self._runs[key], params, state)
          calls['without', key[1]] = run
      calls[key] = functools.partial(self._runs[key], way.params, state)
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
  ) -> tuple[dict[Any, Timed], dict[Any, dict[str, Any]]]:
    """Decodes every prompt in every way, in turns; all once before, the first
    time.

    Args:
      prompts: batches.
      repeats: turns.
      is_greedy: whether texts are compared with plain decoding's.
      advance: progress, called with 1 after every batch.

    Returns:
      What was measured of each way; and of each that drafts `c`,
      `verify_cost_ratio` and, if it may abstain, `without_draft_cost_ratio`,
      over T(1) in the same turns: medians over batches.

    Raises:
      ValueError: if a model returned logits that are not numbers.
    """
    plain = self._ways[PLAIN]
    timed = {
      key: Timed(margins=[] if is_greedy and way.drafter else None)
      for key, way in self._ways.items()
      if key[0] != 'cost'
    }
    costs = []
    for prompt in prompts:
      warm_up = () if self._is_warm else None
      seconds, finals = stopwatch.alternate(
        self._calls(prompt), repeats, warm_up=warm_up
      )
      self._is_warm = True
      for key, found in timed.items():
        if np.any(finals[key].has_nan):
          raise ValueError('the logits were not numbers (NaN)')
        found.seconds.append(seconds[key])
        found.statistics.append(jax.device_get(finals[key].statistics))
        if found.margins is not None:
          same = benchmark.sameness(
            plain.target, plain.params, [finals[PLAIN]], [finals[key]]
          )
          margins = same['divergence_margins']
          num_ended = same['num_divergent_rows'] - len(margins)
          found.margins.extend([*margins, *[np.inf] * num_ended])
      costs.append(self._costs(seconds, finals))
      advance(1)
    return timed, jax.tree.map(lambda *each: float(np.median(each)), *costs)

  def _costs(
    self, seconds: Mapping[Any, np.ndarray], finals: Mapping[Any, Any]
  ) -> dict[Any, dict[str, float]]:
    """What drafts and target calls cost over T(1), in the turns of a batch."""

    def iteration(key: Any) -> float:
      num_iterations = int(finals[key].statistics.num_target_runs.max())
      return float(np.median(seconds[key])) / num_iterations

    one, found = iteration(PLAIN), {}
    for key, made in self._propose.items():
      turns = [seconds['draft', key, i] for i in range(len(made))]
      draft = stopwatch.propose_seconds(made, turns) / self._ways[key].gamma
      found[key] = {
        'c': draft / one,
        'verify_cost_ratio': iteration(('cost', key)) / one,
      }
      if ('without', key) in finals:
        without = iteration(('without', key))
        found[key]['without_draft_cost_ratio'] = without / one
    return found


def figures(
  timed: Mapping[Any, Timed], key: Any, costs: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
  """What the table says of a way.

  Args:
    timed: of `Programs.measure`.
    key: of a way that is not plain.
    costs: likewise; none for one that drafts nothing.
    dtype: whose rounding makes near ties.

  Returns:
    Figures by name. Rates are None where nothing was drafted, and the interval,
    over batches, with fewer than two of them.
  """
  drafted, baseline = timed[key], timed.get(BASELINE, timed[PLAIN])
  counts, margins = benchmark.count(drafted.statistics), drafted.margins
  of_rows = counts.statistics
  passed = zip(
    of_rows.num_accepted.sum(0), of_rows.num_tested.sum(0), strict=True
  )
  alphas = [estimates.alpha(*of_position) for of_position in passed]
  alphas = [*alphas, *[None] * _NUM_ALPHAS][:_NUM_ALPHAS]
  # Plain decoding's time for as many tokens.
  plain_seconds = baseline.medians() / baseline.tokens() * drafted.tokens()
  speedup, interval = estimates.ratio(plain_seconds, drafted.medians())
  speed = lambda side: float(side.tokens().sum() / side.medians().sum())
  rates, costs = (
    metrics.rates(of_rows),
    {'c': 0.0, 'verify_cost_ratio': 1.0, **costs},
  )
  num_rows = int(np.count_nonzero(of_rows.num_tokens))
  compared: dict[str, int | None] = dict.fromkeys(
    ('identical_rows', 'near_ties')
  )
  if margins is not None:
    num_near = sum(margin < _NEAR_TIES[dtype] for margin in margins)
    compared = {
      'identical_rows': num_rows - len(margins),
      'near_ties': num_near,
    }
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
    **compared,
  }
