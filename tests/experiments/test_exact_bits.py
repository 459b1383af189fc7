"""`python -m experiments.exact_bits`, on one prompt of a small model."""

import pytest

from experiments import exact_bits
from experiments.suite import examples


@pytest.mark.slow
def test_texts_are_counted_with_the_setting_and_without(monkeypatch, capsys):
  own = {'chat': [{'prompt': 'The old man and the old man and'}]}
  monkeypatch.setattr(examples, 'own', lambda: own)
  monkeypatch.setattr(examples, 'random_tokens', lambda ids, count: [])
  drafter = 'prompt_lookup+num_continuations:2'
  sizes = '--max_new_tokens', '8', '--batch_size', '1'
  given = ('--target', 'lm-nano', '--drafters', drafter, *sizes)
  assert exact_bits.main(given) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.count('exact_bits') for line in lines] == [1, 1]
  assert lines[0].endswith('of 1 texts 1 have the same tokens, 1 the same bits')
