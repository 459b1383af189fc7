"""Logits of texts that must match a grammar, and what it lets a drafter know.

A grammar is a deterministic automaton over the vocabulary's tokens (Willard and
Louf, arXiv 2307.09702), made by `text.grammars`. In a block each position has
the state of the committed text and the drafts before it, in a tree of those
above it; what may not follow is ruled out, as plain decoding would.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, trees
from specdec_jax.base import Array, Draft, Grammar, Tree


def after_drafts(
  logits: Array,
  grammar: Grammar,
  *tokens: Array,
  tree: Tree | None = None,
  first: int = 0,
) -> Array:
  """Logits `[B, T, V]`, -infinity where the grammar has no such token; the
  arguments are those of `processors.after_drafts`."""
  states = _along(grammar, tokens, tree)
  return _masked(logits, grammar, states[:, first : first + logits.shape[1]])


def _masked(logits: Array, grammar: Grammar, states: Array) -> Array:
  """Logits `[B, T, V]` of what follows states int32 `[B, T]`."""
  # Behind what may not be drafted nothing counts: there anything may come.
  may_come = (arrays.take(grammar.next, states) != 0) | (states == 0)[..., None]
  classes = grammar.classes[:, None, :].astype(jnp.int32)
  return jnp.where(
    jnp.take_along_axis(may_come, classes, axis=2, mode='clip'),
    logits,
    -jnp.inf,
  )


def followed_by(
  grammar: Grammar | None, tokens: Array, counts: Array
) -> Grammar | None:
  """The grammar behind `counts[b]` of the tokens int32 `[B, W]` of each row."""
  if grammar is None:
    return None
  states = arrays.pick(_along(grammar, (tokens,), None), counts)
  return dataclasses.replace(grammar, states=states)


def guided(draft: Draft, grammar: Grammar) -> Draft:
  """A chain that goes on with the grammar's guesses where a drafter has nothing
  to say, or copies what may not come.

  Where one token alone may come, p is one-hot and the guess is accepted.
  Whether position i is a guess depends on drafted tokens before it, but with
  probabilities never on the drafter's own token i, which q would not know.
  """
  states, is_own = grammar.states, jnp.ones_like(grammar.states, jnp.bool_)
  lengths, is_drafted = jnp.zeros_like(states), is_own
  tokens, guessed = [], []
  for i in range(draft.tokens.shape[1]):
    token = draft.tokens[:, i]
    is_own = is_own & (i < draft.lengths)
    if draft.probs is None:
      is_own = is_own & ((_step(grammar, states, token) != 0) | (states == 0))
    guess = arrays.pick(grammar.guesses, states)
    token = jnp.where(is_own, token, jnp.maximum(guess, 0))
    is_drafted = is_drafted & (is_own | (guess >= 0))
    lengths = lengths + is_drafted.astype(jnp.int32)
    states = _step(grammar, states, token)
    tokens.append(token)
    guessed.append(~is_own)
  probs = draft.probs
  chain = jnp.stack(tokens, axis=1)
  if probs is not None:
    one_hot = jax.nn.one_hot(chain, probs.shape[-1], dtype=probs.dtype)
    probs = jnp.where(jnp.stack(guessed, axis=1)[..., None], one_hot, probs)
  return Draft(tokens=chain, probs=probs, lengths=lengths)


def _along(
  grammar: Grammar, tokens: tuple[Array, ...], tree: Tree | None
) -> Array:
  """int32 `[B, N + 1]`: the states of the context and behind each of int32 `[B,
  N]` drafted tokens, of a chain or of the first nodes of a tree."""
  states = grammar.states[:, None]
  if not tokens:
    return states
  drafted = jnp.concatenate(tokens, axis=1)
  width = drafted.shape[1]
  if tree is None:
    tree = Tree(tuple(range(width)))
  # Of the tree (0, 0, 1) nodes 1 and 2 go on from the root, node 3 from node 1.
  for nodes in trees.levels(tree) if width else ():
    if nodes.stop - 1 > width:
      break
    own = slice(nodes.start - 1, nodes.stop - 1)
    before = jnp.take(states, np.array(tree.parents[own]), axis=1)
    behind = _step(grammar, before, drafted[:, own])
    states = jnp.concatenate([states, behind], axis=1)
  return states


def _step(grammar: Grammar, states: Array, tokens: Array) -> Array:
  """The states behind tokens, int32 `[B]` or `[B, N]`."""
  num_rows, _, num_classes = grammar.next.shape
  find = lambda table, places: jnp.take_along_axis(
    table, places.reshape(num_rows, -1), axis=1, mode='clip'
  ).astype(jnp.int32)
  classes = find(grammar.classes, tokens).reshape(states.shape)
  places = states * num_classes + classes
  return find(grammar.next.reshape(num_rows, -1), places).reshape(states.shape)
