"""`python -m experiments.infer_and_generate`, on a few short texts."""

import pytest

from experiments import infer_and_generate


@pytest.mark.slow
def test_both_commands_are_timed_and_decode_the_same_texts(capsys):
  options = ('--pairs=1', '--sentences=3', '--max_new_tokens=4')
  choices = ('--batch_sizes=2', '--dtypes=float32')
  assert infer_and_generate.main([*options, *choices]) == 0
  *_, row = capsys.readouterr().out.splitlines()
  assert row.startswith('| float32 | 2 | ')
  assert row.endswith(' | 3 of 3 |')


def test_a_batch_as_large_as_the_job_is_refused(capsys):
  assert infer_and_generate.main(['--sentences=8', '--batch_sizes=8']) == 2
  assert 'more sentences' in capsys.readouterr().err
