"""Copying from earlier outputs as well as from the context: suffix decoding
(https://arxiv.org/abs/2411.04975), with a sorted array in place of a tree."""

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Context, Draft, Drafter
from specdec_jax.drafters.prompt_lookup import (
  best_match,
  checked_min_ngram,
  match_sizes,
  source_of,
  text_of,
)
from specdec_jax.drafters.stateless import check_gamma

MAX_MATCH = 16  # Tokens of a suffix that are compared: a power of two.
_GROWTH = 4  # Drafted tokens for each that matches.
_NUM_VOTERS = 16  # Places in the pool that are asked what follows.
# No tokens: between texts of the pool, and in front of a context.
APART, _BEFORE = -1, -2


@base.value
class Pool:
  """Texts to copy from; see `data.text_pool`.

  Attributes:
    tokens: int32 `[N]`, the latest text last, -1 after each and before all.
    order: int32 `[N]`, positions sorted by the tokens that end there, the last
      of which is compared first.
  """

  tokens: Array
  order: Array


def suffix(*, gamma: int, min_ngram: int = 2) -> Drafter:
  """Copies what followed the longest suffix of the context where it stood
  before: in the context itself, or in its params, a `Pool`.

  The longer match is followed, the context's own, round and round, if both are
  as long; what an encoder reads counts as context. Of the pool's places with
  the longest match the one is followed that agrees most with the others. A
  draft is one-hot, of up to `_GROWTH` tokens for each that matches, none for
  fewer than `min_ngram`. ValueError if an argument is out of range.
  """
  check_gamma(gamma)
  checked_min_ngram(MAX_MATCH, min_ngram)

  def propose(pool: Pool, row_keys: Array, context: Context, source):
    text = text_of(source, context)
    own, size = _from_context(text, gamma, min_ngram)
    found, size_there = _from_pool(pool, text, gamma)
    tokens = jnp.where((size_there > size)[:, None], found, own)
    size = jnp.maximum(size, size_there)
    lengths = jnp.minimum(arrays.count_leading(tokens >= 0), _GROWTH * size)
    lengths = jnp.where(size >= min_ngram, lengths, 0)
    tokens = jnp.maximum(tokens, 0)
    return Draft(tokens=tokens, probs=None, lengths=lengths), source

  return Drafter(gamma, source_of, propose, may_abstain=True)


def _from_context(text: Context, gamma: int, min_ngram: int):
  """What follows the longest match, int32 `[B, G]`, and its size, `[B]`."""
  sizes = match_sizes(text, MAX_MATCH)
  starts, _ = best_match(sizes, text.lengths, gamma, min_ngram)
  # Of a text that ends in 5 6 7, all of them copied: 5 6 7 5 6 7.
  period = jnp.maximum(text.lengths - starts, 1)[:, None]
  steps = jnp.arange(gamma, dtype=jnp.int32)[None] % period
  return arrays.take(text.tokens, starts[:, None] + steps), jnp.max(sizes, 1)


def _from_pool(pool: Pool, text: Context, gamma: int):
  """As `_from_context`, of the pool; -1 from where its text ends."""
  num_places, lengths = pool.order.size, text.lengths[:, None]
  back = jnp.arange(MAX_MATCH, dtype=jnp.int32)[None]
  last = arrays.take(text.tokens, lengths - 1 - back)
  last = jnp.where(back < lengths, last, _BEFORE)[:, None]

  def read(places: Array, steps: Array) -> Array:
    ends = jnp.take(pool.order, places, mode='clip')[..., None]
    return jnp.take(pool.tokens, ends + steps[None], mode='clip')

  def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = bounds
    middle = (low + high) // 2
    words = read(middle, -back)
    first = arrays.argmax((words != last).astype(jnp.int32))
    is_high = arrays.pick(words > last, first) | (low >= high)
    low = jnp.where(is_high, low, middle + 1)
    return low, jnp.where(is_high, middle, high)

  # The place behind the last one whose words do not come after the text's.
  bounds = jnp.zeros_like(lengths), jnp.full_like(lengths, num_places)
  place, _ = jax.lax.fori_loop(0, num_places.bit_length(), halve, bounds)
  near = jnp.arange(_NUM_VOTERS, dtype=jnp.int32) - _NUM_VOTERS // 2
  places = place + near[None]
  sizes = arrays.count_leading(read(places, -back) == last)
  sizes = jnp.where((places >= 0) & (places < num_places), sizes, -1)
  is_voter = sizes == jnp.max(sizes, axis=1, keepdims=True)
  following = read(places, jnp.arange(1, gamma + 1, dtype=jnp.int32)[None])
  # How much of what follows at one place another one has, too.
  shared = arrays.count_leading(following[:, :, None] == following[:, None])
  votes = jnp.sum(jnp.where(is_voter[:, None], shared, 0), 2, jnp.int32)
  chosen = arrays.argmax(jnp.where(is_voter, votes, -1))
  return arrays.take(following, chosen[:, None])[:, 0], jnp.max(sizes, axis=1)
