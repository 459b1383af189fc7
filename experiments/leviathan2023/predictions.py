"""Predicted against measured speed, and the loop against its parts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.leviathan2023 import figures, measured
from experiments.leviathan2023.measured import Settings
from experiments.leviathan2023.pairs import Pair, named
from experiments.leviathan2023.timed import Sweep, Timed
from experiments.plots import Measured
from experiments.report import Table


def table(given: Sequence[Pair], settings: Settings, folder: Path) -> Table:
  """Predicted against measured speed, and the loop against its parts."""
  rows, notes = [], []
  lines, points = {}, {}
  for pair in given:
    found = measured.whole_sweep(pair, 0.0, settings)
    parts = measured.costs(pair, 0.0, settings)
    line = {
      gamma: measured.predicted_speed(pair, 0.0, settings, gamma)
      for gamma in found.fixed
    }
    lines[pair.name] = line
    points[pair.name] = {
      gamma: _measured(drafted, found.plain)
      for gamma, drafted in found.fixed.items()
    }
    for gamma, drafted in found.fixed.items():
      loop = parts.iteration_seconds(gamma) - parts.loop_seconds
      speed = points[pair.name][gamma]
      rows.append(
        named(pair)
        | {
          'gamma': gamma,
          'tokens per target run': drafted.tokens_per_run,
          'ms per run': 1e3 * drafted.seconds_per_run,
          'its parts': 1e3 * loop,
          'run / parts': drafted.seconds_per_run / loop,
          'predicted': line[gamma],
          'measured': speed.value,
          'range': f'{speed.least:.2f} to {speed.greatest:.2f}',
          'predicted / measured': line[gamma] / speed.value,
        }
      )
    notes.append(_verdict(pair, settings, found, line))
  name = figures.speedups(folder, lines, points)
  return Table(
    rows=rows,
    figures=[name],
    notes=[
      *notes,
      'T = 0, batch 1, after the prefill. Parts are gamma drafted tokens and '
      'one target call over gamma + 1 positions, timed in turns with the '
      'decodes, the drafts by what they add to target calls. Predictions use '
      'these parts and the acceptance of every token along the '
      "target's own text of these examples. The fixed cost of a decode is not "
      'part of a run; predictions add it once per text. Times '
      'are sums over the texts, each the median of its turns; ranges are over '
      'whole turns. The figure shows these speeds and ranges.',
    ],
  )


def _measured(drafted: Timed, plain: Timed) -> Measured:
  """The speed of the table, and of the figure: of times of which each is the
  median of its turns, with the range of whole turns."""
  turns = drafted.speedups(plain)
  return Measured(drafted.speedup(plain), turns.min(), turns.max())


def _verdict(
  pair: Pair, settings: Settings, found: Sweep, line: dict[int, float]
) -> str:
  """The figures by which a prediction is judged."""
  parts = measured.costs(pair, 0.0, settings)
  speeds = {
    gamma: each.speedup(found.plain) for gamma, each in found.fixed.items()
  }
  errors = [abs(line[gamma] / speeds[gamma] - 1) for gamma in speeds]
  ratios = [
    found.fixed[gamma].seconds_per_run
    / (parts.iteration_seconds(gamma) - parts.loop_seconds)
    for gamma in speeds
    if gamma <= 8
  ]
  planned = measured.planned_gamma(pair, 0.0, settings)
  best = max(speeds, key=speeds.__getitem__)
  reached = speeds[planned] if planned else 1.0
  launches = (
    f'the fixed cost of a decode is {1e3 * parts.launch_seconds:.2f} ms, of a '
    f'plain one {1e3 * parts.plain_launch_seconds:.2f} ms'
  )
  return (
    f'{pair.name}: the median error of predicted speed is '
    f'{np.median(errors):.1%} (at most {max(errors):.1%}); up to gamma 8 a run '
    f'takes {np.median(ratios):.2f} times its parts (median; '
    f'{min(ratios):.2f} to {max(ratios):.2f}); {launches}; the planned gamma '
    f'is {planned}, with speed {reached:.2f}, and the best measured gamma is '
    f'{best}, with speed {speeds[best]:.2f}.'
  )
