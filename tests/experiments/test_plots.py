"""Plots show the numbers that they were given, and are the same each time."""

import numpy as np
import pytest

from experiments import plots
from experiments.plots import Measured
from specdec_jax import theory

pytest.importorskip('matplotlib')


def lines_of(axes):
  return {line.get_label(): line.get_xydata() for line in axes.get_lines()}


def test_curves_are_those_of_theory():
  [axes] = plots.tokens_by_alpha([1, 5, float('inf')]).axes
  lines = lines_of(axes)
  np.testing.assert_allclose(lines['gamma infinity'][-1], [0.9, 10])
  np.testing.assert_allclose(lines['gamma 1'][:, 1], 1 + lines['gamma 1'][:, 0])
  [axes] = plots.best_gamma_by_alpha([0.02, 0.1]).axes
  for label, c in (('c = 0.02', 0.02), ('c = 0.1', 0.1)):
    alpha, gamma = lines_of(axes)[label][200]
    assert gamma == theory.best_gamma(alpha, c)
  left, right = plots.speed_and_operations([3]).axes
  alpha, speed = lines_of(left)['gamma 3'][40]
  assert speed == theory.expected_tokens(alpha, 3)
  alpha, operations = lines_of(right)['gamma 3'][40]
  assert operations == pytest.approx(4 / theory.expected_tokens(alpha, 3))


def test_measured_points_stand_where_they_were_put_with_their_range():
  figure = plots.speedup_by_gamma(
    {'pair': {1: 1.1, 2: 1.4}},
    # A point need not lie within: it may be another mean of the same runs.
    {'pair': {2: Measured(1.3, 1.2, 1.5), 3: Measured(1.1, 1.2, 1.4)}},
  )
  [axes] = figure.axes
  assert lines_of(axes)['pair'].tolist() == [[1, 1.1], [2, 1.4]]
  assert lines_of(axes)['pair, measured'].tolist() == [[2, 1.3], [3, 1.1]]
  [bars] = axes.collections
  np.testing.assert_allclose(
    bars.get_segments(), [[[2, 1.2], [2, 1.5]], [[3, 1.2], [3, 1.4]]]
  )


def test_saved_figures_are_the_same_bytes_with_text_in_them(tmp_path):
  saved = []
  for name in ('a.svg', 'b.svg'):
    plots.save(plots.best_gamma_by_alpha([0.05]), tmp_path / name)
    saved.append((tmp_path / name).read_bytes())
  assert saved[0] == saved[1]
  assert b'c = 0.05' in saved[0]


@pytest.mark.parametrize(
  'figure',
  [
    plots.tokens_by_alpha([1, 3, 5, 7, np.inf]),
    plots.best_gamma_by_alpha([0.01, 0.02, 0.05, 0.1]),
    plots.speed_and_operations([1, 3, 5, 7, 10]),
    plots.speedup_by_gamma(
      {'here': dict.fromkeys(range(1, 13), 1.9)},
      {'here': dict.fromkeys(range(1, 13), Measured(1.8, 0.0, 2.0))},
    ),
  ],
)
def test_no_legend_lies_on_data(figure):
  figure.draw_without_rendering()
  axes = figure.axes[0]
  box = axes.get_legend().get_window_extent()
  drawn = [
    (artist.get_transform(), path)
    for artist in axes.collections
    for path in artist.get_paths()
  ] + [(line.get_transform(), line.get_path()) for line in axes.get_lines()]
  for transform, path in drawn:
    curve = transform.transform_path(path)
    assert not curve.intersects_bbox(box, filled=False)
