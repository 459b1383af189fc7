"""Trees of drafts in the loop: only the accepted path stays in the cache, and
one chain stands for the tree in everything that is committed and counted."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, trees
from specdec_jax.base import (
  Array,
  Arrays,
  Draft,
  Drafter,
  LanguageModel,
  Placement,
  Tree,
  Verification,
)
from specdec_jax.decoding.method import Method
from specdec_jax.sampling import keys
from specdec_jax.verification import decision


def check(target: LanguageModel, drafter: Drafter) -> None:
  """Raises ValueError for a malformed tree, or a target that takes no trees."""
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
  """Derives keys `[B]` for the rule from committed lengths `[B]`; for a tree
  `[D+1, B]`, from lengths 0 to D longer."""
  verify = lambda more: keys.iteration_keys(row_keys, lengths + more)[1]
  if tree is None:
    return keys.iteration_keys(row_keys, lengths)[1]
  steps = jnp.arange(trees.depth(tree) + 1, dtype=lengths.dtype)
  return jax.vmap(verify)(steps)


def placement(
  tree: Tree | None, width: int, lengths: Array, cache: Any
) -> dict[str, Placement]:
  """Places the root and the first `width` nodes behind committed lengths `[B]`,
  as an argument of `extend`; empty for a chain, and for the root alone."""
  if tree is None or not width:
    return {}
  nodes = range(width + 1)
  placed = trees.placement(tree, nodes, lengths - 1, cache.capacity)
  return {'placement': placed}


def by_paths(target: LanguageModel, tree: Tree) -> LanguageModel:
  """Makes a target that scores each path from the root to a leaf as a chain, in
  a row of its own, so that its bits are those of a chain.

  With L leaves, a cache has L copies of each row from the call of a tree until
  `gather`, which keeps the one of the accepted path.
  """
  paths = trees.leaf_paths(tree)
  # In the paths [[0, 2, 0], [0, 1, 3]], nodes 0 to 3 are entries 0, 4, 1, 5.
  first = np.unique(paths, return_index=True)[1]

  def extend(
    params: Arrays,
    tokens: Array,
    cache: Arrays,
    at: Array | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, Arrays]:
    if placement is None:
      return target.extend(params, tokens, cache, at)
    copies = jax.tree.map(lambda x: jnp.repeat(x, len(paths), axis=0), cache)
    chains = tokens[:, paths].reshape(-1, paths.shape[1])
    logits, cache = target.extend(params, chains, copies)
    by_row = logits.reshape(tokens.shape[0], -1, logits.shape[2])
    return by_row[:, first], cache

  def gather(cache: Arrays, starts: Array, offsets: Array, span: int) -> Arrays:
    del starts, span
    # Beyond the accepted path, offsets may be those of any node.
    is_on = offsets[:, None] + 1 == paths[None, :, 1:]
    best = arrays.argmax(arrays.count_leading(is_on))[:, None]
    of_paths = lambda x: x.reshape(-1, len(paths), *x.shape[1:])
    pick = lambda x: arrays.take(of_paths(x), best)[:, 0]
    return jax.tree.map(pick, cache)

  # A target without `gather` takes no trees.
  return target._replace(extend=extend, gather=target.gather and gather)


class Line(NamedTuple):
  """The chain that is committed and counted: a chain itself, or what `taken`
  makes of a tree.

  Attributes:
    draft: W tokens.
    verification: the rule's verdict on them.
    target_probs: float32 `[B, W+1, V]`, after the pending token and each.
    logits: float32 `[B, W+1, V]`, likewise.
    is_bad: bool `[B, W+1, 1]`, tokens whose probability in the draft is NaN.
  """

  draft: Draft
  verification: Verification
  target_probs: Array
  logits: Array
  is_bad: Array

  def block(self) -> Array:
    """Lists accepted tokens, then the next one, repeated: int32 `[B, W+1]`."""
    # draft [5, 6, 7], 1 accepted, next token 9 -> [5, 9, 9, 9]
    accepted = jnp.pad(self.draft.tokens, ((0, 0), (0, 1)))
    return jnp.where(
      arrays.is_within(self.verification.num_accepted, accepted.shape[1]),
      accepted,
      self.verification.next_token[:, None],
    )


def taken(
  method: Method, of_nodes: Line, cache: Any, starts: Array
) -> tuple[Line, Any]:
  """Reduces a tree to its line (`along_line`) and moves the accepted path's
  cache entries together from `starts[B]` on, the entry of node 1. Raises
  ValueError if the rule gave no path."""
  target, drafter = method.target, method.drafter
  path = of_nodes.verification.path
  if path is None:
    raise ValueError(
      f'the drafter proposes trees of {drafter.gamma} nodes, and the rule '
      'accepts prefixes of chains: it gives no path'
    )
  assert target.gather is not None  # `check` says so.
  assert drafter.tree is not None
  # Path [2, 5, 0]: entries 1 and 4 from `starts` on move to 0 and 1, the third
  # stays in place -> offsets [1, 4, 2].
  in_place = jnp.arange(path.shape[1], dtype=path.dtype)[None, :]
  offsets = jnp.where(path > 0, path - 1, in_place)
  cache = target.gather(cache, starts, offsets, drafter.gamma)
  return along_line(drafter.tree, of_nodes), cache


def along_line(tree: Tree, of_nodes: Line) -> Line:
  """Makes the chain that stands for a tree: the accepted path, then first
  children while there are any that are tokens. So it is longer than the path if
  the children of the last accepted node were rejected.

  Its draft has at most D tokens, `accept_probs` and `uniforms` are `[B, D]`,
  and arrays of N + 1 nodes become `[B, D+1, V]`. In the tree (0, 0, 1, 1) the
  accepted path [2] has the line [2], as node 2 is a leaf; an empty one [1, 3].
  """
  draft, verification = of_nodes.draft, of_nodes.verification
  assert verification.path is not None
  line = trees.line_of(tree, jnp.max(verification.path, axis=1))
  drafted = jnp.maximum(line - 1, 0)
  tokens = jnp.take_along_axis(draft.tokens, drafted, axis=1)
  is_node = (line > 0) & (tokens != decision.NO_TOKEN)
  lengths = jnp.where(draft.lengths > 0, arrays.count_leading(is_node), 0)
  # Picks values `[B, D]` of the line's nodes, 0 beyond it: node i is token i-1.
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
  with_root = jnp.pad(line, ((0, 0), (1, 0)))  # line [1, 3] -> nodes [0, 1, 3]
  return Line(chain, verdict, *(take(x, with_root) for x in of_nodes[2:]))
