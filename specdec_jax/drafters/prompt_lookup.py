"""Copying from the context: what followed the last tokens when they stood there
before (prompt lookup; Leviathan et al., Sec. 6, name the idea)."""

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter, Prompt
from specdec_jax.drafters.stateless import check_gamma


def checked_min_ngram(max_ngram: int, min_ngram: int | None) -> int:
  """`min_ngram`, or the default; ValueError unless the lengths fit together."""
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

  The longest suffix of the context, of `max_ngram` tokens at most, that occurs
  earlier is continued; of several occurrences the one with the most to copy, up
  to gamma, and of those the latest. What an encoder reads, the prompt of an
  encoder-decoder, counts as earlier text. It runs on the device, has no
  weights, and proposes nothing where nothing matches. Its distribution is
  one-hot and never materialised.

  Each token of `max_ngram` takes a pass over the context. No suffix shorter
  than `min_ngram` is trusted; None is for 2, or for `max_ngram` if that is
  less: what follows one token alone is seldom what follows now. Raises
  ValueError if `gamma` or an n-gram length is less than 1, or the shortest is
  the longer one.
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
  """As `Drafter.init`: the encoder's tokens, `[B, E]`, if there are any."""
  return () if prompt.encoder_tokens is None else (prompt.encoder_tokens,)


def text_of(source: tuple[Array, ...], context: Context) -> Context:
  """The context, behind what `source_of` gave, whose padding is id 0."""
  if not source:
    return context
  starts = jnp.sum(source[0] != 0, axis=1, dtype=jnp.int32)
  buffer = jnp.pad(source[0], ((0, 0), (0, context.tokens.shape[1])))
  return Context(
    tokens=arrays.write_block(buffer, context.tokens, starts, context.lengths),
    lengths=starts + context.lengths,
  )


def match_sizes(context: Context, max_ngram: int) -> Array:
  """How many tokens up to and including each position equal the context's last:
  int32 `[B, S]`, 0 to `max_ngram`, and 0 at and beyond the last position."""
  # Of [1, 2, 3, 1, 2], the last being 1, 2: [0, 2, 0, 0, 0].
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
    run = run & (shifted == suffix) & (positions >= back)
    return (run, sizes + run.astype(jnp.int32)), None

  run = positions < lengths[:, None] - 1
  (_, sizes), _ = jax.lax.scan(
    compare,
    (run, jnp.zeros(tokens.shape, jnp.int32)),
    jnp.arange(num_compared, dtype=jnp.int32),
    unroll=8,
  )
  return sizes


def best_match(
  sizes: Array, lengths: Array, gamma: int, min_ngram: int
) -> tuple[Array, Array]:
  """Where the continuation of the best match starts, int32 `[B]`, and whether
  there is one, bool `[B]`."""
  num_positions = sizes.shape[1]
  positions = jnp.arange(num_positions, dtype=jnp.int32)[None, :]
  room = jnp.clip(lengths[:, None] - 1 - positions, 0, gamma)
  is_best = sizes >= min_ngram
  best = sizes
  # One after the other: as one number they would overflow.
  for values in (sizes, room, positions):
    values = jnp.where(is_best, values, -1)
    best = jnp.max(values, axis=1, keepdims=True)
    is_best = is_best & (values == best)
  return best[:, 0] + 1, best[:, 0] >= 0
