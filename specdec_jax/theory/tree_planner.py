"""Whether a tree of drafts beats a chain, from rank rates and costs.

A tree is drafted depth by depth and scored in one call. What that takes is
known where trees themselves were compiled (`TreeCosts`). Elsewhere a depth is
taken to cost what a token of a chain does, and scoring what a chain of as many
tokens does: the least that it can cost, and the plan says so.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax.theory import planner, trees
from specdec_jax.theory.planner import Choice, Costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeCosts:
  """Times of the parts of iterations with trees, in the unit of `Costs`.

  Attributes:
    tree_nodes: of the trees that were priced, ascending. Between them is
      interpolated, and a smaller tree costs as much as the first.
    tree_seconds: of the iteration that scores each, walks it and moves its path
      in the caches, without the drafting.
    level_seconds: of drafting a depth of each, on average; a depth costs a
      token of a chain at the least.
  """

  tree_nodes: Sequence[int]
  tree_seconds: Sequence[float]
  level_seconds: Sequence[float]

  def __post_init__(self):
    sizes = [len(values) for values in dataclasses.astuple(self)]
    if sizes != sizes[:1] * 3 or (np.diff(self.tree_nodes) <= 0).any():
      raise ValueError(
        f'trees of ascending size need two times each, got {sizes[1]} and '
        f'{sizes[2]} for tree_nodes {list(self.tree_nodes)}'
      )
    for name in ('tree_seconds', 'level_seconds'):
      planner.in_range(name, getattr(self, name), 0)

  def scoring_seconds(self, num_nodes: int) -> float:
    """An iteration without its drafting."""
    return float(np.interp(num_nodes, self.tree_nodes, self.tree_seconds))

  def drafting_seconds(self, num_nodes: int, depth: int) -> float:
    """All depths of a draft."""
    level = np.interp(num_nodes, self.tree_nodes, self.level_seconds)
    return depth * float(level)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreePlan:
  """The fastest tree that is no chain, and a sentence on it."""

  choice: Choice
  depth: int
  is_faster: bool
  sentence: str


def plan(
  rates: ArrayLike,
  costs: Costs,
  chain: Choice,
  *,
  tree_costs: TreeCosts | None = None,
  max_nodes: int | None = None,
  batch_size: int = 1,
  length: int = 128,
) -> TreePlan:
  """The best number of nodes and depth, against the best chain.

  Args:
    rates: of ranks, as of `theory.trees`.
    costs: of the parts of an iteration.
    chain: of `planner.plan`, its `best`.
    tree_costs: of trees themselves; None takes those of chains.
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
  tree = _fastest(rates, costs, tree_costs, max_nodes)
  num_nodes, depth = len(tree), max(trees.depths(tree))
  seconds = _iteration_seconds(costs, tree_costs, num_nodes, depth)
  choice = planner.choice_of(
    trees.profile(tree, rates),
    costs,
    batch_size,
    length,
    tree=tree,
    seconds=seconds,
  )
  is_faster = choice.speedup > chain.speedup * (1 + planner.MARGIN)
  found = (
    f'{num_nodes} nodes in {depth} depths give {choice.expected_tokens:.2f} '
    f'tokens per target run and {choice.speedup:.2f} times the speed of plain '
    'decoding'
  )
  if is_faster:
    rest = 'where every chain loses'
    if chain.gamma:
      gain = choice.speedup / chain.speedup
      rest = f'{gain:.2f} times that of the best chain'
    sentence = f'A tree is faster: {found}, {rest}.'
    if tree_costs is None:
      sentence += (
        ' That is the most it can be: its scoring is taken to cost what a '
        "chain's of as many tokens does."
      )
  else:
    scoring = _scoring_seconds(costs, tree_costs, num_nodes)
    rows = f'{batch_size} row' + 's' * (batch_size > 1)
    sentence = (
      f'No tree is faster: {found}, since its iteration costs '
      f'{seconds / costs.plain_seconds:.2f} plain steps, of which scoring '
      f'{num_nodes + 1} positions of {rows} is '
      f'{scoring / costs.plain_seconds:.2f}.'
    )
  return TreePlan(
    choice=choice, depth=depth, is_faster=is_faster, sentence=sentence
  )


def _fastest(
  rates: ArrayLike, costs: Costs, tree_costs: TreeCosts | None, max_nodes: int
) -> tuple[int, ...]:
  """The tree with the most tokens per second, of one row, and with fewer depths
  than nodes; its `parents`."""
  pace = 0.0
  best: tuple[int, ...] = ()
  for depth in range(1, max_nodes):
    # The best tree of fewer nodes is the beginning of that of more.
    order = trees.best_paths(rates, max_nodes, depth)
    tokens = 1 + np.cumsum([value for value, _ in order])
    for num_nodes in range(depth + 1, len(order) + 1):
      seconds = _iteration_seconds(costs, tree_costs, num_nodes, depth)
      if (found := float(tokens[num_nodes - 1]) / seconds) > pace:
        pace = found
        best = trees.parents_of([path for _, path in order[:num_nodes]])
  if not best:
    raise ValueError('one rank makes chains, no trees: give rates of several')
  return best


def _iteration_seconds(
  costs: Costs, tree_costs: TreeCosts | None, num_nodes: int, depth: int
) -> float:
  """One iteration with a tree."""
  drafting = costs.drafting_seconds(depth)
  if tree_costs is not None:
    # A chain's parts are compiled apart: weights that one program keeps on the
    # chip from depth to depth would be a gain of trees alone.
    drafting = max(drafting, tree_costs.drafting_seconds(num_nodes, depth))
  scoring = _scoring_seconds(costs, tree_costs, num_nodes)
  return drafting + scoring + costs.loop_seconds


def _scoring_seconds(
  costs: Costs, tree_costs: TreeCosts | None, num_nodes: int
) -> float:
  if tree_costs is None:
    return costs.verify_cost_ratio(num_nodes) * costs.plain_seconds
  return tree_costs.scoring_seconds(num_nodes)
