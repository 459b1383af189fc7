"""Suffix decoding (https://arxiv.org/abs/2411.04975): copies from the context
and from earlier outputs, with a suffix array in place of a tree."""

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
_GROWTH = 4  # Drafted tokens per token that matches.
_NUM_VOTERS = 16  # Places of the pool that vote on what follows.
# Separators, which are not token ids: between texts of the pool, and before the
# start of a context.
APART, _BEFORE = -1, -2


@base.value
class Pool:
  """Texts to copy from; see `drafters.text_pool`.

  Attributes:
    tokens: int32 `[N]`, the latest text last; -1 at the start and after each.
    order: int32 `[N]`, positions sorted by the text up to and including them,
      read backwards. Of [-1, 5, 6, 5, -1]: 0 and 4 first, then 1, 3, then 2.
  """

  tokens: Array
  order: Array


def suffix(*, gamma: int, min_ngram: int = 2) -> Drafter:
  """Copies the continuation of an earlier occurrence of the longest suffix, in
  the context or in the drafter's params, a `Pool`.

  The longer match is copied, or the context's if both are equally long. In the
  context, which includes the encoder's input, a copy that reaches the end
  starts over. In the pool, the longest matches vote for the continuation that
  agrees most with theirs. A draft has up to `_GROWTH` tokens per matching
  token, and none for matches below `min_ngram`; q is one-hot. Raises ValueError
  if an argument is out of range.
  """
  check_gamma(gamma)
  checked_min_ngram(MAX_MATCH, min_ngram)

  def propose(pool: Pool, row_keys: Array, context: Context, source):
    text = text_of(source, context)
    context_copy, size = _from_context(text, gamma, min_ngram)
    pool_copy, pool_size = _from_pool(pool, text, gamma)
    is_in_pool = pool_size > size
    tokens = jnp.where(is_in_pool[:, None], pool_copy, context_copy)
    size = jnp.maximum(size, pool_size)
    lengths = jnp.minimum(arrays.count_leading(tokens >= 0), _GROWTH * size)
    lengths = jnp.where(size >= min_ngram, lengths, 0)
    tokens = jnp.maximum(tokens, 0)
    return Draft(tokens=tokens, probs=None, lengths=lengths), source

  return Drafter(gamma, source_of, propose, may_abstain=True)


def _from_context(text: Context, gamma: int, min_ngram: int):
  """Copies what follows the longest match in the context, int32 `[B, G]`; also
  returns the match's size, int32 `[B]`."""
  sizes = match_sizes(text, MAX_MATCH)
  starts, _ = best_match(sizes, text.lengths, gamma, min_ngram)
  # If all that is left to copy is 5 6 7: 5 6 7 5 6 7.
  period = jnp.maximum(text.lengths - starts, 1)[:, None]
  steps = jnp.arange(gamma, dtype=jnp.int32)[None] % period
  return arrays.take(text.tokens, starts[:, None] + steps), jnp.max(sizes, 1)


def _from_pool(pool: Pool, text: Context, gamma: int):
  """Copies from the pool as `_from_context`; -1 from where its text ends."""
  num_places, lengths = pool.order.size, text.lengths[:, None]
  back = jnp.arange(MAX_MATCH, dtype=jnp.int32)[None]
  last = arrays.take(text.tokens, lengths - 1 - back)
  last = jnp.where(back < lengths, last, _BEFORE)[:, None]  # read backwards

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

  # Binary search for the first place whose text sorts after the context: the
  # longest matches are next to it.
  bounds = jnp.zeros_like(lengths), jnp.full_like(lengths, num_places)
  place, _ = jax.lax.fori_loop(0, num_places.bit_length(), halve, bounds)
  near = jnp.arange(_NUM_VOTERS, dtype=jnp.int32) - _NUM_VOTERS // 2
  places = place + near[None]
  sizes = arrays.count_leading(read(places, -back) == last)
  sizes = jnp.where((places >= 0) & (places < num_places), sizes, -1)
  is_voter = sizes == jnp.max(sizes, axis=1, keepdims=True)
  following = read(places, jnp.arange(1, gamma + 1, dtype=jnp.int32)[None])
  # Continuations 789, 781, 723 share 3 2 1, 2 3 1, 1 1 3 tokens: votes 6, 6, 5.
  shared = arrays.count_leading(following[:, :, None] == following[:, None])
  votes = jnp.sum(jnp.where(is_voter[:, None], shared, 0), 2, jnp.int32)
  chosen = arrays.argmax(jnp.where(is_voter, votes, -1))
  return arrays.take(following, chosen[:, None])[:, 0], jnp.max(sizes, axis=1)
