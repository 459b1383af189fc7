"""Predicted against measured speed, and the loop against its parts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.leviathan2023 import figures, measured
from experiments.leviathan2023.measured import Settings, Sweep
from experiments.leviathan2023.pairs import TRAINED, Pair, named
from experiments.report import Table
from specdec_jax.theory import planner


def table(given: Sequence[Pair], settings: Settings, folder: Path) -> Table:
  """Predicted against measured speed, and the loop against its parts."""
  rows, notes = [], []
  lines, points = {}, {}
  for pair in given:
    found = measured.whole_sweep(pair, 0.0, settings)
    parts = measured.costs(pair, 0.0, settings)
    line = {
      gamma: speed(pair, 0.0, settings, gamma, found.plain.lengths)
      for gamma in found.fixed
    }
    for gamma, drafted in found.fixed.items():
      loop = parts.iteration_seconds(gamma) - parts.loop_seconds
      speeds = drafted.speedups(found.plain)
      rows.append(
        named(pair)
        | {
          'gamma': gamma,
          'tokens a run': drafted.tokens_per_run,
          'ms of a run': 1e3 * drafted.seconds_per_run,
          'its parts': 1e3 * loop,
          'run / parts': drafted.seconds_per_run / loop,
          'predicted': line[gamma],
          'measured': float(np.median(speeds)),
          'range': f'{speeds.min():.2f} to {speeds.max():.2f}',
          'predicted / measured': line[gamma] / float(np.median(speeds)),
        }
      )
    lines[pair.name] = line
    points[pair.name] = {
      gamma: drafted.speedups(found.plain).tolist()
      for gamma, drafted in found.fixed.items()
    }
    notes.append(_verdict(pair, settings, found, line))
  name = figures.speedups(folder, lines, points)
  return Table(
    rows=rows,
    figures=[name],
    notes=[
      *notes,
      'T = 0, batch 1, after the prefill. Parts are gamma drafted tokens and '
      'one target call over gamma + 1 positions, each timed by itself; '
      'predictions take them and the acceptance along text of the target, and '
      'know the lengths of the outputs.',
    ],
  )


def speed(
  pair: Pair,
  temperature: float,
  settings: Settings,
  gamma: int,
  lengths: Sequence[int],
) -> float:
  """The speed that acceptance and costs promise for texts of these lengths.

  A text ends within a block, of which the rest is lost: the shorter the text,
  the more that is.
  """
  found = measured.acceptance(pair, TRAINED, temperature, settings)
  parts = measured.costs(pair, temperature, settings)
  profile = found['profile'][:gamma]
  iterations = {
    length: planner.expected_iterations(profile, length, 1)
    for length in set(lengths)
  }
  runs = sum(iterations[length] for length in lengths)
  return (
    sum(lengths) * parts.plain_seconds / (runs * parts.iteration_seconds(gamma))
  )


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
  planned = measured.plan(pair, 0.0, settings).best
  best = max(speeds, key=speeds.__getitem__)
  reached = speeds[planned.gamma] if planned.gamma else 1.0
  return (
    f'{pair.name}: predicted speed is off by {np.median(errors):.1%} (median; '
    f'at most {max(errors):.1%}); up to gamma 8 a run takes '
    f'{min(ratios):.2f} to {max(ratios):.2f} of its parts; the planned gamma '
    f'is {planned.gamma}, at {reached:.2f}, and the best measured {best}, at '
    f'{speeds[best]:.2f}.'
  )
