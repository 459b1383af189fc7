"""Plots of theory and measurements as matplotlib figures, after those of
Leviathan et al. (https://arxiv.org/abs/2211.17192). pyplot neither shows nor
keeps them: the caller saves or displays a figure.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specdec_jax import theory
from specdec_jax.files.require import require

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_SIZE = (6.0, 4.0)
# Legible in print and to those who see no red or no green.
COLORS = ('#2458c5', '#d9730d', '#2e8b4f', '#8b3fb0', '#5d6572', '#b3201c')


class Measured(NamedTuple):
  """A measured figure, and the least and the greatest of its repeats."""

  value: float
  least: float
  greatest: float


def new_figure(num_axes: int = 1) -> tuple['Figure', Any]:
  """Makes a figure and its axes, or a list; ImportError without matplotlib."""
  matplotlib = require('matplotlib.figure', extra='plot', purpose='a plot')
  width, height = _SIZE
  figure = matplotlib.Figure(
    figsize=(width * num_axes, height), layout='constrained'
  )
  axes = figure.subplots(1, num_axes, squeeze=False)[0]
  for each in axes:
    each.grid(color='#dde1e7', linewidth=0.8)
    each.set_axisbelow(True)
    each.spines[['top', 'right']].set_visible(False)
    each.set_prop_cycle(color=COLORS)
  return figure, axes[0] if num_axes == 1 else list(axes)


def save(figure: 'Figure', path: str | os.PathLike[str]) -> None:
  """Writes a figure as SVG, the same bytes each time; text stays text."""
  import matplotlib

  settings: Any = {'svg.fonttype': 'none', 'svg.hashsalt': 'specdec_jax'}
  with matplotlib.rc_context(settings):
    figure.savefig(path, format='svg', metadata={'Date': None})


def tokens_by_alpha(gammas: Sequence[float]) -> 'Figure':
  """Plots expected tokens per target run (Figure 2); gamma may be infinite."""
  figure, axes = new_figure()
  alphas = np.linspace(0.5, 0.9, 81)
  for gamma in gammas:
    name = 'infinity' if np.isinf(gamma) else f'{gamma:g}'
    tokens = theory.expected_tokens(alphas, gamma)
    axes.plot(alphas, tokens, label=f'gamma {name}')
  axes.set(xlabel='alpha', ylabel='expected tokens per target run')
  axes.legend()
  return figure


def best_gamma_by_alpha(costs: Sequence[float]) -> 'Figure':
  """Plots the best gamma for each cost ratio c (Figure 3)."""
  figure, axes = new_figure()
  alphas = np.linspace(0.5, 0.9, 401)
  for c in costs:
    axes.plot(alphas, theory.best_gamma(alphas, c), label=f'c = {c:g}')
  axes.set(xlabel='alpha', ylabel='best gamma')
  axes.legend()
  return figure


def speed_and_operations(gammas: Sequence[int]) -> 'Figure':
  """Plots speedup and growth of arithmetic at c = c_hat = 0 (Figure 4)."""
  figure, both = new_figure(2)
  alphas = np.linspace(0.5, 0.95, 91)
  curves = {
    'speedup over plain decoding': theory.walltime_improvement,
    'operations over plain decoding': theory.operations_factor,
  }
  for axes, (name, curve) in zip(both, curves.items(), strict=True):
    for gamma in gammas:
      axes.plot(alphas, curve(alphas, gamma, 0.0), label=f'gamma {gamma}')
    axes.set(xlabel='alpha', ylabel=name)
  both[0].legend()
  return figure


def speedup_by_gamma(
  predicted: Mapping[str, Mapping[int, float]],
  measured: Mapping[str, Mapping[int, Measured]] | None = None,
) -> 'Figure':
  """Plots predicted speedups as lines, measured ones as points with ranges."""
  figure, axes = new_figure()
  colors = itertools.cycle(COLORS)
  for (name, line), color in zip(predicted.items(), colors, strict=False):
    axes.plot(list(line), list(line.values()), color=color, label=name)
    points = (measured or {}).get(name, {})
    if points:
      gammas = list(points)
      values, least, greatest = zip(*points.values(), strict=True)
      label = f'{name}, measured'
      axes.plot(gammas, values, 'o', color=color, markersize=4, label=label)
      axes.vlines(gammas, least, greatest, color=color, linewidth=1.2)
  axes.axhline(1, color='#5d6572', linewidth=0.8, linestyle='--')
  axes.set(xlabel='gamma', ylabel='speedup over plain decoding')
  axes.set_ylim(bottom=0)
  # Inside, it would lie over points and ranges.
  axes.legend(loc='upper left', bbox_to_anchor=(1, 1), frameon=False)
  return figure
