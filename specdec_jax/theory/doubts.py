"""Why measured times may be wrong: impossible figures, or a busy machine."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# What rounding and a quiet machine explain: of a ratio of two times, and of a
# whole beside its parts, each of which is a difference of times.
_SLACK, _SLACK_OF_PARTS = 0.03, 0.1
# Of turns, the longest over the shortest, beyond which a machine is busy.
_SPREAD = 0.15
# A draft model takes at least this share of the time that its share of the
# parameters would: its weights may be packed, and its encoder has no part in a
# drafted token.
_LEAST = 0.1


def sentence(doubts: Sequence[str]) -> str:
  """Returns all doubts as a sentence for users, '' without any."""
  if not doubts:
    return ''
  reasons = '; '.join(doubts)
  return f'These times are in doubt: {reasons}. Repeat on a quiet machine.'


def of_speeds(figures: Mapping[str, Any]) -> list[str]:
  """Lists doubts about figures of `benchmark.compare`."""
  found = _of_ratio(figures['verify_cost_ratio'])
  most = figures['most_speedup']
  if figures['speedup'] > most * (1 + _SLACK):
    found.append(
      f'the speed of {figures["speedup"]:.2f} is beyond the {most:.2f} tokens '
      'that a target run gives for each of plain decoding'
    )
  return found + of_turns(figures['turn_seconds'])


def of_costs(
  figures: Mapping[str, Any], *, is_one_by_one: bool = False
) -> list[str]:
  """Lists doubts about the times of an iteration's parts.

  Args:
    figures: fields of `theory.costs.Costs`, and perhaps `extend_seconds` and
      `iteration_seconds`, see `iteration_costs.CostPrograms.costs`.
    is_one_by_one: whether the drafter calls a network for every token, so that
      the first and a further one cost about the same.
  """
  ms = lambda seconds: f'{1e3 * seconds:.4g} ms'
  plain, scoring = figures['target_seconds'][0], figures['target_seconds'][-1]
  width = figures['widths'][-1]
  found = _of_ratio(scoring / plain)
  target_call = figures.get('extend_seconds') or 0.0
  if target_call > scoring * (1 + _SLACK_OF_PARTS):
    found.append(
      f'the target call by itself is timed at {ms(target_call)}, and '
      f'T({width}), of which it is a part, at {ms(scoring)}'
    )
  first, further = figures['first_draft_seconds'], figures['draft_seconds']
  c_hat = figures['c_hat']
  if first < _LEAST * c_hat * plain:
    found.append(
      f'a drafted token is timed at {ms(first)}, and a plain step at '
      f'{ms(plain)}: too little for {c_hat:.2g} of the parameters'
    )
  elif is_one_by_one and further < _LEAST * first:
    found.append(
      f'a further drafted token is timed at {ms(further)}, and the first at '
      f'{ms(first)}'
    )
  parts = first + (width - 2) * further + scoring
  iteration = figures.get('iteration_seconds')
  if iteration is not None and parts > iteration * (1 + _SLACK_OF_PARTS):
    found.append(
      f'the parts of an iteration are timed at {ms(parts)} together, and the '
      f'iteration at {ms(iteration)}'
    )
  return found


def of_turns(
  turn_seconds: Mapping[str, Sequence[float]], *, is_short: bool = False
) -> list[str]:
  """Lists doubts about seconds of the same work in each turn, by what decoded.

  With `is_short` the work takes a moment, and any process may double the time
  of one turn: then only the middle half of the turns counts.
  """
  ends = [0.25, 0.75] if is_short else [0.0, 1.0]
  ranges = {
    name: np.quantile(turns, ends) for name, turns in turn_seconds.items()
  }
  return [
    f'{name} decoding took {least:.3g} to {most:.3g} s for the same work'
    for name, (least, most) in ranges.items()
    if most > (1 + _SPREAD) * least
  ]


def of_load() -> list[str]:
  """Lists the doubt that other work leaves at this moment, if there is any."""
  if not hasattr(os, 'getloadavg'):  # Not everywhere.
    return []
  load, cores = os.getloadavg()[0], os.cpu_count() or 1
  return (
    [f'the load is {load:.1f} on {cores} cores'] if load > cores + 1 else []
  )


def _of_ratio(verify_cost_ratio: float) -> list[str]:
  """Lists the doubt about T(gamma + 1) / T(1)."""
  if verify_cost_ratio >= 1 - _SLACK:
    return []
  return [
    f'scoring a whole draft is timed at {verify_cost_ratio:.2f} of a plain '
    'step, and cannot cost less than one'
  ]
