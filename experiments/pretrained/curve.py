"""The learning curve of a drafter, as a picture, and its power law."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from experiments import plots

NAME = 'curve.svg'
_TRAINED, _VALIDATED = 'alpha_', 'validation_alpha_'
# Fewer say nothing about the three numbers of a fit, and less of its tail.
_MIN_POINTS = 8
# How far a fit is drawn and read off, in tokens of the run.
BEYOND = 10


class Points(NamedTuple):
  """Validations of one run: tokens learned from by then, `[N]`, and KL(p | q)
  of the first step, `[N]`."""

  tokens: np.ndarray
  nats: np.ndarray


@dataclasses.dataclass(frozen=True)
class Fit:
  """nats = floor + scale * tokens^-power; `error` is the largest distance from
  the points, as a share of the fit."""

  floor: float
  scale: float
  power: float
  error: float = 0.0

  def at(self, tokens: Any) -> Any:
    """Returns the nats after so many tokens, a number or an array."""
    return self.floor + self.scale * tokens**-self.power


class Fits(NamedTuple):
  """What a run's validations say of more tokens: all of them, and their second
  half alone. Where these differ, the run does not say."""

  points: Points
  whole: Fit
  tail: Fit


def fit(tokens: Sequence[float], nats: Sequence[float]) -> Fit:
  """Fits a power law with an irreducible part, none of its three numbers
  negative, by least squares of logarithms; ValueError for fewer than four
  points."""
  x, y = np.asarray(tokens, float), np.asarray(nats, float)
  if len(x) < 4:
    raise ValueError(f'{len(x)} points do not determine three numbers')
  # Of the last point, so that the three are of one order of magnitude.
  share, least = x / x[-1], y.min()
  found = optimize.least_squares(
    lambda p: np.log((p[0] + p[1] * share ** -p[2]) / y),
    (least / 2, least / 2, 0.3),
    bounds=((0, 1e-9 * least, 0), np.inf),
    x_scale=(least, least, 0.3),
  )
  floor, scale, power = map(float, found.x)
  # Its bound is approached and never reached.
  floor = 0.0 if floor < 1e-6 * least else floor
  made = Fit(floor, scale * float(x[-1]) ** power, power)
  error = float(np.abs(y / made.at(x) - 1).max())
  return dataclasses.replace(made, error=error)


def fits(points: Points) -> Fits | None:
  """Fits a run; None if it has too few validations."""
  half = len(points.tokens) // 2
  if len(points.tokens) < _MIN_POINTS:
    return None
  tail = fit(points.tokens[half:], points.nats[half:])
  return Fits(points, fit(*points), tail)


def of_stage(stage: Mapping[str, Any]) -> Fits | None:
  """Fits a run of a card, of one or more that each began from the one before:
  its own tokens alone count. None as for `fits`."""
  curve = stage['curve']
  per_step = stage['target_tokens'] / stage['steps']
  tokens = np.array([point['step'] for point in curve], float) * per_step
  nats = np.array([point['validation_nats'] for point in curve], float)
  return fits(Points(tokens, nats))


def of_log(lines: Sequence[Mapping[str, Any]]) -> Fits | None:
  """Fits a run's metrics.jsonl; None as for `fits`."""
  tokens, points = 0.0, []
  for line in lines:
    tokens += line.get('targets', 0)
    if 'validation_nats' in line:
      points.append((tokens, line['validation_nats']))
  columns = np.array(points, float).reshape(-1, 2).T
  return fits(Points(*columns))


def alphas(line: Mapping[str, Any], prefix: str = _VALIDATED) -> list[float]:
  """Reads a line's mean alpha of each unrolled step, in their order."""
  found = {name: line[name] for name in line if name.startswith(prefix)}
  return [found[name] for name in sorted(found, key=lambda x: (len(x), x))]


def joined(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
  """Joins the lines of runs that each began from the one before; steps count
  on."""
  found: list[dict[str, Any]] = []
  for lines in runs:
    before = found[-1]['step'] if found else 0
    found += [{**line, 'step': before + line['step']} for line in lines]
  return found


def draw(
  runs: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], path: Path
) -> None:
  """Writes it, from names of runs that each began from the one before, and the
  lines of their metrics.jsonl: training as lines, validation as points, and
  log-log what a fit of each run says. Lines may have fewer alphas than
  others."""
  lines = joined([each for _, each in runs])
  found = [(name, law) for name, each in runs if (law := of_log(each))]
  figure, (left, right, *rest) = plots.new_figure(3 if found else 2)
  trained = [line for line in lines if 'nats' in line]
  validated = [line for line in lines if 'validation_nats' in line]
  for points, prefix, style in (
    (trained, _TRAINED, '-'),
    (validated, _VALIDATED, 'o'),
  ):
    left.set_prop_cycle(None)
    left.set_prop_cycle(color=plots.COLORS)
    for i in range(
      max((len(alphas(line, prefix)) for line in points), default=0)
    ):
      name = f'{prefix}{i + 1}'
      steps = [line['step'] for line in points if name in line]
      values = [line[name] for line in points if name in line]
      label = f'alpha_{i + 1}' if prefix == _TRAINED else None
      left.plot(steps, values, style, markersize=4, label=label)
  left.set(xlabel='step', ylabel='mean alpha; points: validation')
  left.set_ylim(bottom=0)
  if left.lines:  # A Spec-Drafter's lines have no alphas.
    left.legend()
  for points, name, style in (
    (trained, 'nats', '-'),
    (validated, 'validation_nats', 'o'),
  ):
    steps = [line['step'] for line in points]
    values = [line[name] for line in points]
    right.plot(steps, values, style, markersize=4, label=name)
  kind = 'KL(p | q) of the first step, nats' if left.lines else 'nats'
  right.set(xlabel='step', ylabel=kind)
  right.set_ylim(bottom=0)
  right.legend()
  for axes in rest:
    _draw_fits(axes, found)
  plots.save(figure, path)


def draw_fits(found: Sequence[tuple[str, Fits]], path: Path) -> None:
  """Writes the fits of runs with their names, log-log, up to `BEYOND` times the
  tokens of each: whole runs as lines, their second halves dashed."""
  figure, axes = plots.new_figure()
  _draw_fits(axes, found)
  plots.save(figure, path)


def _draw_fits(axes: Any, found: Sequence[tuple[str, Fits]]) -> None:
  colors = itertools.cycle(plots.COLORS)
  for (name, each), color in zip(found, colors, strict=False):
    tokens, nats = each.points
    axes.plot(tokens, nats, 'o', markersize=4, color=color, label=name)
    for law, first, style in (
      (each.whole, 0, '-'),
      (each.tail, len(tokens) // 2, '--'),
    ):
      x = np.geomspace(tokens[first], BEYOND * tokens[-1], 100)
      axes.plot(x, law.at(x), style, color=color, linewidth=1.2)
  axes.set(xscale='log', yscale='log', xlabel='target tokens of the run')
  axes.set_ylabel('validation nats; dashed: fit of the second half')
  axes.legend()
