"""Plain against speculative decoding: times, rates, prediction and sameness.

All sides decode the same prompts in one process, alternating and warm. Times
are of decoding after the prefill, and counters come from the decodes that were
timed.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from specdec_jax import theory
from specdec_jax.base import Drafter
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.rates import Counts
from specdec_jax.measure import sameness, stopwatch
from specdec_jax.measure import sides as sides_lib
from specdec_jax.measure.sides import Side, Timed
from specdec_jax.theory import estimates

Name = TypeVar('Name')
Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafted:
  """Speculative decoding, compiled, and what its parts are timed by.

  Attributes:
    side: the decoding itself; `full_width` is of `sides.full_width_side`.
    propose: of `stopwatch.propose_programs`; none if nothing is ever drafted.
    ends_early: whether drafts end early. The theorem then does not apply, and
      what several rows drafted, by the slowest row each time, is unknown.
  """

  side: Side
  full_width: Side
  propose: Sequence[stopwatch.Repeated]
  ends_early: bool = False

  @property
  def drafter(self) -> Drafter:
    return self.side.program.method.drafter

  def sides(self) -> dict[str, Side]:
    """Returns what is timed, by name: `speculative`, iterations at `full_width`
    and, where the drafter may have no draft, `without_draft`; and `launch`."""
    found = {
      'speculative': self.side,
      'full_width': self.full_width,
      'launch': sides_lib.finished(self.full_width),
    }
    if self.drafter.may_abstain:
      found['without_draft'] = sides_lib.without_drafts(self.full_width)
    return found


def drafted(
  side: Side, *, fixed: Drafter | None = None, ends_early: bool = False
) -> Drafted:
  """Compiles what times the parts of a side of `sides.speculative_side`.

  `fixed` is the drafter of one whose drafts end early, as it is without that.
  """
  method, state = side.program.method, side.states[0]
  propose: tuple[stopwatch.Repeated, ...] = ()
  if fixed is not None:
    state = dataclasses.replace(state, drafter_state=state.drafter_state.cache)
  if method.drafter.gamma:
    propose = stopwatch.propose_programs(
      side.params, state, fixed or method.drafter, method.target
    )
  return Drafted(
    side=side,
    full_width=sides_lib.full_width_side(side),
    propose=propose,
    ends_early=ends_early,
  )


def compare(
  ways: Mapping[Name, Drafted],
  *,
  plain: Side,
  baseline: Side,
  repeats: int,
  expected: Side | None = None,
  title: str = '',
) -> dict[Name, Figures]:
  """Times all sides in turns and predicts each speedup from the costs of parts.

  Speculative decoding is given by name. T(1), which costs are relative to, and
  the tokens that theirs are compared with are those of `plain`, in their dtype,
  unless `expected` is plain decoding of another width.
  Speedups are against `baseline`, the fastest plain configuration, which may be
  `plain`. `title` is that of `stopwatch.alternate`.

  Returns figures by name; times are in seconds, and rates of drafts None where
  nothing was drafted. ValueError if a model returned logits that are not
  numbers.
  """
  sides: dict[Hashable, Side] = {'baseline': baseline}
  if plain is not baseline:
    sides['plain'] = plain
  for name, way in ways.items():
    sides |= {(name, kind): side for kind, side in way.sides().items()}
  timed, propose_seconds = _time(sides, ways, repeats, title)
  # The plain side itself may be the fastest.
  timed.setdefault('plain', timed['baseline'])
  judge, states = plain, timed['plain'].states
  if expected is not None:
    judge, states = expected, expected.decode()
  found = {}
  for name, way in ways.items():
    own = {kind: timed[name, kind] for kind in way.sides()}
    whole = timed['baseline'].total + baseline.prefill_seconds
    drafted = own['speculative'].total + way.side.prefill_seconds
    found[name] = {
      **figures(
        way,
        own,
        plain=timed['plain'],
        baseline=timed['baseline'],
        propose_seconds=propose_seconds[name],
      ),
      'prefill_seconds': way.side.prefill_seconds,
      'end_to_end_speedup': whole / drafted,
      **sameness.sameness(
        # A drafter on the target's features brings a target of its own.
        judge.program.method.target,
        judge.params,
        states,
        own['speculative'].states,
      ),
    }
  return found


def _time(
  sides: Mapping[Hashable, Side],
  ways: Mapping[Name, Drafted],
  repeats: int,
  title: str,
) -> tuple[dict[Hashable, Timed], dict[Name, float]]:
  """Returns what sides have shown, and the seconds of a draft of each way."""
  calls: dict[Hashable, Callable[[], Any]] = {**sides_lib.calls(sides)}
  for name, way in ways.items():
    calls |= {('draft', name, i): each for i, each in enumerate(way.propose)}
  seconds, results = stopwatch.alternate(calls, repeats, title=title)
  timed = sides_lib.timed(sides, seconds, results)
  for each in timed.values():
    if any(np.any(state.has_nan) for state in each.states):
      raise ValueError('the logits were not numbers (NaN): nothing to time')
  return timed, {
    name: stopwatch.propose_seconds(
      way.propose, [seconds['draft', name, i] for i in range(len(way.propose))]
    )
    for name, way in ways.items()
  }


def figures(
  way: Drafted,
  timed: Mapping[str, Timed],
  *,
  plain: Timed,
  baseline: Timed,
  propose_seconds: float,
) -> Figures:
  """Returns what the times of the sides of `way`, by their names, and their
  counters say; see `compare`. `propose_seconds` is of one draft."""
  drafter, drafted = way.drafter, timed['speculative']
  one_position = plain.per_iteration
  full = _short_iteration(timed['full_width'], timed)
  without = None
  if drafter.may_abstain:
    without = _short_iteration(timed['without_draft'], timed) / one_position
  num_drafted: int | None = drafted.counts.iterations * drafter.gamma
  if way.ends_early:
    num_drafted = None
    if drafted.states[0].context.lengths.size == 1:
      num_drafted = int(drafted.counts.statistics.num_drafted.sum())
  # All relative to one plain step in the dtype that verifies. The baseline may
  # be of another dtype, and has its own cost in `predict_speedup`.
  c = propose_seconds / max(drafter.gamma, 1) / one_position
  costs = {
    'c': c,
    'verify_cost_ratio': full / one_position,
    'without_draft_cost_ratio': without,
  }
  found = _speeds(drafted, baseline) | _rates(drafted.counts, drafter) | costs
  found |= {
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
  if found['alpha'] is not None and not (way.ends_early or drafter.tree):
    found['theory_speedup'] = float(
      theory.walltime_improvement(found['alpha'], drafter.gamma, c)
    )
  return found


def _short_iteration(short: Timed, timed: Mapping[str, Timed]) -> float:
  """Returns seconds of an iteration if `short` began as often as the drafted
  one."""
  # 4 iterations in 10 s, of which to begin takes 6: 1 s per iteration. If the
  # drafted decode begins once per 60 iterations, each bears 6/60 s more: 1.1 s.
  drafted = timed['speculative']
  launch = min(timed['launch'].total, short.total)
  share = len(drafted.states) / drafted.counts.iterations
  return (short.total - launch) / short.counts.iterations + launch * share


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
  """Predicts the speedup from the measured tokens per run of both sides, by
  `theory.predicted_speedup` with the price of iterations without a draft.

  Costs are relative to T(1): `c` of a drafted token, the others of iterations
  that score gamma + 1 positions, that score one for want of a draft (None if
  there always is one), and of the baseline. `num_drafted` counts the drafter's
  steps in all iterations; None if unknown, and so is the result.
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
  """Returns tokens per second by the median turns, and their ratio, whose range
  is that of the turns pair by pair, and whose interval that of the batches,
  None for fewer than two."""
  # Plain decoding's time for as many tokens: 1.2 times as long for a batch of
  # 120 drafted and 100 plain tokens, where texts are drawn.
  ratio = drafted.num_tokens / baseline.num_tokens
  medians = np.median(baseline.seconds, axis=1), np.median(drafted.seconds, 1)
  _, interval = estimates.ratio(medians[0] * ratio, medians[1])
  counts, plain = drafted.counts, baseline.counts
  turns = (
    baseline.turns / drafted.turns * (counts.num_tokens / plain.num_tokens)
  )
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
  need for the block efficiency: None where nothing was drafted, and of trees.
  """
  statistics = counts.statistics
  found, implied = metrics.rates(statistics), None
  efficiency = found.block_efficiency
  is_chain, gamma = drafter.tree is None, drafter.gamma
  if efficiency is not None and is_chain and np.any(statistics.num_drafted):
    efficiency = np.clip(efficiency, 1, gamma + 1)
    implied = float(theory.alpha_from_block_efficiency(efficiency, gamma))
  passed = zip(
    statistics.num_accepted.sum(0), statistics.num_tested.sum(0), strict=True
  )
  return {
    **found._asdict(),
    'alpha_from_block_efficiency': implied,
    'alpha_by_position': [estimates.quotient(*each) for each in passed],
    'rows': int(np.count_nonzero(statistics.num_tokens)),
  }
