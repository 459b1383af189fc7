"""Counts of nothing are refused before anything is loaded; and the dtype that
is taken where none is given."""

import numpy as np
import pytest

from experiments import common
from experiments.leviathan2023 import __main__ as leviathan2023
from experiments.pretrained import __main__ as pretrained
from experiments.sun2024 import __main__ as sun2024
from experiments.xia2023 import __main__ as xia2023

MEASURE = ('measure', '--target=a', '--drafter=b', '--task=c.jsonl')


@pytest.mark.parametrize(
  ('main', 'options', 'names'),
  [
    (leviathan2023.main, (), ('batch_size', 'repeats', 'max_gamma')),
    (sun2024.main, (), ('batch_size', 'num_examples')),
    (
      xia2023.main,
      ('--target=a', '--drafter=b', '--task=c.jsonl'),
      ('batch_size', 'gamma', 'num_timed'),
    ),
    (pretrained.main, MEASURE, ('batch_size', 'gamma', 'inputs_length')),
  ],
)
def test_a_count_of_nothing_is_refused(main, options, names, capsys):
  for name in names:
    with pytest.raises(SystemExit) as stopped:
      main([*options, f'--{name}=0'])
    assert stopped.value.code == 2
    assert f'argument --{name}: ' in capsys.readouterr().err


@pytest.mark.parametrize('quickest', ['float32', 'bfloat16'])
def test_the_quickest_dtype_is_that_of_the_least_median(monkeypatch, quickest):
  made = {}

  def alternate(programs, repeats):
    made.update({name: program() for name, program in programs.items()})
    # Held up once, so that its mean is the larger one.
    held_up = np.array([1.0] * (repeats - 1) + [100.0])
    others = np.full(repeats, 2.0)
    return {
      name: held_up if name == quickest else others for name in programs
    }, made

  monkeypatch.setattr(common.stopwatch, 'alternate', alternate)
  assert common.quickest_dtype(['float32', 'bfloat16']) == quickest
  # Products by the identity, in each of them.
  for name, product in made.items():
    assert product.dtype == name
    np.testing.assert_array_equal(product, np.ones((5, 1024), product.dtype))


def test_one_dtype_is_not_timed(monkeypatch):
  monkeypatch.setattr(common.stopwatch, 'alternate', None)
  assert common.quickest_dtype(['bfloat16']) == 'bfloat16'
