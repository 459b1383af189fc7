"""Logits of texts that must match a grammar, and what it lets a drafter know.

A grammar is a deterministic automaton over the vocabulary's tokens (Willard and
Louf, arXiv 2307.09702), made by `text.grammars`. In a block each position has
the state of the committed text and the drafts before it, in a tree of those
above it; what may not follow is ruled out, as plain decoding would.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Draft, Grammar, Tree


def after_drafts(
  logits: Array, grammar: Grammar | None, drafted: Array, depths: Array
) -> Array:
  """Masks logits `[B, T, V]` of tokens that the grammar does not allow after
  the context and the first `depths[t]` of int32 `[B, T, D]` drafted tokens."""
  if grammar is None:
    return logits
  return _masked(logits, grammar, _behind(grammar, drafted, depths[None]))


def _masked(logits: Array, grammar: Grammar, states: Array) -> Array:
  """Logits `[B, T, V]` of what follows states int32 `[B, T]`."""
  # After a forbidden draft nothing counts: all is allowed.
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
  states = _behind(grammar, tokens[:, None], counts[:, None])
  return dataclasses.replace(grammar, states=states[:, 0])


def guided(draft: Draft, grammar: Grammar | None, tree: Tree | None) -> Draft:
  """Extends a chain by the grammar's guesses where its drafter has nothing to
  say, or copies what may not come.

  Where one token alone may come, p is one-hot and the guess is accepted.
  Whether position i is a guess depends on drafted tokens before it, but never
  on token i if the draft has probabilities: q would ignore it.

  Without a grammar, and for trees, the draft stays as it is: a drafter of
  masked probabilities finds a lone token anyway.
  """
  if grammar is None or tree is not None or not draft.tokens.shape[1]:
    return draft
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


def _behind(grammar: Grammar, tokens: Array, counts: Array) -> Array:
  """Finds the states int32 `[B, T]` behind the first `counts`, int32 `[B or 1,
  T]`, of tokens int32 `[B, T, D]`."""
  states = jnp.broadcast_to(grammar.states[:, None], tokens.shape[:2])
  for i in range(tokens.shape[2]):
    behind = _step(grammar, states, tokens[:, :, i])
    states = jnp.where(i < counts, behind, states)
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
