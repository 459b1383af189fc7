"""Trees beside chains, with random weights, and what is predicted of them."""

import json

import pytest

from experiments.trees import __main__ as experiment
from specdec_jax.theory import trees
from tests import toy_tree


def pair(drafter: str, **options):
  return experiment.Pair(
    target='random:t5_nano',
    drafter=drafter,
    options=options,
    categories=('translation',),
  )


@pytest.mark.slow
def test_ranks_and_speeds_of_two_drafters(tmp_path, monkeypatch):
  """The model drafts for itself: all that is first is accepted."""
  made = [pair('itself', draft_model='random:t5_nano'), pair('prompt_lookup')]
  monkeypatch.setattr(experiment, 'pairs', lambda eagle: made)
  monkeypatch.setattr(experiment, 'NUM_NODES', (8,))
  argv = ['--num_prompts=1', '--num_new=8', '--repeats=1']
  argv += ['--tables=ranks,speed', f'--output={tmp_path}']
  assert experiment.main(argv) == 0
  table = json.loads((tmp_path / 'ranks.json').read_text())
  first, second = table['rows']
  assert [first[f'a_{i}'] for i in (1, 2, 8)] == ['1.000', '0.000', '0.000']
  assert second['drafter'] == 'prompt_lookup'
  table = json.loads((tmp_path / 'speed.json').read_text())
  drafts = [(row['drafter'], row['draft']) for row in table['rows']]
  assert drafts == [
    (name, draft)
    for name in ('itself', 'prompt_lookup')
    for draft in ('chain of 4', 'tree of 8')
  ]
  for row in table['rows'][:2]:
    assert row['expected tokens per run'] == 5
    assert row['tokens per run'] == 4  # Eight tokens in two runs.
  assert all(row['speed'] > 0 for row in table['rows'])
  assert table['rows'][2]['expected tokens per run'] is None


def test_scoring_is_predicted_for_trees_and_chains(monkeypatch):
  seconds = [(2.0, 2.2), (3.0, 3.0), (4.0, 5.0)]
  monkeypatch.setattr(
    experiment, '_priced', lambda *args: (1.0, seconds[: len(args[-1])])
  )
  table = experiment.accelerators(['v5e:1x1'], 'llama_3_2_1b', 1)
  assert [row['nodes'] for row in table.rows] == [8, 16, 32]
  assert [row['tree over chain'] for row in table.rows] == [
    pytest.approx(ratio) for ratio in (1.1, 1.0, 1.25)
  ]
  tokens = [row['tokens, tree'] for row in table.rows]
  assert tokens == sorted(tokens)
  rates = trees.assumed_rates(trees.DEFAULT_ALPHA)
  assert tokens[0] > trees.expected_tokens_of_tree(
    toy_tree.shape(2, 1, 1, 1).parents, rates
  )
  assert 'Predictions' in table.notes[0]
