"""Shapes of draft trees, and a drafter of trees whose distributions are those
of a table like the toy model's: it needs no cache."""

import functools

import jax
import jax.numpy as jnp

from specdec_jax import arrays, verification
from specdec_jax.base import Array, Draft, Drafter, Tree, VerifyFn
from specdec_jax.sampling import distributions, logits

# The first node has two children and the second one; the third depth has one.
BENT = Tree(parents=(0, 0, 1, 1, 2, 3))


def shape(*counts: int) -> Tree:
  """The tree in which all nodes of a depth have equally many children."""
  parents: list[int] = []
  level = [0]
  for count in counts:
    first = len(parents) + 1
    parents += [parent for parent in level for _ in range(count)]
    level = list(range(first, len(parents) + 1))
  return Tree(parents=tuple(parents))


def drafter(
  tree: Tree,
  *,
  is_sampled: bool,
  logits_to_probs=logits.standardize(),
  may_abstain: bool = False,
  deduplicates: bool = False,
) -> Drafter:
  """Drafts from a table of `toy.toy_params`, which are the drafter's params.

  Args:
    tree: the shape.
    is_sampled: siblings are drawn without replacement; else they are the
      likeliest tokens, and no probabilities are handed over.
    logits_to_probs: what is drawn from.
    may_abstain: no draft at every third committed length.
    deduplicates: draws siblings with replacement, and puts the likeliest other
      token in the place of one that is there already, which is wrong.
  """

  def propose(params, row_keys, context, state):
    last = arrays.read_block(context.tokens, context.lengths - 2, 2)
    vocab_size = params['table'].shape[-1]
    before = jnp.where(context.lengths > 1, last[:, 0], vocab_size)
    seen = {0: (before, last[:, 1])}
    left: dict[int, Array] = {}
    whole: dict[int, Array] = {}
    tokens, probs = [], []
    for node, parent in enumerate(tree.parents, start=1):
      if parent not in left:
        left[parent] = logits_to_probs(params['table'][seen[parent]])
        whole[parent] = left[parent]
      if is_sampled:
        keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, node)
        q = (whole if deduplicates else left)[parent]
        drawn = distributions.sample(keys, q)
        if deduplicates:
          is_new = arrays.pick(left[parent], drawn) > 0
          drawn = jnp.where(is_new, drawn, arrays.argmax(left[parent]))
      else:
        drawn = arrays.argmax(left[parent])
      tokens.append(drawn)
      probs.append((whole if deduplicates else left)[parent])
      left[parent] = without(left[parent], drawn)
      seen[node] = (seen[parent][1], drawn)
    lengths = jnp.full_like(context.lengths, len(tokens))
    if may_abstain:
      lengths = jnp.where(context.lengths % 3 == 0, 0, lengths)
    draft = Draft(
      tokens=jnp.stack(tokens, axis=1),
      probs=jnp.stack(probs, axis=1) if is_sampled else None,
      lengths=lengths,
    )
    return draft, state

  return Drafter(
    gamma=len(tree.parents),
    init=lambda params, prompt, max_len: (),
    propose=propose,
    may_abstain=may_abstain,
    tree=tree,
  )


def without(probs: Array, tokens: Array) -> Array:
  """Distributions `[B, V]` without tokens `[B]`; zeros if nothing is left."""
  ids = jnp.arange(probs.shape[-1], dtype=jnp.int32)[None, :]
  rest = jnp.where(ids == tokens[:, None], 0.0, probs)
  return distributions.normalize(rest, jnp.zeros_like(rest))


@functools.cache
def rule(name: str, tree: Tree) -> VerifyFn:
  """A rule of `verification` for the tree."""
  return functools.partial(getattr(verification, name), tree=tree)
