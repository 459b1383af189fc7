"""Prompt lookup: copies what followed an earlier occurrence of the last tokens
(Leviathan et al., Sec. 6, mention the idea)."""

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter, Prompt
from specdec_jax.drafters.stateless import check_gamma


def checked_min_ngram(max_ngram: int, min_ngram: int | None) -> int:
  """Returns `min_ngram` or its default; ValueError if lengths do not fit."""
  if min_ngram is None:
    min_ngram = min(2, max_ngram)
  if not 1 <= min_ngram <= max_ngram:
    raise ValueError(
      'n-gram lengths must satisfy 1 <= min_ngram <= max_ngram, got '
      f'{min_ngram} and {max_ngram}'
    )
  return min_ngram


def prompt_lookup(
  *, gamma: int, max_ngram: int = 3, min_ngram: int | None = None
) -> Drafter:
  """Copies what followed an earlier occurrence of the last tokens.

  Continues the longest suffix of the context, up to `max_ngram` tokens, that
  occurs earlier; of several occurrences, the one with the most to copy, up to
  gamma, and of those the latest. The encoder's input counts as earlier text.
  Proposes nothing where nothing matches. Runs on the device, without weights;
  q is one-hot and never materialised.

  Each token of `max_ngram` costs a pass over the context. Suffixes shorter than
  `min_ngram` are ignored; None means 2, or `max_ngram` if that is 1, since one
  matching token predicts little. Raises ValueError if `gamma` or an n-gram
  length is below 1, or `min_ngram` above `max_ngram`.
  """
  check_gamma(gamma)
  min_ngram = checked_min_ngram(max_ngram, min_ngram)

  def propose(
    params: Arrays, row_keys: Array, context: Context, source: tuple[Array, ...]
  ) -> tuple[Draft, tuple[Array, ...]]:
    text = text_of(source, context)
    sizes = match_sizes(text, max_ngram)
    starts, is_found = best_match(sizes, text.lengths, gamma, min_ngram)
    available = jnp.where(is_found, text.lengths - starts, 0)
    draft = Draft(
      tokens=arrays.read_block(text.tokens, starts, gamma),
      probs=None,
      lengths=jnp.minimum(available, gamma),
    )
    return draft, source

  return Drafter(gamma, source_of, propose, may_abstain=True)


def source_of(
  params: Arrays, prompt: Prompt, max_len: int
) -> tuple[Array, ...]:
  """Keeps the encoder's tokens `[B, E]`, if any, as a `Drafter.init`."""
  return () if prompt.encoder_tokens is None else (prompt.encoder_tokens,)


def text_of(source: tuple[Array, ...], context: Context) -> Context:
  """Puts the context behind the encoder's tokens of `source_of`."""
  if not source:
    return context
  # source [5, 6, 0], whose 0 is padding, and context [1, 7] -> [5, 6, 1, 7]
  starts = jnp.sum(source[0] != 0, axis=1, dtype=jnp.int32)
  buffer = jnp.pad(source[0], ((0, 0), (0, context.tokens.shape[1])))
  return Context(
    tokens=arrays.write_block(buffer, context.tokens, starts, context.lengths),
    lengths=starts + context.lengths,
  )


def match_sizes(context: Context, max_ngram: int) -> Array:
  """Counts how many tokens ending at each position match the end of the text:
  int32 `[B, S]`, 0 to `max_ngram`, and 0 from the last position on."""
  # [1, 2, 3, 1, 2] ends in 1, 2, as it does at position 1 -> [0, 2, 0, 0, 0]
  tokens, lengths = context.tokens, context.lengths
  num_positions = tokens.shape[1]
  positions = jnp.arange(num_positions, dtype=jnp.int32)[None, :]
  num_compared = min(max_ngram, num_positions)
  padded = jnp.pad(tokens, ((0, 0), (num_compared, 0)))

  def compare(carry: tuple[Array, Array], back: Array):
    run, sizes = carry
    suffix = arrays.read_block(tokens, lengths - 1 - back, 1)
    shifted = jax.lax.dynamic_slice_in_dim(
      padded, num_compared - back, num_positions, axis=1
    )
    run = run & (shifted == suffix) & (positions >= back)  # from the end back
    return (run, sizes + run.astype(jnp.int32)), None

  run = positions < lengths[:, None] - 1  # the suffix itself is no match
  begin = run, jnp.zeros(tokens.shape, jnp.int32)
  backs = jnp.arange(num_compared, dtype=jnp.int32)
  (_, sizes), _ = jax.lax.scan(compare, begin, backs, unroll=8)
  return sizes


def best_match(
  sizes: Array, lengths: Array, gamma: int, min_ngram: int
) -> tuple[Array, Array]:
  """Finds where the continuation of the best match starts, int32 `[B]`, and
  whether there is one, bool `[B]`."""
  positions = jnp.arange(sizes.shape[1], dtype=jnp.int32)[None, :]
  room = jnp.clip(lengths[:, None] - 1 - positions, 0, gamma)
  is_best = sizes >= min_ngram
  # Longest match, then most to copy, then latest, in three passes: combined in
  # one integer they would overflow.
  for values in (sizes, room, positions):
    values = jnp.where(is_best, values, -1)
    best = jnp.max(values, axis=1, keepdims=True)
    is_best = is_best & (values == best)
  return best[:, 0] + 1, best[:, 0] >= 0  # -1 if no position is left
