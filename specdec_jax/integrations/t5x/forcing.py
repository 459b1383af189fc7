"""Tokens that T5X forces in the middle of a row, as a model that is sure of
them."""

import dataclasses

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel
from specdec_jax.decoding.state import DecodeOutput

# What the loop sees where an EOS is forced: T5X's padding, which ends no row.
_STAND_IN = 0


def force(model: LanguageModel, tokens: Array, *, eos_id: int) -> LanguageModel:
  """A T5 that gives all probability to `tokens[b, i]` at position i of row b,
  where that is not 0, and is itself elsewhere.

  A forced EOS does not end a row in T5X. The loop is given 0 in its place,
  which the model reads as the EOS that it stands for; `restore_eos` undoes it.

  Args:
    model: of `families.language_model`.
    tokens: int32 `[B, S]`.
    eos_id: ends a row that it was not forced on.
  """
  # Beyond the last position nothing is forced, as in this column.
  tokens = jnp.pad(tokens, ((0, 0), (0, 1)))

  def extend(params, appended: Array, cache, at: Array | None = None):
    starts, width = cache.lengths, appended.shape[1]
    is_eos = arrays.read_block(tokens, starts, width) == eos_id
    following = arrays.read_block(tokens, starts + 1, width)
    logits, cache = model.extend(
      params, jnp.where(is_eos, eos_id, appended), cache, at
    )
    if at is not None:
      following = arrays.read_block(following, at, 1)
    return _sure_of(logits, following, eos_id), cache

  return model._replace(extend=extend)


def restore_eos(
  output: DecodeOutput, tokens: Array, *, eos_id: int
) -> DecodeOutput:
  """What was decoded under `force`, with the EOS tokens that it forced."""
  is_eos = arrays.is_within(output.lengths, tokens.shape[1])
  is_eos &= tokens == eos_id
  tokens = jnp.where(is_eos, eos_id, output.tokens)
  return dataclasses.replace(output, tokens=tokens)


def _sure_of(logits: Array, tokens: Array, eos_id: int) -> Array:
  """Logits `[B, T, V]`, one-hot where `tokens[B, T]` are not 0."""
  seen = jnp.where(tokens == eos_id, _STAND_IN, tokens)[..., None]
  ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  one_hot = jnp.where(ids == seen, 0.0, -jnp.inf).astype(logits.dtype)
  return jnp.where(tokens[..., None] != 0, one_hot, logits)
