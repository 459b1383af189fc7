"""The target-sample walk over a draft tree (EAGLE-2, arXiv 2406.16858)."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, trees
from specdec_jax.base import Array, Draft, Tree, Verification
from specdec_jax.sampling import distributions, logits
from specdec_jax.verification import decision

# `(depth, probs[B, V]) -> tokens[B]`: the target's choice after nodes of that
# depth, given its distributions there.
DrawFn = Callable[[int, Array], Array]


def target_sample_walk(
  row_keys: Array, draft: Draft, target_probs: Array, *, tree: Tree
) -> Verification:
  """Draws from the target at each node and descends while a child has the drawn
  token.

  The draw at depth d is the one plain decoding makes at that committed length,
  so the output equals plain decoding token for token, sampled or not, whatever
  was drafted (https://arxiv.org/abs/2408.07978). `draft.probs` is not read. If
  siblings have equal tokens, the walk follows all: the deepest match counts.

  A `base.VerifyFn` for trees of one shape. Raises ValueError if the draft has
  another number of nodes.
  """

  def draw(depth: int, probs: Array) -> Array:
    _, next_keys = decision.split_by_purpose(row_keys[depth])
    return distributions.sample(next_keys, probs)

  return decide(draw, draft, target_probs, tree=tree)


def greedy_walk(
  row_keys: Array, draft: Draft, target_probs: Array, *, tree: Tree
) -> Verification:
  """Walks as `target_sample_walk`, along the target's argmax: its own greedy
  decoding, token for token. Keys are not read."""
  del row_keys
  draw = lambda depth, probs: arrays.argmax(probs)
  # One-hot distributions make every entry of `accept_probs` 0 or 1.
  probs = logits.one_hot_of_best(target_probs)
  return decide(draw, draft, probs, tree=tree)


def decide(
  draw: DrawFn, draft: Draft, target_probs: Array, *, tree: Tree
) -> Verification:
  """Applies `target_sample_walk` to given draws."""
  decision.check_nodes(draft, tree)
  draft = decision.proposed(draft, target_probs.shape[-1], is_tree=True)
  node = jnp.zeros_like(draft.lengths)
  num_accepted = jnp.zeros_like(draft.lengths)
  next_token = draw(0, target_probs[:, 0])
  # Whether each node of the last level, and all above it, has the drawn tokens.
  # Tree (0, 0, 1), tokens 5 6 7: draw 5 gives [1, 0], then 7 gives [1].
  is_reached = (draft.lengths > 0)[:, None]
  parents, above = np.array(tree.parents, np.int32), 0
  levels = trees.levels(tree) if draft.tokens.shape[1] else []
  for depth, level in enumerate(levels, start=1):
    drafted = slice(level.start - 1, level.stop - 1)
    is_drawn = draft.tokens[:, drafted] == next_token[:, None]
    is_reached = is_reached[:, parents[drafted] - above] & is_drawn
    goes_on = jnp.any(is_reached, axis=1)
    first = level.start + jnp.argmax(is_reached, axis=1).astype(jnp.int32)
    node = jnp.where(goes_on, first, node)
    num_accepted = num_accepted + goes_on.astype(jnp.int32)
    drawn = draw(depth, decision.probs_at(target_probs, node))
    next_token = jnp.where(goes_on, drawn, next_token)
    above = level.start
  return Verification(
    num_accepted=num_accepted,
    next_token=next_token,
    accept_probs=_chances(draft, target_probs, tree),
    path=trees.path_of(tree, node),
  )


def _chances(draft: Draft, target_probs: Array, tree: Tree) -> Array:
  """Computes, float32 `[B, N]`, the chance that the walk, at a node's parent,
  goes on to any child: its distinct children's target probabilities, summed."""
  num_nodes, vocab_size = draft.tokens.shape[1], target_probs.shape[-1]
  parents = np.array(tree.parents[:num_nodes], np.int32)
  are_siblings = parents[:, None] == parents[None, :]
  # One gather of numbers, not of a distribution per node: in the flat `[B,
  # (N+1) V]`, token x after node n is entry n V + x.
  by_parent = target_probs.reshape(target_probs.shape[0], -1)
  is_token = draft.tokens != decision.NO_TOKEN
  entries = parents[None, :] * vocab_size + jnp.maximum(draft.tokens, 0)
  p = jnp.take_along_axis(by_parent, entries, axis=1)
  is_equal = draft.tokens[:, :, None] == draft.tokens[:, None, :]
  is_before = jnp.asarray(are_siblings & np.tri(num_nodes, k=-1, dtype=bool))
  is_repeated = jnp.any(is_equal & is_before[None], axis=2)
  p = jnp.where(is_token & ~is_repeated, p, 0.0)
  of_siblings = jnp.where(jnp.asarray(are_siblings)[None], p[:, None, :], 0.0)
  chances = jnp.minimum(jnp.sum(of_siblings, axis=2), 1.0)
  return jnp.where((draft.lengths > 0)[:, None], chances, 0.0)
