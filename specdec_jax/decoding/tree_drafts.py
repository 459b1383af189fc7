"""What the loop does for drafts that are trees: the path that was accepted is
all that stays of one in the cache, and one chain stands for it elsewhere."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specdec_jax import arrays, trees
from specdec_jax.base import (
  Array,
  Draft,
  Drafter,
  LanguageModel,
  Tree,
  Verification,
)


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


def keep_path(
  target: LanguageModel, cache: Any, starts: Array, path: Array, num_nodes: int
) -> Any:
  """The cache with the accepted path's entries in a row from `starts[b]` on,
  the entry of the first of the `num_nodes` drafted; `path` is
  `Verification.path`."""
  assert target.gather is not None  # `check` says so.
  in_place = jnp.arange(path.shape[1], dtype=path.dtype)[None, :]
  offsets = jnp.where(path > 0, path - 1, in_place)
  return target.gather(cache, starts, offsets, num_nodes)


def along_line(
  tree: Tree, draft: Draft, verification: Verification, *of_nodes: Array
) -> tuple[Any, ...]:
  """The chain that stands for a tree: its accepted path, then first children as
  far as there are any, so that it is longer than the path if all children of
  the last accepted node were rejected.

  Args:
    tree: the shape of the draft.
    draft: N tokens.
    verification: of a tree.
    *of_nodes: arrays `[B, N+1, V]`.

  Returns:
    The draft, with at most D tokens; the verification, with `accept_probs` and
    `uniforms` `[B, D]`; the arrays as `[B, D+1, V]`.
  """
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
  return chain, verdict, *(take(values, with_root) for values in of_nodes)
