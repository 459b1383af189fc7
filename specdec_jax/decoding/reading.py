"""More text behind what rows hold already: the next turn of a conversation.

A prefill begins with an empty cache. These functions begin with the caches of
an earlier decode and feed what is new of the text, a block at a time, in one
compiled program whatever its length.
"""

import functools

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context, Params
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeState

# Tokens of a block, where the drafter does not say how many: on a CPU, wider
# ones cost as much per token.
_WIDTH = 32


def read_on(
  params: Params,
  rng_key: Array,
  prompt: base.Prompt,
  state: DecodeState,
  *,
  method: Method,
) -> tuple[DecodeState, Array]:
  """What `speculative.init` makes of a prompt, with the caches of `state`.

  What a row's prompt and `state` have in common is not fed again, but for the
  tokens that a drafter with a memory has not taken in yet, `method.depth + 1`
  at most. The target is rewound to there, which may be further back than the
  last call that `LanguageModel.rewind` promises: every network with a cache of
  keys and values can do so, a recurrent one cannot.

  The prompt, of a decoder-only model, is the whole text, as wide as the buffer
  of `state`, which is at any point of its decode. Returns the new state, and
  int32 `[B]`, how many positions of each row were fed: what is new, in whole
  blocks.
  """
  max_len = state.context.tokens.shape[1]
  prompt = state_lib.checked(prompt, max_len)
  tokens, lengths = prompt.decoder_tokens, prompt.decoder_lengths
  if tokens.shape != state.context.tokens.shape:
    raise ValueError(
      f'a prompt of shape {list(tokens.shape)} does not fit in a buffer of '
      f'shape {list(state.context.tokens.shape)}'
    )
  width = min(block_width(method), max_len)
  starts = _first_unread(prompt, state, method)
  # Of 70 tokens after 5 that are known, in blocks of 32: from 5, 37 and 69 on,
  # were it not that the last one is pushed back to end with the text, at 42.
  counts = -(-jnp.maximum(lengths - 1 - starts, 0) // width)
  feed = functools.partial(_feed, params, prompt, starts, width, method)
  cache, own = jax.lax.fori_loop(
    0, jnp.max(counts), feed, (state.target_cache, state.drafter_state)
  )
  state = state_lib.init(
    rng_key,
    prompt,
    method.target.rewind(cache, lengths - 1),
    own,
    gamma=method.depth,
    max_len=max_len,
  )
  return state, counts * width


def grown(old: DecodeState, larger: DecodeState) -> DecodeState:
  """`old` in the buffers of `larger`, a state of the same rows with more
  positions; each array's entries keep their places."""

  def put(new: Array, array: Array) -> Array:
    if new.shape == array.shape:
      return array
    return jax.lax.dynamic_update_slice(new, array, (0,) * array.ndim)

  return jax.tree.map(put, larger, old)


def block_width(method: Method) -> int:
  """How many tokens are fed at once: no more than a target keeps features of,
  for a drafter that reads these."""
  return method.depth + 1 if method.drafter.reads_target_cache else _WIDTH


def _first_unread(
  prompt: base.Prompt, state: DecodeState, method: Method
) -> Array:
  """The first position, int32 `[B]`, that is to be fed."""
  held = state.context
  shorter = jnp.minimum(prompt.decoder_lengths, held.lengths)
  is_same = prompt.decoder_tokens == held.tokens
  is_held = arrays.is_within(shorter, is_same.shape[1])
  # The target's cache lacks the pending token; what a drafter remembers may end
  # where the last iteration began (invariants 1, 4 and 5).
  lag = 1 if method.drafter.read is None else method.depth + 2
  known = jnp.minimum(arrays.count_leading(is_same & is_held), shorter)
  return jnp.maximum(jnp.minimum(known, held.lengths - lag), 0)


def _feed(
  params: Params,
  prompt: base.Prompt,
  starts: Array,
  width: int,
  method: Method,
  i: Array,
  caches: tuple[Arrays, Arrays],
) -> tuple[Arrays, Arrays]:
  """Feeds block i of each row to the target, and tells the drafter."""
  cache, own = caches
  target, drafter = method.target, method.drafter
  # A row that has no block i reads its last one again.
  ends = prompt.decoder_lengths - 1
  starts = jnp.maximum(jnp.minimum(starts + i * width, ends - width), 0)
  block = arrays.read_block(prompt.decoder_tokens, starts, width)
  cache = target.rewind(cache, starts)
  at = jnp.zeros_like(starts)
  _, cache = target.extend(params.target, block, cache, at=at)
  if drafter.read is not None:
    # What was fed is all of the text but the last token, as everywhere.
    lengths = jnp.minimum(starts + width, ends) + 1
    context = Context(tokens=prompt.decoder_tokens, lengths=lengths)
    seen = (cache,) if drafter.reads_target_cache else ()
    own = drafter.read(params.drafter, context, own, *seen, width=width)
  return cache, own
