"""Why measured times may be wrong: impossible figures, or a busy machine."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Errors that rounding and a quiet machine explain: of a ratio of two times, and
# of a sum of parts, each of which is a difference of times.
_SLACK, _SLACK_OF_PARTS = 0.03, 0.1
# The excess of the longest turn over the shortest beyond which a machine is
# busy.
_SPREAD = 0.15
# A draft model takes at least this fraction of the time that its share of the
# parameters suggests: its weights may be packed, and its encoder does not run
# for drafted tokens.
_LEAST = 0.1


def sentence(doubts: Sequence[str]) -> str:
  """Returns all doubts as a sentence for users, '' without any."""
  if not doubts:
    return ''
  reasons = '; '.join(doubts)
  return f'These times are in doubt: {reasons}. Repeat on a quiet machine.'


def of_speeds(figures: Mapping[str, Any]) -> list[str]:
  """Lists doubts about the figures of `measure.comparison`."""
  doubts = _of_ratio(figures['verify_cost_ratio'])
  most = figures['most_speedup']
  if figures['speedup'] > most * (1 + _SLACK):
    doubts.append(
      f'the speedup of {figures["speedup"]:.2f} exceeds the {most:.2f} tokens '
      'per target run relative to plain decoding'
    )
  return doubts + of_turns(figures['turn_seconds'])


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
  doubts = _of_ratio(scoring / plain)
  target_call = figures.get('extend_seconds') or 0.0
  if target_call > scoring * (1 + _SLACK_OF_PARTS):
    doubts.append(
      f'the target call alone is timed at {ms(target_call)}, and T({width}), '
      f'of which it is a part, at {ms(scoring)}'
    )
  first, further = figures['first_draft_seconds'], figures['draft_seconds']
  c_hat = figures['c_hat']
  if first < _LEAST * c_hat * plain:
    doubts.append(
      f'a drafted token is timed at {ms(first)}, and a plain step at '
      f'{ms(plain)}: too little for {c_hat:.2g} of the parameters'
    )
  elif is_one_by_one and further < _LEAST * first:
    doubts.append(
      f'a further drafted token is timed at {ms(further)}, and the first at '
      f'{ms(first)}'
    )
  parts = first + (width - 2) * further + scoring
  iteration = figures.get('iteration_seconds')
  if iteration is not None and parts > iteration * (1 + _SLACK_OF_PARTS):
    doubts.append(
      f'the parts of an iteration are timed at {ms(parts)} together, and the '
      f'iteration at {ms(iteration)}'
    )
  return doubts


def of_turns(
  turn_seconds: Mapping[str, Sequence[float]], *, is_short: bool = False
) -> list[str]:
  """Lists doubts about the seconds of the same work in each turn, by name.

  With `is_short`, for work of a few milliseconds, only the middle half of the
  turns counts, since any process may double the time of one.
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
  """Lists a doubt if other work keeps the machine busy."""
  if not hasattr(os, 'getloadavg'):  # On Windows.
    return []
  load, _, _ = os.getloadavg()
  cores = os.cpu_count() or 1
  if load <= cores + 1:
    return []
  return [f'the load is {load:.1f} on {cores} cores']


def _of_ratio(verify_cost_ratio: float) -> list[str]:
  """Lists the doubt about T(gamma + 1) / T(1)."""
  if verify_cost_ratio >= 1 - _SLACK:
    return []
  return [
    f'scoring a whole draft is timed at {verify_cost_ratio:.2f} of a plain '
    'step, and cannot cost less than one'
  ]
