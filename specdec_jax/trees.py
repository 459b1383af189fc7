"""The arithmetic of draft trees: depths, levels, ancestors, and what each node
sees of a cache.

A `base.Tree` is static: all but `placement`, `path_of` and `line_of` is numpy.
"""

import itertools

import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array, Placement, Tree


def check(tree: Tree) -> None:
  """Raises ValueError unless nodes are breadth-first and parents come first."""
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
  """int32 `[N + 1]`: how far each node is from the root, which has 0."""
  found = [0]
  for parent in tree.parents:
    found.append(found[parent] + 1)
  return np.array(found, np.int32)


def depth(tree: Tree) -> int:
  """D: the most tokens that one target call can accept."""
  return int(depths(tree)[-1])


def levels(tree: Tree) -> list[range]:
  """The nodes of each depth, 1 to D."""
  by_depth = depths(tree)
  edges = np.searchsorted(by_depth, np.arange(1, by_depth[-1] + 2))
  return [range(a, b) for a, b in itertools.pairwise(edges)]


def ranks(tree: Tree) -> np.ndarray:
  """int32 `[N + 1]`: how many siblings stand before each node, the root too."""
  seen: dict[int, int] = {}
  found = [0]
  for parent in tree.parents:
    found.append(seen.get(parent, 0))
    seen[parent] = found[-1] + 1
  return np.array(found, np.int32)


def ancestors(tree: Tree) -> np.ndarray:
  """bool `[N + 1, N + 1]`: whether node j is node i or one above it."""
  num_nodes = len(tree.parents) + 1
  found = np.eye(num_nodes, dtype=bool)
  for i, parent in enumerate(tree.parents, start=1):
    found[i] |= found[parent]
  return found


def placement(
  tree: Tree, nodes: range, starts: Array, capacity: int
) -> Placement:
  """Of T consecutive nodes, which are written at `starts + nodes` in a cache of
  S entries (`capacity`) that holds the nodes before them; int32 `starts[b]` is
  the root's entry and its position."""
  by_depth = depths(tree)
  entries = jnp.arange(capacity, dtype=jnp.int32)[None, :]
  # The node that an entry holds: below 0 it is text before the root. What is
  # known of a node is computed: a TPU looks up one entry after the other.
  held = entries - starts[:, None]
  begins = np.array([level.start for level in levels(tree)], np.int32)
  depth_held = jnp.sum(
    held[:, :, None] >= begins[None, None], axis=2, dtype=jnp.int32
  )
  is_node = (held >= 0) & (held < nodes.stop)
  sees = ancestors(tree)[nodes.start : nodes.stop, : nodes.stop]
  mask = (held < 0)[:, None, :]
  for first in range(0, nodes.stop, 32):
    # Bit i of a row is whether it sees node `first + i`.
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
  """The path from the root to int32 `[B]` nodes: int32 `[B, D]`, the node at
  depths 1 to D, 0 beyond the node itself."""
  return jnp.take(jnp.asarray(_paths(tree)), nodes, axis=0)


def line_of(tree: Tree, nodes: Array) -> Array:
  """`path_of`, prolonged by first children as far as there are any: the chain
  that stands for a tree of which one path was taken."""
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


def _paths(tree: Tree) -> np.ndarray:
  """int32 `[N + 1, D]`, the path to each node; see `path_of`."""
  by_depth = depths(tree)
  table = np.zeros((len(by_depth), int(by_depth[-1])), np.int32)
  for i, parent in enumerate(tree.parents, start=1):
    table[i] = table[parent]
    table[i, by_depth[i] - 1] = i
  return table
