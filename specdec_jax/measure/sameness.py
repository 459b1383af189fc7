"""Whether two ways of decoding gave the same tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Params
from specdec_jax.decoding.state import DecodeState


def sameness(
  target: LanguageModel,
  params: Params,
  expected: Sequence[DecodeState],
  found: Sequence[DecodeState],
) -> dict[str, Any]:
  """Whether both sides decoded the same tokens, and if not, how near the miss
  was: the logit margin of plain decoding's token at the first difference.

  Args:
    target: the target of both sides.
    params: the plain side's.
    expected: where plain decoding ended, a state a batch.
    found: the same of the other side.

  Returns:
    `identical`, `num_divergent_rows`, and `first_divergence_margin` and
    `largest_divergence_margin`, None where there is none: a row that only ends
    earlier than the other has no such token.
  """
  margins, num_divergent = [], 0
  for state, other in zip(expected, found, strict=True):
    a, b = jax.device_get((state.context, other.context))
    for row in range(a.lengths.size):
      length = min(a.lengths[row], b.lengths[row])
      differs = a.tokens[row, :length] != b.tokens[row, :length]
      num_divergent += bool(differs.any() or a.lengths[row] != b.lengths[row])
      if differs.any():
        position = int(differs.argmax())
        logits = _logits_after(target, params, state, position)[row]
        ours, theirs = a.tokens[row, position], b.tokens[row, position]
        margins.append(float(logits[ours] - logits[theirs]))
  return {
    'identical': not num_divergent,
    'num_divergent_rows': num_divergent,
    'first_divergence_margin': margins[0] if margins else None,
    'largest_divergence_margin': max(margins, default=None),
  }


def _logits_after(
  target: LanguageModel, params: Params, state: DecodeState, position: int
) -> np.ndarray:
  """Logits `[B, V]` of what follows the first `position` tokens, from the cache
  that plain decoding left."""

  @jax.jit
  def score(params: Params, state: DecodeState, position: Array) -> Array:
    lengths = jnp.full_like(state.context.lengths, position)
    last = arrays.read_block(state.context.tokens, lengths - 1, 1)
    cache = target.rewind(state.target_cache, lengths - 1)
    logits, _ = target.extend(params.target, last, cache)
    return logits[:, 0]

  return np.asarray(score(params, state, jnp.int32(position)))
