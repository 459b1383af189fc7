"""The trees that are planned, against the times of the iteration."""

import dataclasses

import numpy as np
import pytest

from specdec_jax import theory
from specdec_jax.planning import planner, tree_planner
from specdec_jax.theory import trees
from specdec_jax.theory.costs import Costs
from tests.theory.test_trees import costs


def test_runs_of_a_text_with_one_rate_are_those_of_the_planner():
  for gamma in (0, 1, 4):
    rates = np.full(30, 0.7)
    expected = planner.expected_iterations(np.full(gamma, 0.7), 30, 1)
    assert theory.expected_runs(rates, gamma) == pytest.approx(expected)


def of_chain(parts: Costs, num_nodes: int, depth: int) -> float:
  """An iteration whose tree costs what tokens of a chain do."""
  scoring = parts.verify_cost_ratio(num_nodes) * parts.plain_seconds
  return parts.drafting_seconds(depth) + scoring + parts.loop_seconds


@pytest.mark.parametrize('batch_size', [1, 4])
@pytest.mark.parametrize(
  ('slope', 'is_faster'), [(0.001, True), (0.01, True), (0.3, False)]
)
def test_trees_win_where_scoring_is_cheap(slope, is_faster, batch_size):
  parts, rates = costs(c=0.05, slope=slope), trees.assumed_rates(0.6)
  chain = planner.plan(0.6, parts, batch_size=batch_size).best
  found = tree_planner.plan(rates, parts, chain, batch_size=batch_size)
  assert found.is_faster == is_faster
  assert found.sentence.startswith('A tree' if is_faster else 'No tree')
  choice = found.choice
  assert choice.gamma == len(choice.tree) > found.depth
  assert choice.expected_tokens == pytest.approx(
    trees.expected_tokens_of_tree(choice.tree, rates)
  )
  if batch_size == 1:
    # Times are those of the iteration, and no other tree's are better.
    seconds = of_chain(parts, choice.gamma, found.depth)
    assert choice.speedup == pytest.approx(choice.expected_tokens / seconds)
    for depth in (2, 3, 5):
      for num_nodes in (depth + 1, 8, 16, 32):
        rival = trees.best_tree(rates, num_nodes, depth)
        pace = trees.expected_tokens_of_tree(rival, rates) / (
          of_chain(parts, num_nodes, depth)
        )
        assert pace <= choice.speedup + 1e-9


def test_prices_of_trees_take_the_place_of_those_of_chains():
  """Interpolated between the trees that were priced, and of smaller ones those
  of the first."""
  parts, rates = costs(c=0.05, slope=0.001), trees.assumed_rates(0.6)
  chain = planner.plan(0.6, parts).best
  cheap = tree_planner.plan(rates, parts, chain)
  assert cheap.is_faster
  assert cheap.sentence.endswith("a chain's of as many tokens.")
  for overhead, is_faster in ((0.0, True), (1.5, False)):
    priced = dataclasses.replace(
      parts,
      tree_nodes=(16, 32),
      tree_seconds=(1.0 + overhead, 1.2 + overhead),
      level_seconds=(0.05, 0.07),
    )
    found = tree_planner.plan(rates, priced, chain)
    assert found.is_faster == is_faster
    assert 'an upper bound' not in found.sentence
    num_nodes, depth = found.choice.gamma, found.depth
    beyond = max(num_nodes - 16, 0) / 16
    seconds = 1 + overhead + 0.2 * beyond + depth * (0.05 + 0.02 * beyond)
    assert found.choice.speedup == pytest.approx(
      found.choice.expected_tokens / seconds
    )
  assert f'costs {seconds:.2f} plain steps, of which scoring' in found.sentence
  assert f'of 1 row is {1 + overhead + 0.2 * beyond:.2f}.' in found.sentence
  # No depth is drafted in less time than a token is.
  free = dataclasses.replace(priced, level_seconds=(0.0, 0.0))
  found = tree_planner.plan(rates, free, chain)
  beyond = max(found.choice.gamma - 16, 0) / 16
  seconds = 1 + overhead + 0.2 * beyond + 0.05 * found.depth
  assert found.choice.speedup == pytest.approx(
    found.choice.expected_tokens / seconds
  )


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ({}, 'two ranks'),
    ({'max_nodes': 1}, 'max_nodes must lie'),
    ({'max_nodes': 40}, r'T\(41\)'),
  ],
)
def test_a_tree_wants_two_nodes_and_known_costs(sizes, message):
  parts = costs(c=0.05, slope=0.01)
  chain = planner.plan(0.6, parts).best
  with pytest.raises(ValueError, match=message):
    tree_planner.plan([0.6], parts, chain, **sizes)
