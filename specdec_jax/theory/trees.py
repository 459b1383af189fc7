"""Expected tokens of a draft tree, and the best tree of a given size.

Sequoia (Chen et al., https://arxiv.org/abs/2402.12374), Sec. 4.1: once a node
is reached, its r-th child is accepted with a probability that depends on r
alone, its *rank rate* a_r. The probability to reach a node, its *value*, is the
product of the rates along its path; a run gives 1 + the sum of all values.

Trees are given by their `parents`, as in `base.Tree`: nodes 1 .. N are in
breadth-first order, siblings ordered by rank, and `parents[i]` is the parent of
node i + 1; 0 is the root. Rates are float `[K]`, of ranks 1 .. K, or `[D, K]`,
one row per depth, the last row for all greater depths; ranks beyond K have rate
0. Rates must not increase with rank and sum to at most 1; otherwise functions
raise ValueError.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from specdec_jax.theory.acceptance import in_range

# Assumed for the shape of a tree if only its size is given.
DEFAULT_ALPHA = 0.6
NUM_RANKS = 8
# The exponent of the probability to reject r children, if it was not measured.
POWER = 0.5
_TOLERANCE = 1e-6


def assumed_rates(
  profile: ArrayLike,
  rank_rates: ArrayLike | None = None,
  *,
  power: float = POWER,
) -> np.ndarray:
  """Extrapolates rank rates, float64 `[D, K]`, from those of first children.

  Args:
    profile: the rates of rank 1: alpha, or one by position in a chain, `[D]`.
    rank_rates: `[K]`, measured elsewhere: once the first child is rejected, the
      others are accepted with the same probabilities as there.
    power: at least 0; without `rank_rates`, the first r children are all
      rejected with probability `(1 - alpha) r^-power` (Sequoia, Sec. 4.1).
  """
  # With alpha 0.6 and power 0.5, ranks 2 and 3 have 0.4 (1 - 1/sqrt(2)) = 0.12
  # and 0.4 (1/sqrt(2) - 1/sqrt(3)) = 0.05.
  first = np.atleast_1d(in_range('profile', profile, 0, 1))
  exponent = -float(in_range('power', power, 0))
  shares = -np.diff(np.arange(1.0, NUM_RANKS + 1) ** exponent)
  if rank_rates is not None:
    measured = checked_rates(rank_rates)[0]
    shares = measured[1:] / max(1 - measured[0], _TOLERANCE)
  rates = np.column_stack([first, np.outer(1 - first, shares)])
  return np.minimum.accumulate(rates, axis=1)


def checked_rates(rates: ArrayLike) -> np.ndarray:
  """Returns rank rates as float64 `[D, K]`, one row for `[K]`; ValueError
  unless they satisfy the conditions of the module's docstring."""
  table = np.atleast_2d(in_range('rank rates', rates, 0, 1))
  if (np.diff(table, axis=1) > 0).any():
    raise ValueError(f'rank rates must not increase, got {table.tolist()}')
  if (total := table.sum(axis=1).max()) > 1 + _TOLERANCE:
    raise ValueError(f'rank rates sum to at most 1, got {total:g}')
  return table


def values(parents: Sequence[int], rates: ArrayLike) -> np.ndarray:
  """Computes the probability to reach each node 1 .. N, float64 `[N]`."""
  # Parents (0, 0, 1): two children of the root and one of node 1. With rates .6
  # and .2 at every depth, their values are .6, .2 and .36.
  rates = checked_rates(rates)
  num_children = [0] * (len(parents) + 1)
  reached = [1.0]
  for parent, depth in zip(parents, depths(parents), strict=True):
    rank = num_children[parent]
    num_children[parent] += 1
    reached.append(reached[parent] * _rate(rates, depth, rank))
  return np.array(reached[1:])


def _rate(rates: np.ndarray, depth: int, rank: int) -> float:
  """Looks up one of `checked_rates`, for a depth from 1 and a rank from 0."""
  if rank >= rates.shape[1]:
    return 0.0
  return float(rates[min(depth, len(rates)) - 1, rank])


def expected_tokens_of_tree(parents: Sequence[int], rates: ArrayLike) -> float:
  """Computes tokens per target run, including the one after the path."""
  return 1 + float(values(parents, rates).sum())


def profile(parents: Sequence[int], rates: ArrayLike) -> np.ndarray:
  """Computes, float64 `[D]`, the probability that the accepted path reaches
  each depth, given that it reached the one above; for a chain, its rates."""
  depth, of_nodes = np.array(depths(parents)), values(parents, rates)
  # Two children with values 0.6 and 0.2, and a child of the first with 0.3:
  # depth 1 is reached with 0.8, depth 2 with 0.3, and given depth 1 with 0.375.
  reached = np.bincount(depth, of_nodes)
  reached[0] = 1.0
  before, now = reached[:-1], reached[1:]
  return np.divide(now, before, out=np.zeros_like(now), where=before > 0)


def best_tree(
  rates: ArrayLike, num_nodes: int, max_depth: int
) -> tuple[int, ...]:
  """Finds the tree of `num_nodes`, at most `max_depth` deep, both at least 1,
  with the most expected tokens; returns its parents. ValueError without one."""
  order = best_paths(rates, num_nodes, max_depth)
  if len(order) < num_nodes:
    raise ValueError(
      f'a tree of depth {max_depth} with {checked_rates(rates).shape[1]} ranks '
      f'has at most {len(order)} nodes, fewer than {num_nodes}'
    )
  return parents_of([path for _, path in order])


def best_paths(
  rates: ArrayLike, num_nodes: int, max_depth: int
) -> list[tuple[float, tuple[int, ...]]]:
  """Returns the nodes with the greatest values, in descending order, with their
  values and the ranks along their paths, from 0.

  Fewer than `num_nodes` if there are not as many. Of equal values, less depth
  and then lower ranks come first. Arguments are those of `best_tree`.
  """
  # The value of a child is at most its parent's, and at most that of the
  # sibling before it. So the first n nodes are a tree for every n, and no tree
  # of n nodes has more expected tokens: Sequoia's dynamic program finds the
  # same.
  rates = checked_rates(rates)
  in_range('num_nodes', num_nodes, 1)
  in_range('max_depth', max_depth, 1)
  # A heap of (-value, depth, path, the parent's value). Once (0,), the root's
  # first child, is taken, its next sibling (1,) and its first child (0, 0) are
  # candidates: no other node has a greater value than all candidates.
  waiting: list[tuple[float, int, tuple[int, ...], float]] = []

  def wait(path: tuple[int, ...], above: float) -> None:
    depth, rank = len(path), path[-1]
    if depth <= max_depth and rank < rates.shape[1]:
      value = above * _rate(rates, depth, rank)
      heapq.heappush(waiting, (-value, depth, path, above))

  wait((0,), 1.0)
  nodes: list[tuple[float, tuple[int, ...]]] = []
  while waiting and len(nodes) < num_nodes:
    value, _, path, above = heapq.heappop(waiting)
    nodes.append((-value, path))
    wait((*path[:-1], path[-1] + 1), above)
    wait((*path, 0), -value)
  return nodes


def parents_of(paths: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
  """Makes the parents of the tree with these paths of ranks, from 0, in any
  order; ValueError for one twice, or without its parent or previous sibling."""
  index: dict[tuple[int, ...], int] = {(): 0}
  parents = []
  # Breadth-first, siblings by rank: (0,), (1,), (0, 0) have parents 0, 0, 1.
  for path in sorted(paths, key=lambda path: (len(path), path)):
    if path in index:
      raise ValueError(f'the tree has the path {list(path)} twice')
    *above, rank = path
    needed = (*above, rank - 1) if rank else tuple(above)
    if needed not in index:
      raise ValueError(
        f'the tree has the path {list(path)} without {list(needed)}'
      )
    parents.append(index[tuple(above)])
    index[path] = len(index)
  return tuple(parents)


def depths(parents: Sequence[int]) -> list[int]:
  """Computes the depth of each node 1 .. N."""
  node_depths = [0]
  for parent in parents:
    node_depths.append(node_depths[parent] + 1)
  return node_depths[1:]
