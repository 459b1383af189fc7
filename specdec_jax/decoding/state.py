"""The state of the decoding loops. EOS, length limits and NaN are handled in
`commit` and nowhere else."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, base
from specdec_jax.base import Array, Context, Draft, Prompt, Verification
from specdec_jax.decoding import statistics
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.sampling import keys

EosId = int | tuple[int, ...]


@base.value
class DecodeState:
  """Everything the next iteration needs.

  Attributes:
    context: tokens `[B, S]` and lengths `[B]` committed so far.
    log_probs: float32 `[B, S]`, of each committed token under the target's own
      softmax, before temperature, top-k and top-p; 0 for the prompt.
    done: bool `[B]`.
    has_nan: bool `[B]`: the row stopped because a model returned NaN logits;
      the tokens before them are committed.
    row_keys: threefry keys `[B]`.
    max_lengths: int32 `[B]`, the committed length at which a row is done.
    target_cache: the target's, of the whole context but its last token.
    drafter_state: the drafter's own.
    statistics: counters so far.
  """

  context: Context
  log_probs: Array
  done: Array
  has_nan: Array
  row_keys: Array
  max_lengths: Array
  target_cache: Any
  drafter_state: Any
  statistics: Statistics


@base.value
class DecodeOutput:
  """The decoded rows; fields as in `DecodeState`. `tokens`, int32 `[B, S]`,
  include the prompt and are 0 beyond `lengths`."""

  tokens: Array
  lengths: Array
  log_probs: Array
  done: Array
  has_nan: Array
  statistics: Statistics


def checked(prompt: Prompt, max_len: int) -> Prompt:
  """Returns the prompt in 32-bit types, with `jax_enable_x64` too. Raises
  ValueError if it has no rows or exceeds `max_len`."""
  batch_size, prompt_len = prompt.decoder_tokens.shape
  if not batch_size:
    raise ValueError('a batch of 0 rows: there is nothing to decode')
  if prompt_len > max_len:
    raise ValueError(
      f'a prompt of {prompt_len} tokens does not fit in max_len {max_len}'
    )

  def narrow(array: Array) -> Array:
    is_float = jnp.issubdtype(jnp.result_type(array), jnp.floating)
    return jnp.asarray(array, jnp.float32 if is_float else jnp.int32)

  return jax.tree.map(narrow, prompt)


def init(
  rng_key: Array,
  prompt: Prompt,
  target_cache: Any,
  drafter_state: Any,
  *,
  gamma: int,
  max_len: int,
) -> DecodeState:
  """Makes the state after the prefill of a `checked` prompt, with buffers of
  `max_len` tokens. Raises ValueError for a wrong number of keys."""
  batch_size, prompt_len = prompt.decoder_tokens.shape
  tokens = jnp.pad(prompt.decoder_tokens, ((0, 0), (0, max_len - prompt_len)))
  lengths, max_lengths = prompt.decoder_lengths, limits(prompt, max_len)
  is_plain = prompt.processors is None and prompt.grammar is None
  return DecodeState(
    context=Context(
      tokens=tokens,
      lengths=lengths,
      sampling=prompt.sampling,
      processors=prompt.processors,
      starts=None if is_plain else lengths,
      grammar=prompt.grammar,
    ),
    log_probs=jnp.zeros((batch_size, max_len), jnp.float32),
    done=lengths >= max_lengths,
    has_nan=jnp.zeros(batch_size, jnp.bool_),
    row_keys=keys.row_keys(rng_key, prompt.row_ids),
    max_lengths=max_lengths,
    target_cache=target_cache,
    drafter_state=drafter_state,
    statistics=statistics.init(batch_size, gamma),
  )


def limits(
  prompt: Prompt, max_len: int, max_new_tokens: int | None = None
) -> Array:
  """Returns each row's least limit on its committed length, int32 `[B]`."""
  least = jnp.full_like(prompt.decoder_lengths, max_len)
  if prompt.max_lengths is not None:
    least = jnp.minimum(prompt.max_lengths, least)
  if max_new_tokens is not None:
    least = jnp.minimum(prompt.decoder_lengths + max_new_tokens, least)
  return least


def eos_ids(eos_id: EosId) -> tuple[int, ...]:
  """Returns the ids that end a sequence as a tuple; see `commit`."""
  return tuple(np.atleast_1d(eos_id).tolist())


def commit(
  state: DecodeState,
  tokens: Array,
  logits: Array,
  counts: Array,
  is_bad: Array,
  *,
  eos_id: EosId,
) -> tuple[DecodeState, Array]:
  """Appends up to `counts` tokens per row, cut after EOS, at the row's limit,
  and before the first token that depends on NaN.

  Args:
    state: the rows so far; caches and counters are left as they are.
    tokens: int32 `[B, W]`: accepted tokens and the one after them.
    logits: float32 `[B, W, V]`, the target's, that predict each of them.
    counts: int32 `[B]`, 1 to W: how many tokens of each row to commit.
    is_bad: bool `[B, W]`, tokens drafted from logits with NaN.
    eos_id: ends a row once committed; a tuple lists several, -1 none.

  Returns:
    The new state, and int32 `[B]`, how many tokens each row committed: 0 for
    rows that were done.
  """
  width, lengths = tokens.shape[1], state.context.lengths
  is_eos = jnp.isin(tokens, jnp.array(eos_ids(eos_id), jnp.int32))
  counts = jnp.minimum(counts, state.max_lengths - lengths)
  # tokens [5, EOS, 7]: 1 before EOS, so at most 2 are committed
  counts = jnp.minimum(counts, arrays.count_leading(~is_eos) + 1)
  counts = jnp.where(state.done, 0, counts)  # invariant 9

  # Only now, since plain decoding never sees NaN beyond an EOS or a limit.
  normalizer = jax.nn.logsumexp(logits, axis=-1)
  num_good = arrays.count_leading(jnp.isfinite(normalizer) & ~is_bad)
  has_nan = state.has_nan | (num_good < counts)
  counts = jnp.minimum(counts, num_good)  # good [1, 0, 1]: at most 1
  has_ended = jnp.any(is_eos & arrays.is_within(counts, width), axis=1)

  log_probs = arrays.pick(logits, tokens) - normalizer
  write = functools.partial(arrays.write_block, starts=lengths, counts=counts)
  new_lengths = lengths + counts
  state = dataclasses.replace(
    state,
    context=dataclasses.replace(
      state.context,
      tokens=write(state.context.tokens, tokens),
      lengths=new_lengths,
    ),
    log_probs=write(state.log_probs, log_probs),
    done=state.done | has_nan | has_ended | (new_lengths >= state.max_lengths),
    has_nan=has_nan,
  )
  return state, counts


def truncate(
  state: DecodeState,
  before: Statistics,
  draft: Draft,
  verification: Verification,
  counts: Array,
  is_ended: Array,
) -> DecodeState:
  """Keeps `counts[B]` of the tokens that the last iteration committed and ends
  the rows of `is_ended[B]`. `before` are the counters before that iteration,
  `draft` and `verification` are from its `StepInfo`."""
  after, context = state.statistics, state.context
  starts = context.lengths - (after.num_tokens - before.num_tokens)
  counted = statistics.count(before, draft, verification, counts)
  # The short call was made and the tree was drafted, whatever is kept of them.
  counted = dataclasses.replace(counted, num_short_runs=after.num_short_runs)
  if verification.path is not None:
    counted = dataclasses.replace(counted, num_drafted=after.num_drafted)
  return dataclasses.replace(
    state,
    context=dataclasses.replace(context, lengths=starts + counts),
    done=state.done | is_ended,
    has_nan=state.has_nan & ~is_ended,  # It was behind what is kept.
    statistics=counted,
  )


def output(state: DecodeState) -> DecodeOutput:
  """Extracts the decoded rows, without caches and keys."""
  context = state.context
  is_committed = arrays.is_within(context.lengths, context.tokens.shape[1])
  return DecodeOutput(
    tokens=jnp.where(is_committed, context.tokens, 0),
    lengths=context.lengths,
    log_probs=jnp.where(is_committed, state.log_probs, 0.0),
    done=state.done,
    has_nan=state.has_nan,
    statistics=state.statistics,
  )
