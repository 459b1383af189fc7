"""Learning curves: their pictures, and the power laws that cards state."""

import numpy as np
import pytest

pytest.importorskip('huggingface_hub')
pytest.importorskip('matplotlib')

from experiments.pretrained import card, curve
from specdec_jax.checkpoints import pretrained


def test_the_curve_of_two_runs(tmp_path):
  """Of which the first unrolled one step, and the second two."""
  first: list[dict[str, float]] = [{'step': 2, 'nats': 4.0, 'alpha_1': 0.2}]
  first += [{'step': 4, 'validation_nats': 3.0, 'validation_alpha_1': 0.25}]
  second = [{'step': 2, 'nats': 2.0, 'alpha_1': 0.3, 'alpha_2': 0.1}]
  lines = curve.joined([first, second])
  assert [line['step'] for line in lines] == [2, 4, 6]
  runs = [('first', first), ('second', second)]
  curve.draw(runs, tmp_path / curve.NAME)
  drawn = (tmp_path / curve.NAME).read_text()
  assert 'alpha_2' in drawn
  assert 'fit of the second half' not in drawn
  # Long enough for a fit, which counts the tokens of its own lines.
  third = [
    line
    for i in range(1, 13)
    for line in (
      {'step': i, 'targets': 100.0, 'nats': 1.0, 'alpha_1': 0.5},
      {'step': i, 'validation_nats': 0.5 + 9 * (100 * i) ** -0.4},
    )
  ]
  curve.draw([*runs, ('third', third)], tmp_path / curve.NAME)
  drawn = (tmp_path / curve.NAME).read_text()
  assert ('fit of the second half' in drawn, '>third<' in drawn) == (True, True)
  law = curve.of_log(third)
  assert law is not None
  for each in law.whole, law.tail:
    assert each.at(1e5) == pytest.approx(0.5 + 9 * 1e5**-0.4, rel=1e-3)


def test_the_curve_of_a_run_without_alphas(tmp_path):
  """That of a Spec-Drafter."""
  lines = [{'step': 1, 'nats': 4.0}, {'step': 2, 'nats': 3.0}]
  paths = [tmp_path / name for name in ('none.svg', 'drawn.svg')]
  for path, each in zip(paths, ([], lines), strict=True):
    curve.draw([('run', each)], path)
  none, drawn = (path.read_text() for path in paths)
  assert 'KL(p | q)' not in drawn
  # A line more, and its name.
  assert len(drawn) > len(none)
  assert drawn.count('stroke-linecap: square') > none.count(
    'stroke-linecap: square'
  )


@pytest.mark.parametrize(('floor', 'power'), [(0.4, 0.5), (0.0, 0.3)])
def test_a_power_law_is_found_and_read_off(floor, power):
  """At ten times the tokens, also from points that are 1% off."""
  tokens = np.geomspace(1e5, 3e6, 12)
  law = lambda x: floor + 1e6**power * x**-power
  exact = curve.fit(tokens, law(tokens))
  assert exact.error < 1e-4
  assert exact.floor == pytest.approx(floor, abs=1e-4)
  assert exact.power == pytest.approx(power, rel=1e-3)
  assert exact.at(3e7) == pytest.approx(law(3e7), rel=1e-3)
  noise = 0.01 * np.random.default_rng(0).standard_normal((20, 12))
  found = [curve.fit(tokens, law(tokens) * (1 + each)) for each in noise]
  assert all(0.002 < each.error < 0.04 for each in found)
  median = np.median([each.at(3e7) for each in found])
  assert median == pytest.approx(law(3e7), rel=0.05)
  with pytest.raises(ValueError, match='3 points'):
    curve.fit(tokens[:3], law(tokens[:3]))


def test_the_shipped_drafters_card_states_its_laws():
  """Of the three longer runs; runs of few validations have none."""
  name = 'smollm2-135m-eagle'
  found = [curve.of_stage(run) for run in card.load(name)['training']]
  assert [law is not None for law in found] == [True, False] * 3
  text = (pretrained.FOLDER / name / 'README.md').read_text()
  assert text == card.render(card.load(name))
  assert text.count('a power law with an irreducible part') == 3
