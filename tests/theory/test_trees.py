"""What trees give, and the best of them, against all that there are."""

import dataclasses
import itertools

import numpy as np
import pytest

from specdec_jax import theory
from specdec_jax.theory import trees
from specdec_jax.theory.costs import Costs


def all_trees(num_nodes: int):
  """Every tree of so many nodes, breadth-first."""
  for parents in itertools.product(*map(range, range(1, num_nodes + 1))):
    if all(a <= b for a, b in itertools.pairwise(parents)):
      yield parents


def random_rates(seed: int, num_depths: int = 1, num_ranks: int = 4):
  rng = np.random.default_rng(seed)
  rates = rng.dirichlet(np.ones(num_ranks + 1), num_depths)[:, 1:]
  return -np.sort(-rates, axis=1)


def by_recursion(parents, rates, node=0, depth=0) -> float:
  """Tokens per target run, node by node as the text says."""
  children = [i for i, p in enumerate(parents, start=1) if p == node]
  row = rates[min(depth, len(rates) - 1)]
  return 1 + sum(
    rate * by_recursion(parents, rates, child, depth + 1)
    for child, rate in zip(children, row, strict=False)
  )


def test_there_are_as_many_trees_as_catalan_counts():
  assert [len([*all_trees(n)]) for n in range(1, 7)] == [1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize('num_depths', [1, 3])
def test_expected_tokens_are_sums_over_nodes(num_depths):
  rates = random_rates(num_depths, num_depths)
  for parents in all_trees(5):
    expected = by_recursion(parents, rates)
    tokens = trees.expected_tokens_of_tree(parents, rates)
    assert tokens == pytest.approx(expected)
    # The rates of its depths give the same tokens as a chain's would.
    assert theory.expected_tokens_of_profile(
      trees.profile(parents, rates)
    ) == pytest.approx(expected)


def test_a_chain_is_a_tree():
  profile = [0.8, 0.6, 0.4]
  rates = trees.assumed_rates(profile)
  np.testing.assert_allclose(trees.profile((0, 1, 2), rates), profile)
  assert trees.expected_tokens_of_tree(range(4), [0.7]) == pytest.approx(
    theory.expected_tokens(0.7, 4)
  )


@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('num_nodes', [1, 3, 6])
def test_no_tree_is_better_than_the_best(num_nodes, seed):
  rates = random_rates(seed, num_depths=1 + seed % 3, num_ranks=3)
  for max_depth in range(1, num_nodes + 1):
    rivals = [
      trees.expected_tokens_of_tree(parents, rates)
      for parents in all_trees(num_nodes)
      if max(trees.depths(parents)) <= max_depth
    ]
    if num_nodes > 3 and max_depth == 1:
      with pytest.raises(ValueError, match=r'3 ranks.*3 nodes'):
        trees.best_tree(rates, num_nodes, max_depth)
      continue
    best = trees.best_tree(rates, num_nodes, max_depth)
    assert best in [*all_trees(num_nodes)]
    assert max(trees.depths(best)) <= max_depth
    found = trees.expected_tokens_of_tree(best, rates)
    assert found == pytest.approx(max(rivals))


def test_fewer_nodes_are_the_first_of_more():
  rates = random_rates(7)
  order = trees.best_paths(rates, 20, 4)
  values = [value for value, _ in order]
  assert values == sorted(values, reverse=True)
  for count in (1, 5, 12, 20):
    parents = trees.parents_of([path for _, path in order[:count]])
    assert parents == trees.best_tree(rates, count, 4)
    assert sum(values[:count]) == pytest.approx(
      trees.values(parents, rates).sum()
    )


def test_trees_by_their_paths():
  paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
  for order in (paths, paths[::-1]):
    assert trees.parents_of(order) == (0, 0, 1, 1, 2, 3)


@pytest.mark.parametrize(
  ('paths', 'message'),
  [
    ([(0,), (0,)], r'has the path \[0\] twice'),
    ([(0,), (2,)], r'the path \[2\] without \[1\]'),
    ([(0,), (1, 0)], r'the path \[1, 0\] without \[1\]'),
    ([()], 'twice'),
  ],
)
def test_paths_that_are_no_tree(paths, message):
  with pytest.raises(ValueError, match=message):
    trees.parents_of(paths)


@pytest.mark.parametrize(
  ('rates', 'message'),
  [
    ([0.5, 0.6], 'not increase.*0.5, 0.6'),
    ([0.7, 0.4], 'sum.*got 1.1'),
    ([1.5], 'rank rates.*got 1.5'),
  ],
)
def test_rates_that_are_none(rates, message):
  with pytest.raises(ValueError, match=message):
    trees.best_tree(rates, 2, 2)


def test_assumed_rates_leave_to_others_what_the_first_child_misses():
  for alpha in (0.0, 0.3, 0.6, 0.95, 1.0):
    [rates] = trees.checked_rates(trees.assumed_rates(alpha))
    assert rates.size == trees.NUM_RANKS
    assert rates[0] == alpha
    assert rates[1:].sum() <= 1 - alpha
  measured = [0.5, 0.2, 0.1]
  np.testing.assert_allclose(trees.assumed_rates(0.5, measured), [measured])
  deeper = trees.assumed_rates([0.5, 0.75], measured)
  np.testing.assert_allclose(deeper, [measured, [0.75, 0.1, 0.05]])


def costs(*, c: float, slope: float) -> Costs:
  """A plain step is 1, and every further position costs `slope`."""
  return Costs(
    widths=(1, 33),
    target_seconds=(1.0, 1 + 32 * slope),
    first_draft_seconds=c,
    draft_seconds=c,
  )


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'tree_seconds': (1.0,)}, 'tree_seconds needs 2 times, got 1'),
    ({'tree_nodes': (8, 8)}, r'tree_nodes.* \[8, 8\]'),
    ({'level_seconds': (0.1, -1.0)}, 'level_seconds must lie'),
  ],
)
def test_prices_of_trees_that_are_none(changes, message):
  values = {
    'tree_nodes': (6, 12),
    'tree_seconds': (1.0, 2.0),
    'level_seconds': (0.1, 0.1),
  }
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(costs(c=0.1, slope=0.1), **values | changes)


@pytest.mark.parametrize(
  ('alpha', 'depth', 'power', 'chain', 'of_8', 'of_16'),
  [
    (0.5, 3, 0.4, 1.88, 2.21, 2.42),
    (0.6, 3, 0.52, 2.18, 2.54, 2.78),
    (0.7, 4, 0.66, 2.77, 3.09, 3.43),
  ],
)
def test_what_trees_gain_over_the_chain_of_their_depth(
  alpha, depth, power, chain, of_8, of_16
):
  """Figures from elsewhere, to their digits, and the power that gives them."""
  rates = trees.assumed_rates(alpha, power=power)
  found = [
    theory.expected_tokens(alpha, depth),
    *(
      trees.expected_tokens_of_tree(trees.best_tree(rates, n, depth), rates)
      for n in (8, 16)
    ),
  ]
  assert np.round(found, 2).tolist() == [chain, of_8, of_16]
