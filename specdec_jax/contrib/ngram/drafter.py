"""Bigram and unigram tables as drafters (Leviathan et al., Sec. 4.3)."""

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Context, Draft, Drafter, LogitsToProbsFn
from specdec_jax.drafters.stateless import stateless
from specdec_jax.sampling import distributions, keys, processors


@base.value
class NGramTable:
  """A bigram distribution with back-off to unigrams; order 1 has no bigrams.

  q(x | y) = `successor_probs[y, k]`, if x is `successors[y, k]` for some k,
  plus `backoff[y] * unigram[x]`.

  Attributes:
    unigram: float32 `[V]`, positive, normalised.
    successors: int32 `[V, K]`, the tokens seen most often after each token.
    successor_probs: float32 `[V, K]`, their discounted probabilities; 0 fills
      rows with fewer than K.
    backoff: float32 `[V]`, the mass left to unigrams.
    most_likely: int32 `[V]`, argmax of q(x | y).
  """

  unigram: Array
  successors: Array
  successor_probs: Array
  backoff: Array
  most_likely: Array


def ngram(
  table: NGramTable,
  *,
  gamma: int,
  logits_to_probs: LogitsToProbsFn | None = None,
) -> Drafter:
  """Drafts gamma tokens from a table of `contrib.ngram.ngram_counts.estimate`.

  `logits_to_probs` samples its log-probabilities. None takes the likeliest
  token each time: q is one-hot and never materialised. Raises ValueError if
  `gamma` is below 1.
  """

  def propose(row_keys: Array, context: Context) -> Draft:
    last = arrays.read_block(context.tokens, context.lengths - 1, 1)[:, 0]
    lengths = jnp.full_like(context.lengths, gamma)
    if logits_to_probs is None:
      tokens = _follow(table, last, gamma)
      return Draft(tokens=tokens, probs=None, lengths=lengths)

    def advance(carry, row_keys):
      token, text = carry
      logits = processors.after_text(jnp.log(next_probs(table, token)), text)
      probs = logits_to_probs(logits, context.sampling)
      token = distributions.sample(row_keys, probs)
      return (token, processors.followed_by(text, token)), (token, probs)

    step_keys = keys.split(row_keys, gamma)
    begin = last, processors.text_of(context)
    _, (tokens, probs) = jax.lax.scan(advance, begin, step_keys)
    return Draft(
      tokens=tokens.T, probs=jnp.moveaxis(probs, 0, 1), lengths=lengths
    )

  return stateless(gamma, propose)


def next_probs(table: NGramTable, previous: Array) -> Array:
  """Computes q(. | previous), float32 `[B, V]`, for int32 `[B]`."""
  backoff = jnp.take(table.backoff, previous, mode='clip')
  probs = backoff[:, None] * table.unigram[None, :]
  successors = jnp.take(table.successors, previous, axis=0, mode='clip')
  seen = jnp.take(table.successor_probs, previous, axis=0, mode='clip')
  add_row = lambda probs, ids, more: probs.at[ids].add(more)
  return jax.vmap(add_row)(probs, successors, seen)


def _follow(table: NGramTable, last: Array, gamma: int) -> Array:
  """Follows the likeliest tokens after `last[B]`: int32 `[B, gamma]`."""

  def advance(token, _):
    token = jnp.take(table.most_likely, token, mode='clip')
    return token, token

  _, tokens = jax.lax.scan(advance, last, length=gamma)  # [G, B]
  return tokens.T
