"""Plain against speculative decoding: times, rates, prediction and sameness.

Both sides decode the same prompts in one process, alternating and warm. Times
are of decoding after the prefill, and counters come from the decodes that were
timed.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, theory
from specdec_jax.base import Array, Drafter, LanguageModel, Params
from specdec_jax.decoding.state import DecodeState
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.measure import metrics, stopwatch
from specdec_jax.measure import sides as sides_lib
from specdec_jax.measure.sides import Side

# What rounding and a quiet machine explain.
_SLACK = 0.03
# Of turns, the longest over the shortest, beyond which a machine is busy.
_SPREAD = 0.15


def compare(
  *,
  target: LanguageModel,
  baseline: Side,
  plain: Side,
  drafted: Side,
  full_width: Side,
  drafter: Drafter,
  propose: Sequence[stopwatch.Repeated],
  repeats: int,
  is_adaptive: bool = False,
  advance: Callable[[int], None] = lambda num_done: None,
) -> dict[str, Any]:
  """Times both sides and predicts the one from the costs of the other.

  Args:
    target: the target of both sides.
    baseline: the fastest plain configuration, which the speedup is against.
    plain: plain decoding in the drafted side's own configuration, whose T(1)
      the costs are relative to; may be the baseline.
    drafted: speculative decoding.
    full_width: of `sides.full_width_side`, with `may_abstain` where the
      drafter may have no draft, and iterations without one are timed, too.
    drafter: the drafted side's; where its gamma varies, the same without.
    propose: what times it, see `sides.propose_programs`.
    repeats: timed runs of each.
    is_adaptive: whether its gamma varies. The theorem then does not apply, and
      what several rows drafted, by the slowest row each time, is unknown.
    advance: progress, see `stopwatch.alternate`.

  Returns:
    Figures by name; times in seconds, costs relative to one plain iteration.
    The tokens of `plain`, `compared_tokens` of them, are those that the drafted
    side's are compared with: the baseline's can be others. Rates of drafts are
    None where nothing was drafted.

  Raises:
    ValueError: if a model returned logits that are not numbers.
  """
  sides = {
    'baseline': baseline,
    'speculative': drafted,
    'full_width': full_width,
    'launch': sides_lib.finished(full_width),
  }
  if plain is not baseline:
    sides['plain'] = plain
  if drafter.may_abstain:
    sides['without_draft'] = sides_lib.without_drafts(full_width)
  seconds, outputs, propose_seconds = _time(sides, propose, repeats, advance)
  for found in (seconds, outputs):
    found.setdefault('plain', found['baseline'])
  counts = {
    name: count([state.statistics for state in states])
    for name, states in outputs.items()
  }

  per_iteration = functools.partial(
    _iteration, seconds, counts, len(drafted.states)
  )
  one_position = per_iteration('plain')
  full = per_iteration('full_width')
  figures = _speeds(seconds, counts, sides)
  figures |= _rates(counts['speculative'].statistics, drafter)
  num_drafted: int | None = counts['speculative'].iterations * drafter.gamma
  if is_adaptive:
    num_drafted = None
    if drafted.states[0].context.lengths.size == 1:
      num_drafted = int(counts['speculative'].statistics.num_drafted.sum())
  costs: dict[str, Any] = {
    'c': propose_seconds / drafter.gamma / one_position,
    'verify_cost_ratio': full / one_position,
    'without_draft_cost_ratio': None,
  }
  if drafter.may_abstain:
    without = per_iteration('without_draft')
    costs['without_draft_cost_ratio'] = without / one_position
  figures |= costs | {
    'seconds_per_plain_iteration': one_position,
    'seconds_per_full_width_iteration': full,
    'seconds_per_propose': propose_seconds,
    'predicted_speedup': predict_speedup(
      counts['baseline'],
      counts['speculative'],
      num_drafted=num_drafted,
      baseline_cost=per_iteration('baseline') / one_position,
      **costs,
    ),
    'theory_speedup': None,
    'compared_tokens': _num_tokens(counts['plain']),
  }
  if figures['alpha'] is not None and not (is_adaptive or drafter.tree):
    figures['theory_speedup'] = float(
      theory.walltime_improvement(figures['alpha'], drafter.gamma, costs['c'])
    )
  return figures | sameness(
    target, plain.params, outputs['plain'], outputs['speculative']
  )


def _time(
  sides: Mapping[str, Side],
  propose: Sequence[stopwatch.Repeated],
  repeats: int,
  advance: Callable[[int], None],
) -> tuple[dict[str, np.ndarray], dict[str, Any], float]:
  """Seconds and final states of each side, and seconds of a draft, in turns."""
  programs: dict[Any, Callable] = {n: side.decode for n, side in sides.items()}
  programs |= dict(enumerate(propose))
  seconds, outputs = stopwatch.alternate(programs, repeats, advance)
  outputs = {name: outputs[name] for name in sides}
  if any(np.any(s.has_nan) for states in outputs.values() for s in states):
    raise ValueError('the logits were not numbers (NaN): nothing to time')
  drafting = stopwatch.propose_seconds(
    propose, [seconds.pop(i) for i in range(len(propose))]
  )
  return seconds, outputs, drafting


def _iteration(
  seconds: Mapping[str, np.ndarray],
  counts: Mapping[str, 'Counts'],
  num_batches: int,
  name: str,
) -> float:
  """Seconds of an iteration. A short decode that is only there for its time
  begins as often per iteration as the drafted one of `num_batches`."""
  total, iterations = float(np.median(seconds[name])), counts[name].iterations
  if name not in ('full_width', 'without_draft'):
    return total / iterations
  launch = min(float(np.median(seconds['launch'])), total)
  share = num_batches / counts['speculative'].iterations
  return (total - launch) / iterations + launch * share


@dataclasses.dataclass(frozen=True)
class Counts:
  """Counters of all batches of one side: of their rows, of the loop's
  iterations, and of those of them that scored one position."""

  statistics: Statistics
  iterations: int
  short_iterations: int


def count(statistics: Sequence[Statistics]) -> Counts:
  """The counters of batches, together."""
  batches = jax.device_get(list(statistics))
  return Counts(
    statistics=metrics.joined(batches),
    iterations=sum(int(s.num_target_runs.max()) for s in batches),
    short_iterations=sum(int(s.num_short_runs.max()) for s in batches),
  )


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
  """The speedup that these costs allow, of both sides' measured tokens per run:
  `theory.predicted_speedup`, with the price of iterations without a draft.

  Costs are relative to T(1): `c` of a drafted token, the others of iterations
  that score gamma + 1 positions, that score one for want of a draft (None if
  the drafter always has one), and of the baseline. `num_drafted` are the steps
  of the drafter, in all iterations; None if not known, and so the result.
  """
  if num_drafted is None:
    return None
  num_short = drafted.short_iterations
  scoring = (
    (drafted.iterations - num_short) * verify_cost_ratio
    + num_short * (without_draft_cost_ratio or 1.0)
  ) / drafted.iterations
  speedup = theory.predicted_speedup(
    _num_tokens(drafted) / drafted.iterations,
    num_drafted / drafted.iterations,
    c,
    scoring,
  )
  plain_pace = _num_tokens(baseline) / baseline.iterations
  return float(speedup / plain_pace * baseline_cost)


def _num_tokens(counts: Counts) -> int:
  return int(np.sum(counts.statistics.num_tokens))


def _speeds(
  seconds: Mapping[str, np.ndarray],
  counts: Mapping[str, Counts],
  sides: Mapping[str, Side],
) -> dict[str, Any]:
  """Tokens per second of both sides by their median turns, as all other times
  are, and their ratio; its range is that of the turns pair by pair."""
  speed = lambda name, took: float(_num_tokens(counts[name]) / took)
  median = lambda name: float(np.median(seconds[name]))
  plain = speed('baseline', median('baseline'))
  drafted = speed('speculative', median('speculative'))
  ratios = (seconds['baseline'] / seconds['speculative']) * (
    _num_tokens(counts['speculative']) / _num_tokens(counts['baseline'])
  )
  pace = lambda name: _num_tokens(counts[name]) / counts[name].iterations
  whole = lambda name: median(name) + sides[name].prefill_seconds
  return {
    'autoregressive_tokens_per_second': plain,
    'speculative_tokens_per_second': drafted,
    'speedup': drafted / plain,
    'speedup_range': [float(ratios.min()), float(ratios.max())],
    'most_speedup': pace('speculative') / pace('baseline'),
    'turn_seconds': {
      'plain': seconds['baseline'].tolist(),
      'speculative': seconds['speculative'].tolist(),
    },
    'tokens': _num_tokens(counts['speculative']),
    'autoregressive_tokens': _num_tokens(counts['baseline']),
    'target_runs': counts['speculative'].iterations,
    'short_target_runs': counts['speculative'].short_iterations,
    'autoregressive_target_runs': counts['baseline'].iterations,
    'prefill_seconds': sides['speculative'].prefill_seconds,
    'end_to_end_speedup': whole('baseline') / whole('speculative'),
  }


def doubts(figures: Mapping[str, Any]) -> list[str]:
  """Sentences on figures of `compare` that cannot be, and on a machine with
  other work."""
  ratio, found = figures['verify_cost_ratio'], []
  if ratio < 1 - _SLACK:
    found.append(
      f'scoring a whole draft is timed at {ratio:.2f} of a plain step, and '
      'cannot cost less than one'
    )
  most = figures['most_speedup']
  if figures['speedup'] > most * (1 + _SLACK):
    found.append(
      f'the speed of {figures["speedup"]:.2f} is beyond the {most:.2f} tokens '
      'that a target run gives for each of plain decoding'
    )
  for name, turns in figures['turn_seconds'].items():
    if max(turns) > (1 + _SPREAD) * min(turns):
      found.append(
        f'{name} decoding took {min(turns):.3g} to {max(turns):.3g} s for the '
        'same work'
      )
  if hasattr(os, 'getloadavg'):  # Not everywhere.
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:
      found.append(f'the load is {load:.1f} on {cores} cores')
  return found


def _rates(statistics: Statistics, drafter: Drafter) -> dict[str, float | None]:
  """Acceptance rates, and the alpha that independent acceptances would need for
  the same block efficiency; None where nothing was drafted, and of trees, which
  have no gamma."""
  found, implied = metrics.rates(statistics), None
  efficiency = found.block_efficiency
  is_chain, gamma = drafter.tree is None, drafter.gamma
  if efficiency is not None and is_chain and np.any(statistics.num_drafted):
    efficiency = np.clip(efficiency, 1, gamma + 1)
    implied = float(theory.alpha_from_block_efficiency(efficiency, gamma))
  return {**found._asdict(), 'alpha_from_block_efficiency': implied}


def sameness(
  target: LanguageModel,
  params: Params,
  expected: Sequence[DecodeState],
  found: Sequence[DecodeState],
) -> dict[str, Any]:
  """Whether both sides decoded the same tokens, and if not, how near the miss
  was: the logit margin of plain decoding's token at the first difference.

  Given are the plain side's params, where it ended, one state per batch, and
  where the other did. Margins are None where there are none: a row that only
  ends earlier than the other has no such token.
  """
  margins, num_divergent = [], 0
  for state, other in zip(expected, found, strict=True):
    a, b = jax.device_get((state.context, other.context))
    for row in range(a.lengths.size):
      length = min(a.lengths[row], b.lengths[row])
      differs = a.tokens[row, :length] != b.tokens[row, :length]
      num_divergent += bool(differs.any() or a.lengths[row] != b.lengths[row])
      if differs.any():
        position = int(differs.argmax())
        logits = _logits_after(target, params, state, np.int32(position))[row]
        ours, theirs = a.tokens[row, position], b.tokens[row, position]
        margins.append(float(logits[ours] - logits[theirs]))
  return {
    'identical': not num_divergent,
    'num_divergent_rows': num_divergent,
    'divergence_margins': margins,
    'first_divergence_margin': margins[0] if margins else None,
    'largest_divergence_margin': max(margins, default=None),
  }


@functools.partial(jax.jit, static_argnames='target')
def _logits_after(
  target: LanguageModel, params: Params, state: DecodeState, position: Array
) -> Array:
  """Logits `[B, V]` of what follows the first `position` tokens, from the cache
  that plain decoding left."""
  lengths = jnp.full_like(state.context.lengths, position)
  last = arrays.read_block(state.context.tokens, lengths - 1, 1)
  cache = target.rewind(state.target_cache, lengths - 1)
  logits, _ = target.extend(params.target, last, cache)
  return logits[:, 0]
