"""Plain against speculative decoding: times, rates, prediction and sameness.

All loops decode the same prompts in one process, alternating and warm. Times
are of decoding after the prefill; counters are of the timed decodes.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from specdec_jax import theory
from specdec_jax.base import Drafter
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.rates import Counts
from specdec_jax.measure import loops as loops_lib
from specdec_jax.measure import sameness, stopwatch
from specdec_jax.measure.loops import CompiledLoop, Timed
from specdec_jax.theory import estimates

Name = TypeVar('Name')
Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafted:
  """Speculative decoding, compiled, and programs that time its parts.

  Attributes:
    loop: the decoding itself.
    full_width: of `loops.full_width_loop`.
    propose: of `stopwatch.propose_programs`; empty if nothing is drafted.
    ends_early: whether drafts end early. The theorem then does not apply, and
      the number of draft steps of several rows is unknown, since each iteration
      takes as many as its longest draft.
  """

  loop: CompiledLoop
  full_width: CompiledLoop
  propose: Sequence[stopwatch.Repeated]
  ends_early: bool = False

  @property
  def drafter(self) -> Drafter:
    return self.loop.program.method.drafter

  def loops(self) -> dict[str, CompiledLoop]:
    """Returns the loops to time, by name: `speculative`, `full_width`,
    `launch` and, if the drafter may abstain, `without_draft`."""
    loops = {
      'speculative': self.loop,
      'full_width': self.full_width,
      'launch': loops_lib.finished(self.full_width),
    }
    if self.drafter.may_abstain:
      loops['without_draft'] = loops_lib.without_drafts(self.full_width)
    return loops


def drafted(
  loop: CompiledLoop, *, fixed: Drafter | None = None, ends_early: bool = False
) -> Drafted:
  """Compiles programs that time the parts of a `loops.speculative_loop`.

  `fixed`, for a drafter whose drafts end early, is the same drafter without
  that.
  """
  method, state = loop.program.method, loop.states[0]
  propose: tuple[stopwatch.Repeated, ...] = ()
  if fixed is not None:
    state = dataclasses.replace(state, drafter_state=state.drafter_state.cache)
  if method.drafter.gamma:
    propose = stopwatch.propose_programs(
      loop.params, state, fixed or method.drafter, method.target
    )
  return Drafted(
    loop=loop,
    full_width=loops_lib.full_width_loop(loop),
    propose=propose,
    ends_early=ends_early,
  )


def compare(
  configurations: Mapping[Name, Drafted],
  *,
  plain: CompiledLoop,
  baseline: CompiledLoop,
  repeats: int,
  expected: CompiledLoop | None = None,
  title: str = '',
) -> dict[Name, Figures]:
  """Times loops in turns, and predicts each speedup from the costs of parts.

  Args:
    configurations: speculative decoding, by name.
    plain: plain decoding in the same dtype: T(1), the unit of costs, and the
      tokens to compare with.
    baseline: the fastest plain configuration, which speedups are relative to;
      may be `plain`.
    repeats: timed runs of each.
    expected: plain decoding at another width, to compare tokens with in place
      of `plain`.
    title: of a progress bar.

  Returns figures by name: times in seconds; rates of drafts are None if nothing
  was drafted. ValueError if a model returned logits that are NaN.
  """
  # Time everything in turns.
  loops: dict[Hashable, CompiledLoop] = {'baseline': baseline}
  if plain is not baseline:
    loops['plain'] = plain
  for name, configuration in configurations.items():
    for part, loop in configuration.loops().items():
      loops[name, part] = loop
  timed, propose_seconds = _time(loops, configurations, repeats, title)
  # `plain` is not timed again if it is the baseline.
  timed.setdefault('plain', timed['baseline'])
  # Tokens are compared with those of plain decoding.
  reference = plain
  states = timed['plain'].states
  if expected is not None:
    reference = expected
    states = expected.decode()
  # Figures of each configuration.
  results = {}
  for name, configuration in configurations.items():
    parts = {part: timed[name, part] for part in configuration.loops()}
    plain_seconds = timed['baseline'].total + baseline.prefill_seconds
    prefill_seconds = configuration.loop.prefill_seconds
    drafted_seconds = parts['speculative'].total + prefill_seconds
    results[name] = {
      **figures(
        configuration,
        parts,
        plain=timed['plain'],
        baseline=timed['baseline'],
        propose_seconds=propose_seconds[name],
      ),
      'prefill_seconds': prefill_seconds,
      'end_to_end_speedup': plain_seconds / drafted_seconds,
      **sameness.sameness(
        # A drafter on the target's features brings a target of its own.
        reference.program.method.target,
        reference.params,
        states,
        parts['speculative'].states,
      ),
    }
  return results


def _time(
  loops: Mapping[Hashable, CompiledLoop],
  configurations: Mapping[Name, Drafted],
  repeats: int,
  title: str,
) -> tuple[dict[Hashable, Timed], dict[Name, float]]:
  """Returns times and results of loops, and the seconds of a draft of each
  configuration."""
  calls: dict[Hashable, Callable[[], Any]] = {**loops_lib.calls(loops)}
  for name, configuration in configurations.items():
    for i, program in enumerate(configuration.propose):
      calls['draft', name, i] = program
  seconds, results = stopwatch.alternate(calls, repeats, title=title)
  timed = loops_lib.timed(loops, seconds, results)
  for result in timed.values():
    if any(np.any(state.has_nan) for state in result.states):
      raise ValueError('the logits were not numbers (NaN): nothing to time')
  propose_seconds = {}
  for name, configuration in configurations.items():
    programs = configuration.propose
    runs = [seconds['draft', name, i] for i in range(len(programs))]
    propose_seconds[name] = stopwatch.propose_seconds(programs, runs)
  return timed, propose_seconds


def figures(
  configuration: Drafted,
  timed: Mapping[str, Timed],
  *,
  plain: Timed,
  baseline: Timed,
  propose_seconds: float,
) -> Figures:
  """Computes the figures of a configuration from times and counters.

  `timed` has its loops by name (`Drafted.loops`), `propose_seconds` is of one
  draft; all else is as for `compare`.
  """
  drafter = configuration.drafter
  drafted = timed['speculative']
  # Seconds of an iteration: plain, at full width, and without a draft.
  one_position = plain.per_iteration
  full = _short_iteration(timed['full_width'], timed)
  without = None
  if drafter.may_abstain:
    without = _short_iteration(timed['without_draft'], timed) / one_position
  # Steps of the drafter.
  num_drafted: int | None = drafted.counts.iterations * drafter.gamma
  if configuration.ends_early:
    num_drafted = None
    if drafted.states[0].context.lengths.size == 1:
      num_drafted = int(drafted.counts.statistics.num_drafted.sum())
  # Costs are relative to a plain step in the target's dtype. The baseline may
  # be of another dtype, so that `predict_speedup` takes its cost.
  c = propose_seconds / max(drafter.gamma, 1) / one_position
  costs = {
    'c': c,
    'verify_cost_ratio': full / one_position,
    'without_draft_cost_ratio': without,
  }
  results = _speeds(drafted, baseline) | _rates(drafted.counts, drafter) | costs
  results |= {
    'seconds_per_plain_iteration': one_position,
    'seconds_per_full_width_iteration': full,
    'seconds_per_propose': propose_seconds,
    'predicted_speedup': predict_speedup(
      baseline.counts,
      drafted.counts,
      num_drafted=num_drafted,
      c=c,
      verify_cost_ratio=full / one_position,
      without_draft_cost_ratio=without,
      baseline_cost=baseline.per_iteration / one_position,
    ),
    'theory_speedup': None,
    'compared_tokens': plain.counts.num_tokens,
  }
  # The theorem is for chains of one gamma.
  has_theorem = not configuration.ends_early and not drafter.tree
  if has_theorem and results['alpha'] is not None:
    speedup = theory.walltime_improvement(results['alpha'], drafter.gamma, c)
    results['theory_speedup'] = float(speedup)
  return results


def _short_iteration(short: Timed, timed: Mapping[str, Timed]) -> float:
  """Returns the seconds of an iteration of `short`, a decode of a few tokens,
  with the launch spread over as many iterations as in the drafted decode."""
  # 4 iterations in 10 s, 6 of them for the launch: 1 s per iteration. If the
  # drafted decode has a launch per 60 iterations, 6/60 s more: 1.1 s.
  drafted = timed['speculative']
  launch = min(timed['launch'].total, short.total)
  launches_per_iteration = len(drafted.states) / drafted.counts.iterations
  iteration = (short.total - launch) / short.counts.iterations
  return iteration + launch * launches_per_iteration


def predict_speedup(
  baseline: Counts,
  drafted: Counts,
  *,
  num_drafted: int | None,
  c: float,
  verify_cost_ratio: float,
  without_draft_cost_ratio: float | None = None,
  baseline_cost: float = 1.0,
) -> float | None:
  """Predicts the speedup from the measured tokens per target run, by
  `theory.predicted_speedup` with the cost of iterations without a draft.

  Args:
    baseline: counts of plain decoding.
    drafted: counts of speculative decoding.
    num_drafted: steps of the drafter in all iterations; None if unknown, and so
      is the result.
    c: cost of a drafted token. All costs are relative to T(1).
    verify_cost_ratio: cost of scoring gamma + 1 positions.
    without_draft_cost_ratio: cost of an iteration without a draft; None if
      there always is one.
    baseline_cost: cost of an iteration of the baseline.
  """
  if num_drafted is None:
    return None
  # Of 10 iterations, 4 without a draft: 6 cost T(gamma + 1), 4 about T(1).
  num_short = drafted.short_iterations
  scoring = (
    (drafted.iterations - num_short) * verify_cost_ratio
    + num_short * (without_draft_cost_ratio or 1.0)
  ) / drafted.iterations
  speedup = theory.predicted_speedup(
    drafted.num_tokens / drafted.iterations,
    num_drafted / drafted.iterations,
    c,
    scoring,
  )
  plain_pace = baseline.num_tokens / baseline.iterations
  return float(speedup / plain_pace * baseline_cost)


def _speeds(drafted: Timed, baseline: Timed) -> Figures:
  """Returns tokens per second by the median turns, and the speedup, with its
  range over turns and its confidence interval over batches (None for fewer than
  two)."""
  # Sampled texts differ in length: for a batch of 120 drafted and 100 plain
  # tokens, plain decoding's time is scaled by 1.2.
  ratio = drafted.num_tokens / baseline.num_tokens
  medians = np.median(baseline.seconds, axis=1), np.median(drafted.seconds, 1)
  _, interval = estimates.ratio(medians[0] * ratio, medians[1])
  counts, plain = drafted.counts, baseline.counts
  turns = baseline.turns / drafted.turns
  turns = turns * (counts.num_tokens / plain.num_tokens)
  return {
    'autoregressive_tokens_per_second': baseline.speed,
    'speculative_tokens_per_second': drafted.speed,
    'speedup': drafted.speed / baseline.speed,
    'speedup_range': [float(turns.min()), float(turns.max())],
    'speedup_interval': interval,
    'most_speedup': counts.num_tokens
    / counts.iterations
    / (plain.num_tokens / plain.iterations),
    'turn_seconds': {
      'plain': baseline.turns.tolist(),
      'speculative': drafted.turns.tolist(),
    },
    'tokens': counts.num_tokens,
    'autoregressive_tokens': plain.num_tokens,
    'target_runs': counts.iterations,
    'short_target_runs': counts.short_iterations,
    'autoregressive_target_runs': plain.iterations,
  }


def _rates(counts: Counts, drafter: Drafter) -> Figures:
  """Returns acceptance rates, and the alpha that independent acceptances would
  need for the block efficiency: None if nothing was drafted, or for trees."""
  statistics = counts.statistics
  measured = metrics.rates(statistics)
  efficiency = measured.block_efficiency
  # Alpha from the block efficiency.
  implied = None
  is_chain = drafter.tree is None
  gamma = drafter.gamma
  if efficiency is not None and is_chain and np.any(statistics.num_drafted):
    efficiency = np.clip(efficiency, 1, gamma + 1)
    implied = float(theory.alpha_from_block_efficiency(efficiency, gamma))
  # Alpha by the position in the draft.
  num_accepted = statistics.num_accepted.sum(0)
  num_tested = statistics.num_tested.sum(0)
  pairs = zip(num_accepted, num_tested, strict=True)
  return {
    **measured._asdict(),
    'alpha_from_block_efficiency': implied,
    'alpha_by_position': [estimates.quotient(*pair) for pair in pairs],
    'rows': int(np.count_nonzero(statistics.num_tokens)),
  }
