"""The experiment that trains with Tunix's rollouts and with ours, in small; and
its summary, which needs no Tunix."""

import json

import jax
import numpy as np
import pytest

from experiments.rollouts import summary


def rows_of(engine, rewards):
  """Rows of a training per seed, whose rewards are given by step."""
  return [
    {'engine': engine, 'seed': seed, 'step': step + 1, 'reward': reward}
    | {'seconds': 2.0 + seed, 'tokens': 10, 'kl': 0.125 * step}
    for seed, own in enumerate(rewards)
    for step, reward in enumerate(own)
  ]


def test_intervals_are_over_seeds(tmp_path):
  rows = rows_of('vanilla', [[0.2, 0.5], [0.4, 0.5], [0.6, 0.5]])
  rows += rows_of('speculative', [[0.3, 0.6], [0.5, 0.6], [0.7, 0.6]])
  for row in rows[6:]:  # The first step, which compiles, counts for nothing.
    row['tokens'] = 15 if row['step'] > 1 else 100
  table = summary.table(rows, tmp_path)
  found = {(row['engine'], row['step']): row for row in table.rows}
  assert len(found) == len(table.rows) == 4
  first = found['vanilla', 1]
  # The quantile of t with two degrees of freedom is 4.303.
  half = 4.303 * 0.2 / np.sqrt(3)
  assert first['reward'] == '0.400'
  assert first['reward, 95%'] == f'{0.4 - half:.3f} to {0.4 + half:.3f}'
  assert found['vanilla', 2]['reward, 95%'] == '0.500 to 0.500'
  assert found['speculative', 2]['KL'] == '0.125'
  assert (first['seeds'], first['seconds'], first['tokens']) == (3, 3.0, 10.0)
  # Each seed gained as much.
  assert '+0.100 (+0.100 to +0.100), over 3 seeds' in table.notes[-2]
  assert 'but the first: 1.50 (1.50 to 1.50).' in table.notes[-1]


def test_one_seed_has_no_interval_and_one_engine_no_other(tmp_path):
  rows = rows_of('speculative', [[0.2, 0.4]])
  for row in rows:
    del row['kl']
    row |= {'vanilla_seconds': 4.0, 'vanilla_tokens': 12}
  table = summary.table(rows, tmp_path)
  assert [row['reward, 95%'] for row in table.rows] == ['', '']
  assert [row["Tunix's seconds"] for row in table.rows] == [4.0, 4.0]
  assert not any('KL' in each for each in (*table.rows[0], *table.notes))
  assert 'less' not in ' '.join(table.notes)


@pytest.fixture
def promoted():
  """Tunix's networks mix integers and floats, also in threads of their own."""
  standard = {
    'jax_numpy_dtype_promotion': 'standard',
    'jax_numpy_rank_promotion': 'allow',
  }
  before = {name: getattr(jax.config, name) for name in standard}
  for name, value in standard.items():
    jax.config.update(name, value)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.mark.tunix
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_training_reports_its_kl_and_is_not_repeated(tmp_path, promoted):
  pytest.importorskip('tunix', reason='needs Tunix')
  from experiments.rollouts import __main__ as rollouts

  sizes = ('--steps=3', '--seeds=2', '--prompts=2', '--samples=4')
  path = tmp_path / 'rows.jsonl'
  outputs = ('--tokens=16', '--beta=0.1', f'--output={path}')
  rollouts.main([*sizes, '--learning_rate=0.003', *outputs])
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  assert [row['engine'] for row in rows] == [
    engine
    for engine in (*rollouts.ENGINES, *rollouts.ENGINES[::-1])
    for _ in range(3)
  ]
  for first, second, third in zip(
    rows[::3], rows[1::3], rows[2::3], strict=True
  ):
    assert [row['step'] for row in (first, second, third)] == [1, 2, 3]
    # It begins from the reference model, and leaves it.
    assert 0 == first['kl'] < 1e-5 < second['kl'] < third['kl']
  written = json.loads((tmp_path / 'rollouts.json').read_text())
  first_kls = [row['KL'] for row in written['rows'] if row['step'] == 1]
  assert (first_kls, len(written['rows'])) == (['0', '0'], 2 * 3)
  # Tunix's engine, too, draws anew in each step of each seed.
  assert len({row['reward'] for row in rows if 'loop_seconds' not in row}) == 6
  assert '| speculative | 1 | 2 |' in (tmp_path / 'rollouts.md').read_text()
  # Stopped in the last training, it repeats this one alone.
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(''.join(lines[:-1]) + lines[-1][:20])
  (tmp_path / 'rollouts.json').unlink()
  rollouts.main([*sizes, '--learning_rate=0.003', *outputs])
  again = [json.loads(line) for line in path.read_text().splitlines()]
  assert (again[:11], len(again)) == (rows[:11], 11 + 3)
  rewards = lambda rows: [row['reward'] for row in rows]
  np.testing.assert_allclose(rewards(again[11:]), rewards(rows[9:]))
  renewed = json.loads((tmp_path / 'rollouts.json').read_text())
  assert len(renewed['rows']) == 2 * 3


@pytest.mark.tunix
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_draws_are_the_policys_and_a_control_is_rejected(tmp_path, promoted):
  pytest.importorskip('tunix', reason='needs Tunix')
  from experiments.rollouts import draws

  draws.main(['--tokens=16', '--control=0.05', f'--results={tmp_path}'])
  rows = json.loads((tmp_path / 'draws.json').read_text())['rows']
  assert [row['rejected'] for row in rows] == ['no', 'no', 'no', 'yes']
  assert [row['samples'] for row in rows] == [4 * 16 * 2] * 4
