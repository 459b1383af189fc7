"""The target-sample walk over a draft tree (EAGLE-2, arXiv 2406.16858)."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, distributions, logits, trees
from specdec_jax.base import Array, Draft, Tree, Verification
from specdec_jax.verification import decision

# `(depth, probs[B, V]) -> tokens[B]`: what the target says after nodes of that
# depth, of which these are its distributions.
DrawFn = Callable[[int, Array], Array]


def target_sample_walk(
  row_keys: Array, draft: Draft, target_probs: Array, *, tree: Tree
) -> Verification:
  """Draws from the target at each node, and goes on while a child has the
  token that was drawn.

  The draw at depth d is plain decoding's at that committed length, so that the
  tokens are those of plain decoding, sampled ones included, whatever was
  drafted (https://arxiv.org/abs/2408.07978). `draft.probs` is not read. Of
  equal siblings any may be the one to go on from: the deepest node counts whose
  tokens were all drawn.

  A `base.VerifyFn` for trees of one shape; ValueError if the draft has another
  number of nodes.
  """

  def draw(depth: int, probs: Array) -> Array:
    _, next_keys = decision.split_by_purpose(row_keys[depth])
    return distributions.sample(next_keys, probs)

  return decide(draw, draft, target_probs, tree=tree)


def greedy_walk(
  row_keys: Array, draft: Draft, target_probs: Array, *, tree: Tree
) -> Verification:
  """`target_sample_walk` along the target's argmax: its own greedy decoding,
  token for token. Nothing is drawn, and keys are not read."""
  del row_keys
  draw = lambda depth, probs: arrays.argmax(probs)
  # With one-hot distributions the chances are 0 or 1.
  probs = logits.one_hot_of_best(target_probs)
  return decide(draw, draft, probs, tree=tree)


def decide(
  draw: DrawFn, draft: Draft, target_probs: Array, *, tree: Tree
) -> Verification:
  """`target_sample_walk` for given draws."""
  decision.check_nodes(draft, tree)
  node = jnp.zeros_like(draft.lengths)
  num_accepted = jnp.zeros_like(draft.lengths)
  next_token = draw(0, target_probs[:, 0])
  # Which nodes of the last level have been drawn, with all above them.
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
  """float32 `[B, N]`: the chance that the walk, once at a node's parent, goes
  on to it or to one of its siblings."""
  num_nodes, vocab_size = draft.tokens.shape[1], target_probs.shape[-1]
  parents = np.array(tree.parents[:num_nodes], np.int32)
  are_siblings = parents[:, None] == parents[None, :]
  # One gather of single numbers, not of a distribution for each node.
  by_parent = target_probs.reshape(target_probs.shape[0], -1)
  p = jnp.take_along_axis(
    by_parent, parents[None, :] * vocab_size + draft.tokens, axis=1
  )
  is_equal = draft.tokens[:, :, None] == draft.tokens[:, None, :]
  is_before = jnp.asarray(are_siblings & np.tri(num_nodes, k=-1, dtype=bool))
  is_repeated = jnp.any(is_equal & is_before[None], axis=2)
  p = jnp.where(is_repeated, 0.0, p)
  of_siblings = jnp.where(jnp.asarray(are_siblings)[None], p[:, None, :], 0.0)
  chances = jnp.minimum(jnp.sum(of_siblings, axis=2), 1.0)
  return jnp.where((draft.lengths > 0)[:, None], chances, 0.0)
