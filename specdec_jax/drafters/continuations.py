"""Prompt lookup with several continuations at once, as a tree."""

import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter, Tree
from specdec_jax.drafters.prompt_lookup import (
  best_match,
  checked_min_ngram,
  match_sizes,
  source_of,
  text_of,
)
from specdec_jax.drafters.stateless import check_gamma


def tree_of_copies(gamma: int, num_continuations: int) -> Tree:
  """Returns the tree of chains from the root; ValueError as `continuations`.

  Three chains of two nodes are nodes 1, 2, 3 and, below them, 4, 5, 6: the
  parents are (0, 0, 0, 1, 2, 3).
  """
  check_gamma(gamma)
  if num_continuations < 1:
    raise ValueError(
      f'num_continuations must be at least 1, got {num_continuations}'
    )
  num_nodes = gamma * num_continuations
  check_gamma(num_nodes)
  firsts = (0,) * num_continuations
  return Tree(parents=(*firsts, *range(1, num_nodes - num_continuations + 1)))


def continuations(
  *,
  gamma: int,
  num_continuations: int,
  max_ngram: int = 3,
  min_ngram: int | None = None,
) -> Drafter:
  """Proposes chains of gamma tokens from the root, each a copy.

  The first continues the match of `prompt_lookup`, and every further one the
  best match that continues with another token; missing ones repeat the first. A
  copy that reaches the end of the text starts over, so that all have gamma
  tokens. A row without a match has no draft. N-gram lengths and errors are
  those of `prompt_lookup`.
  """
  tree = tree_of_copies(gamma, num_continuations)
  num_nodes = len(tree.parents)
  shortest = checked_min_ngram(max_ngram, min_ngram)

  def propose(
    params: Arrays, row_keys: Array, context: Context, source: tuple[Array, ...]
  ) -> tuple[Draft, tuple[Array, ...]]:
    text = text_of(source, context)
    tokens, lengths = text.tokens, text.lengths
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    sizes = match_sizes(text, max_ngram)
    best, has_match = best_match(sizes, lengths, gamma, shortest)
    chain_starts = [best]
    for _ in range(num_continuations - 1):
      first = arrays.read_block(tokens, chain_starts[-1], 1)
      sizes = jnp.where(following == first, 0, sizes)
      starts, is_found = best_match(sizes, lengths, gamma, shortest)
      chain_starts.append(jnp.where(is_found, starts, best))
    all_starts = jnp.stack(chain_starts, axis=1)
    # A text of 9 copied from 7 has period 2: positions 7, 8, 7, 8.
    period = lengths[:, None] - all_starts
    steps = jnp.arange(gamma, dtype=jnp.int32)
    copied = all_starts[:, None] + steps[None, :, None] % period[:, None]
    # `[B, G, C]` flattened is in breadth-first order: depth 1 first.
    copied = copied.reshape(lengths.size, num_nodes)
    draft = Draft(
      tokens=jnp.take_along_axis(tokens, copied, axis=1),
      probs=None,
      lengths=jnp.where(has_match, num_nodes, 0).astype(jnp.int32),
    )
    return draft, source

  return Drafter(num_nodes, source_of, propose, may_abstain=True, tree=tree)
