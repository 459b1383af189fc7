"""Traversal verification of a draft tree (Weng et al., arXiv 2505.12398)."""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax import arrays, trees
from specdec_jax.base import Array, Draft, Tree, Verification
from specdec_jax.sampling import distributions
from specdec_jax.verification import decision
from specdec_jax.verification.decision import Decision, Threshold


def traversal(
  row_keys: Array, draft: Draft, target_probs: Array, *, tree: Tree
) -> Verification:
  """Tests nodes depth-first, leaves before their parents, and accepts the path
  to the first that passes.

  https://arxiv.org/abs/2505.12398: lossless for siblings drawn with or without
  replacement; accepts more tokens in expectation than rejecting from the root
  downwards, and equals `block_verification` on a chain. Each node costs a few
  passes over V.

  A `base.VerifyFn` for trees of one shape. Of the keys `[D+1, B]` it uses those
  of the committed length. Raises ValueError if the draft has another number of
  nodes.
  """
  decide_fn = functools.partial(decide, tree=tree)
  return decision.verify(decide_fn, row_keys[0], draft, target_probs)


def decide(
  uniforms: Array, draft: Draft, target_probs: Array, *, tree: Tree
) -> Decision:
  """Applies the rule to given uniform draws, float32 `[B, N]`, one per node."""
  decision.check_nodes(draft, tree)
  draft = decision.proposed(draft, target_probs.shape[-1], is_tree=True)
  accepted = jnp.zeros_like(draft.lengths)
  next_probs = target_probs[:, 0]
  accept_probs = jnp.zeros(draft.tokens.shape, jnp.float32)
  if draft.tokens.shape[1]:
    is_drafted = draft.lengths > 0
    tests = _tests(draft, target_probs, tree)
    root = tests.pop(0)
    next_probs = jnp.where(is_drafted[:, None], root.probs, next_probs)
    # Backwards, so that the first test that passes overwrites later ones. Tree
    # (0, 0, 1) is tested in the order 3, 1, 2.
    for node, test in reversed(tests.items()):
      passes = is_drafted & test.threshold.passes(uniforms[:, node - 1])
      accepted = jnp.where(passes, node, accepted)
      next_probs = jnp.where(passes[:, None], test.probs, next_probs)
    thresholds = [tests[node].threshold.value() for node in sorted(tests)]
    accept_probs = jnp.where(
      is_drafted[:, None], jnp.stack(thresholds, axis=1), 0.0
    )
  path = trees.path_of(tree, accepted)
  return Decision(
    num_accepted=jnp.sum((path > 0).astype(jnp.int32), axis=1, dtype=jnp.int32),
    next_probs=next_probs,
    accept_probs=accept_probs,
    path=path,
  )


class _Test(NamedTuple):
  """The threshold `[B]` of a node once all nodes below it failed, and the
  distribution `[B, V]` of the next token if it passes."""

  threshold: Threshold
  probs: Array


def _tests(draft: Draft, target_probs: Array, tree: Tree) -> dict[int, _Test]:
  """Makes the tests of all nodes, depth-first and children before parents, with
  the root's, which needs no draw, in front."""
  drafted = decision.drafted_probs(draft)
  is_token = draft.tokens != decision.NO_TOKEN
  children: dict[int, list[int]] = {}
  for node, parent in enumerate(tree.parents, start=1):
    children.setdefault(parent, []).append(node)
  tests: dict[int, _Test] = {}

  def visit(node: int, weight: Array) -> None:
    """Tests a subtree; the path to its root has `block`'s weight p_i, `[B]`."""
    probs = target_probs[:, node]
    threshold = Threshold(weight, jnp.ones_like(weight))
    is_nan = jnp.zeros(weight.shape, jnp.bool_)
    for child in children.get(node, []):
      p = arrays.pick(probs, draft.tokens[:, child - 1])
      # What is no token has probability 0: it is not accepted, nor is what is
      # below, and its elder and younger siblings are tested as without it.
      p = jnp.where(is_token[:, child - 1], p, 0.0)
      q = jnp.where(is_token[:, child - 1], drafted[:, child - 1], 0.0)
      # A path ends at the first NaN in P or Q; what precedes is judged alone.
      is_nan = is_nan | jnp.isnan(p) | jnp.isnan(q)
      ratio = jnp.where(q == 0, 0.0, p / jnp.where(q == 0, 1.0, q))
      ratio = jnp.where(is_nan, 0.0, ratio)
      visit(child, jnp.minimum(weight * ratio, 1.0))
      # What is left of the node once all below this child failed: weight 1 with
      # P = [.6, .4], less Q = [.9, .1] of the child, leaves [0, .3].
      left = _without(weight[:, None] * probs, draft, child)
      mass = jnp.sum(left, axis=-1)
      threshold = Threshold(
        jnp.where(is_nan, threshold.numerator, mass),
        jnp.where(is_nan, threshold.denominator, mass + (1.0 - weight)),
      )
      probs = distributions.normalize(left, probs)
      weight = threshold.value()
    tests[node] = _Test(threshold, probs)

  visit(0, jnp.ones(target_probs.shape[0], jnp.float32))
  return {node: tests[node] for node in (0, *tests)}


def _without(weights: Array, draft: Draft, node: int) -> Array:
  """Computes max(0, weights - q), q being a node's distribution; cf.
  `decision.subtract_draft`, whose position differs by row."""
  if draft.probs is not None:
    is_token = draft.tokens[:, node - 1 : node] != decision.NO_TOKEN
    probs = jnp.where(is_token, draft.probs[:, node - 1], 0.0)
    return jnp.maximum(weights - probs, 0.0)
  ids = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, :]
  return jnp.where(ids == draft.tokens[:, node - 1 : node], 0.0, weights)
