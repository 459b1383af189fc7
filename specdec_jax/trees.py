"""Arithmetic of draft trees: depths, levels, ancestors, and attention masks.

A `base.Tree` is static: all but `placement`, `path_of` and `line_of` is numpy.
Examples have the parents (0, 0, 1): nodes 1 and 2 below the root, 3 below 1.
"""

import itertools

import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array, Placement, Tree


def check(tree: Tree) -> None:
  """Raises ValueError unless nodes are in breadth-first order after a root."""
  parents = tree.parents
  if not parents:
    raise ValueError('a draft tree needs at least one node')
  if any(not 0 <= parent <= i for i, parent in enumerate(parents)):
    raise ValueError(
      f'in a draft tree every parent comes before its child: {list(parents)}'
    )
  if any(a > b for a, b in itertools.pairwise(parents)):
    raise ValueError(
      'the nodes of a draft tree are in breadth-first order, so that parents '
      f'never decrease: {list(parents)}'
    )


def depths(tree: Tree) -> np.ndarray:
  """Returns each node's depth, int32 `[N + 1]`: [0, 1, 1, 2]."""
  node_depths = [0]
  for parent in tree.parents:
    node_depths.append(node_depths[parent] + 1)
  return np.array(node_depths, np.int32)


def depth(tree: Tree) -> int:
  """Returns D, the most drafted tokens one target call can accept."""
  return int(depths(tree)[-1])


def levels(tree: Tree) -> list[range]:
  """Lists the nodes of each depth 1 .. D: [range(1, 3), range(3, 4)]."""
  by_depth = depths(tree)
  edges = np.searchsorted(by_depth, np.arange(1, by_depth[-1] + 2))
  return [range(a, b) for a, b in itertools.pairwise(edges)]


def ranks(tree: Tree) -> np.ndarray:
  """Counts each node's elder siblings, int32 `[N + 1]`: [0, 0, 1, 0]."""
  num_children: dict[int, int] = {}
  node_ranks = [0]
  for parent in tree.parents:
    node_ranks.append(num_children.get(parent, 0))
    num_children[parent] = node_ranks[-1] + 1
  return np.array(node_ranks, np.int32)


def ancestors(tree: Tree) -> np.ndarray:
  """Returns whether node j is node i or above it, bool `[N + 1, N + 1]`."""
  # Row 3 is [1, 1, 0, 1]: node 3 descends from the root and node 1.
  num_nodes = len(tree.parents) + 1
  is_ancestor = np.eye(num_nodes, dtype=bool)
  for i, parent in enumerate(tree.parents, start=1):
    is_ancestor[i] |= is_ancestor[parent]
  return is_ancestor


def placement(
  tree: Tree, nodes: range, starts: Array, capacity: int
) -> Placement:
  """Places T consecutive nodes, which are written at entries `starts + nodes`.

  The cache has S entries (`capacity`) and holds the nodes before them; int32
  `starts[b]` is the entry of the root and also its position.
  """
  by_depth = depths(tree)
  entries = jnp.arange(capacity, dtype=jnp.int32)[None, :]
  # The node in each entry: with the root at 5, entries 4, 5, 8 hold text (-1)
  # and nodes 0 and 3. Facts about nodes are computed, not gathered: a TPU looks
  # entries up one by one.
  held = entries - starts[:, None]
  begins = np.array([level.start for level in levels(tree)], np.int32)
  # Depths begin at nodes 1 and 3: node 2 has passed one of them, so depth 1.
  depth_held = jnp.sum(
    held[:, :, None] >= begins[None, None], axis=2, dtype=jnp.int32
  )
  is_node = (held >= 0) & (held < nodes.stop)
  sees = ancestors(tree)[nodes.start : nodes.stop, : nodes.stop]
  mask = (held < 0)[:, None, :]
  for first in range(0, nodes.stop, 32):
    # Bit i of a row tells whether it sees node `first + i`: node 3 sees nodes
    # 0, 1, 3, which is 0b1011. Shifted right by 2 it is odd only if it sees 2.
    seen = sees[:, first : first + 32]
    bits = seen @ (1 << np.arange(seen.shape[1], dtype=np.uint64))
    bit = held - first
    shifts = jnp.clip(bit, 0, 31).astype(jnp.uint32)[:, None, :]
    shifted = bits.astype(np.uint32)[None, :, None] >> shifts
    is_here = ((bit >= 0) & (bit < 32))[:, None, :]
    mask = mask | (is_here & (shifted & 1 == 1))
  return Placement(
    positions=starts[:, None] + by_depth[None, nodes.start : nodes.stop],
    key_positions=jnp.where(is_node, starts[:, None] + depth_held, entries),
    mask=mask,
  )


def path_of(tree: Tree, nodes: Array) -> Array:
  """Returns the paths from the root to int32 `[B]` nodes: int32 `[B, D]`, the
  node at each depth 1 .. D, 0 beyond the node: [1, 3] for 3, [2, 0] for 2."""
  return jnp.take(jnp.asarray(_paths(tree)), nodes, axis=0)


def line_of(tree: Tree, nodes: Array) -> Array:
  """Extends `path_of` by first children while there are any: the chain that
  stands for a tree whose path to a node was accepted."""
  # From nodes 0 and 1 the line is [1, 3]; node 2 has no child: [2, 0].
  first: dict[int, int] = {}
  for i, parent in enumerate(tree.parents, start=1):
    first.setdefault(parent, i)
  table, by_depth = _paths(tree), depths(tree)
  for end in range(len(by_depth)):
    node = end
    while node in first:
      node = first[node]
      table[end, by_depth[node] - 1] = node
  return jnp.take(jnp.asarray(table), nodes, axis=0)


def leaf_paths(tree: Tree) -> np.ndarray:
  """Lists the paths from the root to all leaves, int32 `[L, D + 1]`, 0 beyond a
  leaf: [[0, 2, 0], [0, 1, 3]]."""
  leaves = sorted({*range(len(tree.parents) + 1)} - {*tree.parents})
  return np.pad(_paths(tree)[leaves], ((0, 0), (1, 0)))


def _paths(tree: Tree) -> np.ndarray:
  """Tabulates the paths to all nodes, int32 `[N + 1, D]`; see `path_of`."""
  # [[0, 0], [1, 0], [2, 0], [1, 3]]
  by_depth = depths(tree)
  table = np.zeros((len(by_depth), int(by_depth[-1])), np.int32)
  for i, parent in enumerate(tree.parents, start=1):
    table[i] = table[parent]
    table[i, by_depth[i] - 1] = i
  return table
