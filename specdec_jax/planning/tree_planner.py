"""Compares trees of drafts with chains, from rank rates and costs."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax.planning import planner
from specdec_jax.planning.planner import Forecast
from specdec_jax.theory import trees
from specdec_jax.theory.acceptance import in_range
from specdec_jax.theory.costs import Costs
from specdec_jax.theory.speedup import MARGIN


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreePlan:
  """The fastest tree that is not a chain, its depth, whether it is faster than
  the best chain, and a sentence that explains why."""

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
  """Finds the best number of nodes and depth, and compares it with a chain.

  Args:
    rates: rank rates, see `theory.trees`.
    costs: as in `planner.plan`.
    chain: the `best` of `planner.plan`.
    max_nodes: the most nodes considered, at least 2; None for all measured.
    batch_size: as in `planner.plan`.
    length: as in `planner.plan`.

  Raises:
    ValueError: if an argument is out of range, or `max_nodes` not measured.
  """
  max_nodes = costs.max_gamma if max_nodes is None else max_nodes
  costs.check_gamma(max_nodes)
  in_range('max_nodes', max_nodes, 2)
  tree = _fastest(rates, costs, max_nodes)
  depth = max(trees.depths(tree))
  choice = planner.forecast(
    trees.profile(tree, rates), costs, batch_size, length, tree=tree
  )
  is_faster = choice.speedup > chain.speedup * (1 + MARGIN)
  shown = (
    f'{choice.gamma} nodes in {depth} depths give '
    f'{choice.expected_tokens:.2f} tokens per target run and '
    f'{choice.speedup:.2f} times the speed of plain decoding'
  )
  if is_faster:
    gain = f'{choice.speedup / chain.speedup:.2f} times that of the best chain'
    rest = gain if chain.gamma else 'where every chain loses'
    sentence = f'A tree is faster: {shown}, {rest}.'
    if not costs.tree_nodes:
      sentence += (
        ' That is an upper bound: its scoring is assumed to cost as much as '
        "a chain's of as many tokens."
      )
  else:
    iteration = (
      costs.iteration_seconds(choice.gamma, depth) / costs.plain_seconds
    )
    scoring = costs.scoring_seconds(choice.gamma, depth) / costs.plain_seconds
    sentence = (
      f'No tree is faster: {shown}, since its iteration costs {iteration:.2f} '
      f'plain steps, of which scoring {choice.gamma + 1} positions of '
      f'{planner.plural(batch_size, "row")} is {scoring:.2f}.'
    )
  return TreePlan(
    choice=choice, depth=depth, is_faster=is_faster, sentence=sentence
  )


def _fastest(rates: ArrayLike, costs: Costs, max_nodes: int) -> tuple[int, ...]:
  """Returns the parents of the tree (not a chain) that is fastest for a row."""
  pace = 0.0
  best: tuple[int, ...] = ()
  for depth in range(1, max_nodes):
    # The best trees are nested: that of n nodes is the first n of `order`, and
    # values .6, .36, .2 give 1.6, 1.96 and 2.16 tokens.
    order = trees.best_paths(rates, max_nodes, depth)
    tokens = 1 + np.cumsum([value for value, _ in order])
    # A tree of as many nodes as levels would be a chain.
    for num_nodes in range(depth + 1, len(order) + 1):
      seconds = costs.iteration_seconds(num_nodes, depth)
      tokens_per_second = float(tokens[num_nodes - 1]) / seconds
      if tokens_per_second > pace:
        pace = tokens_per_second
        best = trees.parents_of([path for _, path in order[:num_nodes]])
  if not best:
    raise ValueError('trees need the rates of two ranks or more, got one')
  return best
