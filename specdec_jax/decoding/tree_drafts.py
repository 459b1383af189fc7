"""What the loop does for drafts that are trees: the path that was accepted is
all that stays of one in the cache, and one chain stands for it elsewhere."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import arrays, keys, trees
from specdec_jax.base import (
  Array,
  Draft,
  Drafter,
  LanguageModel,
  Placement,
  Tree,
  Verification,
)
from specdec_jax.decoding.method import Method


def check(target: LanguageModel, drafter: Drafter) -> None:
  """Raises ValueError if the drafter's trees are none, or the target takes
  none."""
  if drafter.tree is None:
    return
  trees.check(drafter.tree)
  num_nodes = len(drafter.tree.parents)
  if drafter.gamma != num_nodes:
    raise ValueError(
      f'the drafter declares gamma {drafter.gamma}, and its tree has '
      f'{num_nodes} nodes'
    )
  if target.gather is None:
    raise ValueError(
      f'the drafter proposes trees of {num_nodes} nodes, and the target takes '
      'chains alone: it has no gather'
    )


def verify_keys(tree: Tree | None, row_keys: Array, lengths: Array) -> Array:
  """Keys `[B]` for the rule at committed lengths `[B]`; for a tree `[D+1, B]`,
  those of lengths that are 1 to D longer as well."""
  verify = lambda more: keys.iteration_keys(row_keys, lengths + more)[1]
  if tree is None:
    return keys.iteration_keys(row_keys, lengths)[1]
  steps = jnp.arange(trees.depth(tree) + 1, dtype=lengths.dtype)
  return jax.vmap(verify)(steps)


def placement(
  tree: Tree | None, width: int, lengths: Array, cache: Any
) -> dict[str, Placement]:
  """Where the root and the first `width` nodes stand, as an argument of
  `extend`, from committed lengths `[B]`: none for a chain, or for the root
  alone, which is one, whatever would have followed it."""
  if tree is None or not width:
    return {}
  nodes = range(width + 1)
  placed = trees.placement(tree, nodes, lengths - 1, cache.capacity)
  return {'placement': placed}


class Line(NamedTuple):
  """The chain that is committed and counted: all of a chain, of a tree what
  `taken` makes of it.

  Attributes:
    draft: W tokens.
    verification: what became of them.
    target_probs: float32 `[B, W+1, V]`, after the pending token and each.
    logits: float32 `[B, W+1, V]`, likewise.
    is_bad: bool `[B, W+1, 1]`, tokens whose own probability is not a number.
  """

  draft: Draft
  verification: Verification
  target_probs: Array
  logits: Array
  is_bad: Array

  def block(self) -> Array:
    """Accepted tokens, then the next one, repeated: int32 `[B, W+1]`."""
    accepted = jnp.pad(self.draft.tokens, ((0, 0), (0, 1)))
    return jnp.where(
      arrays.is_within(self.verification.num_accepted, accepted.shape[1]),
      accepted,
      self.verification.next_token[:, None],
    )


def taken(
  method: Method, of_nodes: Line, cache: Any, starts: Array
) -> tuple[Line, Any]:
  """What is kept of a tree: its line (`along_line`), and the cache with the
  accepted path's entries in a row from `starts[B]` on, the entry of the first
  drafted node. Raises ValueError if the rule gave no path."""
  target, drafter = method.target, method.drafter
  path = of_nodes.verification.path
  if path is None:
    raise ValueError(
      f'the drafter proposes trees of {drafter.gamma} nodes, and the rule '
      'accepts prefixes of chains: it gives no path'
    )
  assert target.gather is not None  # `check` says so.
  assert drafter.tree is not None
  in_place = jnp.arange(path.shape[1], dtype=path.dtype)[None, :]
  offsets = jnp.where(path > 0, path - 1, in_place)
  cache = target.gather(cache, starts, offsets, drafter.gamma)
  return along_line(drafter.tree, of_nodes), cache


def along_line(tree: Tree, of_nodes: Line) -> Line:
  """The chain that stands for a tree: its accepted path, then first children as
  far as there are any, so that it is longer than the path if all children of
  the last accepted node were rejected.

  Its draft has at most D tokens, `accept_probs` and `uniforms` are `[B, D]`,
  and the arrays of N + 1 nodes `[B, D+1, V]`. Of the tree (0, 0, 1, 1) with
  accepted path [2], which has no children, the line is [2]; with an empty path
  it is [1, 3].
  """
  draft, verification = of_nodes.draft, of_nodes.verification
  assert verification.path is not None
  line = trees.line_of(tree, jnp.max(verification.path, axis=1))
  lengths = jnp.sum((line > 0).astype(jnp.int32), axis=1, dtype=jnp.int32)
  lengths = jnp.where(draft.lengths > 0, lengths, 0)
  drafted = jnp.maximum(line - 1, 0)
  # The values `[B, D]` of the line's drafted nodes, and 0 beyond it.
  pick = lambda values: jnp.where(
    arrays.is_within(lengths, line.shape[1]),
    jnp.take_along_axis(values, drafted, axis=1),
    0,
  )
  take = lambda values, nodes: jnp.take_along_axis(
    values, nodes[..., None], axis=1
  )
  chain = Draft(
    tokens=pick(draft.tokens),
    probs=None if draft.probs is None else take(draft.probs, drafted),
    lengths=lengths,
  )
  uniforms = verification.uniforms
  verdict = dataclasses.replace(
    verification,
    accept_probs=pick(verification.accept_probs),
    uniforms=None if uniforms is None else pick(uniforms),
  )
  with_root = jnp.pad(line, ((0, 0), (1, 0)))
  return Line(chain, verdict, *(take(x, with_root) for x in of_nodes[2:]))
