"""Counts of nothing are refused before anything is loaded."""

import pytest

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
    assert (
      f'argument --{name}: must be an integer of at least 1, got 0'
      in capsys.readouterr().err
    )
