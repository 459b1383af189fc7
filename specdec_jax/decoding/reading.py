"""Prefilling from the caches of an earlier decode: the next turn of a
conversation.

Only the new part of the text is fed, block by block, in one compiled program
for all lengths.
"""

import functools

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context, Params
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeState

# Tokens per block, unless the drafter limits it: on a CPU, wider blocks cost as
# much per token.
_WIDTH = 32


def read_on(
  params: Params,
  rng_key: Array,
  prompt: base.Prompt,
  state: DecodeState,
  *,
  method: Method,
) -> tuple[DecodeState, Array]:
  """Prefills as `speculative.init`, from the caches of `state`.

  The prompt, of a decoder-only model, is the whole text, as wide as the buffer
  of `state`, which may be at any point of its decode. The prefix that a row
  shares with `state` is not fed again, except up to `method.depth + 1` tokens
  that a drafter with a cache has not read yet. The target is rewound to the end
  of the prefix, possibly beyond its last call, as is possible with a KV cache,
  but not with a recurrent network.

  Returns the new state, and the number of positions that were fed, int32 `[B]`,
  a multiple of the block width. Raises ValueError for another width.
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
  # Of 75 tokens, of which 5 are in the cache, 5 to 73 are fed, in ceil(69 / 32)
  # = 3 blocks: from 5, 37 and, to end with the text, 42 rather than 69.
  counts = -(-jnp.maximum(lengths - 1 - starts, 0) // width)
  feed = functools.partial(_feed, params, prompt, starts, width, method)
  cache, drafter_state = jax.lax.fori_loop(
    0, jnp.max(counts), feed, (state.target_cache, state.drafter_state)
  )
  state = state_lib.init(
    rng_key,
    prompt,
    method.target.rewind(cache, lengths - 1),
    drafter_state,
    gamma=method.depth,
    max_len=max_len,
  )
  return state, counts * width


def grown(old: DecodeState, larger: DecodeState) -> DecodeState:
  """Copies `old` into the buffers of `larger`, a state of the same rows with
  more positions; entries keep their indices."""

  def put(new: Array, array: Array) -> Array:
    if new.shape == array.shape:
      return array
    return jax.lax.dynamic_update_slice(new, array, (0,) * array.ndim)

  return jax.tree.map(put, larger, old)


def block_width(method: Method) -> int:
  """Returns the number of tokens to feed at a time; for a drafter that reads
  the target's features, the number of tokens of which these are stored."""
  return method.depth + 1 if method.drafter.reads_target_cache else _WIDTH


def _first_unread(
  prompt: base.Prompt, state: DecodeState, method: Method
) -> Array:
  """Returns the first position to feed, int32 `[B]`."""
  held = state.context
  shorter = jnp.minimum(prompt.decoder_lengths, held.lengths)
  is_same = prompt.decoder_tokens == held.tokens
  is_held = arrays.is_within(shorter, is_same.shape[1])
  # The target's cache lacks the pending token; a drafter's cache may end where
  # the last iteration began (invariants 1, 4 and 5).
  lag = 1 if method.drafter.read is None else method.depth + 2
  num_shared = jnp.minimum(arrays.count_leading(is_same & is_held), shorter)
  if method.drafter.reads_target_cache:  # Entry t has read token t + 1.
    num_shared = jnp.minimum(num_shared, prompt.decoder_lengths - 1) - 1
  return jnp.maximum(jnp.minimum(num_shared, held.lengths - lag), 0)


def _feed(
  params: Params,
  prompt: base.Prompt,
  starts: Array,
  width: int,
  method: Method,
  i: Array,
  caches: tuple[Arrays, Arrays],
) -> tuple[Arrays, Arrays]:
  """Feeds block i of every row to the target and to the drafter."""
  cache, drafter_state = caches
  target, drafter = method.target, method.drafter
  # A row with fewer blocks feeds its last one again.
  ends = prompt.decoder_lengths - 1
  starts = jnp.maximum(jnp.minimum(starts + i * width, ends - width), 0)
  block = arrays.read_block(prompt.decoder_tokens, starts, width)
  cache = target.rewind(cache, starts)
  at = jnp.zeros_like(starts)  # logits are not used: project one position
  _, cache = target.extend(params.target, block, cache, at=at)
  if drafter.read is not None:
    # The last token of a context is pending: it is not among those fed.
    lengths = jnp.minimum(starts + width, ends) + 1
    context = Context(tokens=prompt.decoder_tokens, lengths=lengths)
    seen = (cache,) if drafter.reads_target_cache else ()
    drafter_state = drafter.read(
      params.drafter, context, drafter_state, *seen, width=width
    )
  return cache, drafter_state
