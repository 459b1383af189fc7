"""The audit of engines: what is measured is kept, and a bias is seen."""

import json

import numpy as np
import pytest

from experiments.audit import __main__ as command
from experiments.audit import ways


def way(name, top_k=None):
  """Draws from the tables, always with all tokens, whatever `top_k` says."""
  cumulative = np.cumsum([ways.of_table(None)((i,)) for i in range(8)], axis=1)

  def sample(prompt, num, seed):
    rng, tokens = np.random.default_rng(seed), [np.full(num, prompt[-1])]
    for _ in range(ways.NUM_TOKENS):
      drawn = rng.random((num, 1)) > cumulative[tokens[-1]]
      tokens.append(drawn.sum(1).clip(max=7))
    return np.stack(tokens[1:], axis=1)

  greedy = lambda prompt: [int(ways.of_table(None)(prompt).argmax())]
  return ways.Way(
    name, sample, ways.of_table(top_k), ways.ONE, 5000, greedy=greedy
  )


def test_a_row_is_kept_when_the_next_is_interrupted(tmp_path):
  def interrupted():
    yield way('exact')
    raise KeyboardInterrupt

  engine = command.Engine(interrupted, lambda: 'engine 1.0, jax 2')
  with pytest.raises(KeyboardInterrupt):
    list(command.rows(engine, tmp_path))
  [path] = tmp_path.iterdir()
  assert path.name == 'engine-1.0+jax-2.jsonl'
  kept = json.loads(path.read_text())
  assert kept['verdict'] == 'not rejected'
  assert kept['greedy as plain'] == '1 of 1'
  # Kept rows are not measured again: this one would be rejected now.
  both = lambda: iter([way('exact', top_k=3), way('biased', top_k=3)])
  found = list(command.rows(engine._replace(ways=both), tmp_path))
  assert found[0] == kept
  assert found[1]['verdict'] == 'REJECTED'
  assert [row['way'] for row in found] == ['exact', 'biased']
  assert len(path.read_text().splitlines()) == 2


def test_our_rows_are_kept_by_their_code(tmp_path, monkeypatch):
  engine = command.Engine(lambda: iter([way('a')]), lambda: 'specdec_jax 1')
  for code in ('loop 1', 'loop 1', 'loop 2'):
    monkeypatch.setattr(command.provenance, 'code', lambda code=code: code)
    list(command.rows(engine, tmp_path))
  assert {path.name for path in tmp_path.iterdir()} == {
    *('specdec_jax-1+loop-1.jsonl', 'specdec_jax-1+loop-2.jsonl')
  }


def test_t5x_without_a_clone_is_refused_before_others_are_audited(
  tmp_path, capsys
):
  argv = ['--engines', 'loop', 'T5X', f'--rows={tmp_path}']
  assert command.main(argv) == 2
  assert '--t5x' in capsys.readouterr().err
  assert not any(tmp_path.iterdir())
