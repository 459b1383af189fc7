"""Whether a tree of drafts beats a chain, from rank rates and costs."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax.theory import planner, trees
from specdec_jax.theory.costs import Costs
from specdec_jax.theory.planner import Forecast


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreePlan:
  """The fastest tree that is no chain, and a sentence on it."""

  choice: Forecast
  depth: int
  is_faster: bool
  sentence: str


def plan(
  rates: ArrayLike,
  costs: Costs,
  chain: Forecast,
  *,
  max_nodes: int | None = None,
  batch_size: int = 1,
  length: int = 128,
) -> TreePlan:
  """Finds the best number of nodes and depth, against the best chain.

  Args:
    rates: of ranks, as of `theory.trees`.
    costs: of the parts of an iteration.
    chain: of `planner.plan`, its `best`.
    max_nodes: the most considered, at least 2; None for all whose scoring was
      measured.
    batch_size: rows decoded together; all wait for the slowest.
    length: tokens that each row decodes, for that wait.

  Raises ValueError if an argument is out of range, or `max_nodes` not measured.
  """
  if max_nodes is None:
    max_nodes = costs.max_gamma
  costs.check_gamma(max_nodes)
  planner.in_range('max_nodes', max_nodes, 2)
  tree = _fastest(rates, costs, max_nodes)
  depth = max(trees.depths(tree))
  choice = planner.forecast(
    trees.profile(tree, rates), costs, batch_size, length, tree=tree
  )
  is_faster = choice.speedup > chain.speedup * (1 + planner.MARGIN)
  if is_faster:
    sentence = _gain(choice, depth, chain, is_priced=bool(costs.tree_nodes))
  else:
    sentence = _loss(choice, depth, costs, batch_size)
  return TreePlan(
    choice=choice, depth=depth, is_faster=is_faster, sentence=sentence
  )


def _gain(
  tree: Forecast, depth: int, chain: Forecast, *, is_priced: bool
) -> str:
  rest = 'where every chain loses'
  if chain.gamma:
    gain = tree.speedup / chain.speedup
    rest = f'{gain:.2f} times that of the best chain'
  sentence = f'A tree is faster: {_shown(tree, depth)}, {rest}.'
  if not is_priced:
    sentence += (
      ' That is the most it can be: its scoring is taken to cost what a '
      "chain's of as many tokens does."
    )
  return sentence


def _loss(tree: Forecast, depth: int, costs: Costs, batch_size: int) -> str:
  seconds = costs.iteration_seconds(tree.gamma, depth)
  scoring = costs.scoring_seconds(tree.gamma, depth)
  rows = f'{batch_size} row' + 's' * (batch_size > 1)
  return (
    f'No tree is faster: {_shown(tree, depth)}, since its iteration costs '
    f'{seconds / costs.plain_seconds:.2f} plain steps, of which scoring '
    f'{tree.gamma + 1} positions of {rows} is '
    f'{scoring / costs.plain_seconds:.2f}.'
  )


def _shown(tree: Forecast, depth: int) -> str:
  return (
    f'{tree.gamma} nodes in {depth} depths give {tree.expected_tokens:.2f} '
    f'tokens per target run and {tree.speedup:.2f} times the speed of plain '
    'decoding'
  )


def _fastest(rates: ArrayLike, costs: Costs, max_nodes: int) -> tuple[int, ...]:
  """Finds the tree with the most tokens per second, of one row, and with fewer
  depths than nodes; its `parents`."""
  pace = 0.0
  best: tuple[int, ...] = ()
  for depth in range(1, max_nodes):
    # The best tree of fewer nodes is the beginning of that of more.
    order = trees.best_paths(rates, max_nodes, depth)
    tokens = 1 + np.cumsum([value for value, _ in order])
    # As many nodes as depths are a chain.
    for num_nodes in range(depth + 1, len(order) + 1):
      seconds = costs.iteration_seconds(num_nodes, depth)
      if (found := float(tokens[num_nodes - 1]) / seconds) > pace:
        pace = found
        best = trees.parents_of([path for _, path in order[:num_nodes]])
  if not best:
    raise ValueError('one rank makes chains, no trees: give rates of several')
  return best
