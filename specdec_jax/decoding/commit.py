"""Appending what an iteration decided: one place for EOS, limits and NaN."""

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Context, Prompt

EosId = int | tuple[int, ...]


@flax.struct.dataclass(kw_only=True)
class Rows:
  """What every decoding loop keeps for each row.

  Attributes:
    context: tokens `[B, S]` and lengths `[B]` committed so far.
    log_probs: float32 `[B, S]`, of each committed token under the target's own
      softmax, before temperature, top-k and top-p; 0 for the prompt.
    done: bool `[B]`.
    has_nan: bool `[B]`: the row was stopped because a model returned logits
      that are not numbers; nothing of that iteration is committed.
    row_keys: keys `[B]`.
    max_lengths: int32 `[B]`, the committed length at which a row is done.
  """

  context: Context
  log_probs: Array
  done: Array
  has_nan: Array
  row_keys: Array
  max_lengths: Array


def init_rows(row_keys: Array, prompt: Prompt, max_len: int) -> Rows:
  """Rows that hold just the prompt, in buffers of `max_len` tokens.

  Raises:
    ValueError: if the prompt's buffer is longer than `max_len`.
  """
  batch_size, prompt_len = prompt.decoder_tokens.shape
  if prompt_len > max_len:
    raise ValueError(
      f'a prompt of {prompt_len} tokens does not fit in max_len {max_len}'
    )
  tokens = jnp.zeros((batch_size, max_len), jnp.int32)
  tokens = tokens.at[:, :prompt_len].set(
    prompt.decoder_tokens.astype(jnp.int32)
  )
  lengths = prompt.decoder_lengths.astype(jnp.int32)
  if prompt.max_lengths is None:
    max_lengths = jnp.full_like(lengths, max_len)
  else:
    max_lengths = jnp.minimum(prompt.max_lengths.astype(jnp.int32), max_len)
  return Rows(
    context=Context(tokens=tokens, lengths=lengths),
    log_probs=jnp.zeros((batch_size, max_len), jnp.float32),
    done=lengths >= max_lengths,
    has_nan=jnp.zeros(batch_size, jnp.bool_),
    row_keys=row_keys,
    max_lengths=max_lengths,
  )


def append(
  rows: Rows,
  tokens: Array,
  logits: Array,
  counts: Array,
  is_bad: Array,
  *,
  eos_id: EosId,
) -> tuple[Rows, Array]:
  """Commits up to `counts` tokens a row, cut at EOS and at the row's limit.

  Args:
    rows: the rows so far.
    tokens: int32 `[B, W]`, what each iteration decided on.
    logits: float32 `[B, W, V]`, the target's, that predict each of them.
    counts: int32 `[B]`, 1 to W, how many of the tokens are meant.
    is_bad: bool `[B]`, rows whose draft came from logits that are not numbers.
    eos_id: ends a row once committed; a tuple lists several, -1 none.

  Returns:
    The new rows, and int32 `[B]`, how many tokens each one committed: 0 for
    rows that were done or met a NaN.
  """
  width = tokens.shape[1]
  is_meant = arrays.is_within(counts, width)
  normalizer = jax.nn.logsumexp(logits, axis=-1)
  is_bad = is_bad | jnp.any(~jnp.isfinite(normalizer) & is_meant, axis=1)
  has_nan = rows.has_nan | (is_bad & ~rows.done)

  counts = jnp.minimum(counts, rows.max_lengths - rows.context.lengths)
  is_eos = _is_eos(tokens, eos_id)
  counts = jnp.minimum(counts, arrays.count_leading(~is_eos) + 1)
  counts = jnp.where(rows.done | has_nan, 0, counts)

  log_probs = arrays.pick(logits, tokens) - normalizer
  lengths = rows.context.lengths
  context = Context(
    tokens=arrays.write_block(rows.context.tokens, tokens, lengths, counts),
    lengths=lengths + counts,
  )
  ends = jnp.any(is_eos & arrays.is_within(counts, width), axis=1)
  rows = rows.replace(
    context=context,
    log_probs=arrays.write_block(rows.log_probs, log_probs, lengths, counts),
    done=rows.done | has_nan | ends | (context.lengths >= rows.max_lengths),
    has_nan=has_nan,
  )
  return rows, counts


def _is_eos(tokens: Array, eos_id: EosId) -> Array:
  """bool, where `tokens` are one of the EOS ids."""
  eos_ids = (eos_id,) if isinstance(eos_id, int) else eos_id
  is_eos = jnp.zeros(tokens.shape, jnp.bool_)
  for each in eos_ids:
    is_eos = is_eos | (tokens == each)
  return is_eos
