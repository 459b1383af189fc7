"""Compares the tokens of two decodes of the same prompts."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Params
from specdec_jax.decoding.state import DecodeState
from specdec_jax.sampling import processors


class Sameness(NamedTuple):
  """How tokens differ from those of plain decoding: the number of rows that
  differ, and the margins of those with another token, see `sameness`."""

  num_divergent_rows: int
  divergence_margins: list[float]

  @property
  def identical(self) -> bool:
    return not self.num_divergent_rows

  @property
  def first_divergence_margin(self) -> float | None:
    return self.divergence_margins[0] if self.divergence_margins else None

  def figures(self) -> dict[str, Any]:
    """Returns the comparison as JSON has it."""
    return {
      'identical': self.identical,
      **self._asdict(),
      'first_divergence_margin': self.first_divergence_margin,
      'largest_divergence_margin': max(self.divergence_margins, default=None),
    }


def sameness(
  target: LanguageModel,
  params: Params,
  expected: Sequence[DecodeState],
  compared: Sequence[DecodeState],
) -> Sameness:
  """Compares final states with those of plain decoding.

  At the first difference of a row, the margin is the processed logit of plain
  decoding's token less that of the other token. A row that only ends earlier
  has no margin.

  Args:
    target: of plain decoding.
    params: of plain decoding.
    expected: final states of plain decoding, one per batch.
    compared: the states to compare, one per batch.
  """
  margins = []
  num_divergent = 0
  for state, compared_state in zip(expected, compared, strict=True):
    # Tokens beyond a row's length do not count.
    first, second = jax.device_get((state.context, compared_state.context))
    for row in range(first.lengths.size):
      length = min(first.lengths[row], second.lengths[row])
      differs = first.tokens[row, :length] != second.tokens[row, :length]
      num_divergent += bool(
        differs.any() or first.lengths[row] != second.lengths[row]
      )
      if differs.any():
        # Both tokens follow the same text, so that plain decoding's logits
        # apply to both.
        position = int(differs.argmax())
        logits = _logits_after(target, params, state, np.int32(position))[row]
        token = first.tokens[row, position]
        other_token = second.tokens[row, position]
        margins.append(float(logits[token] - logits[other_token]))
  return Sameness(num_divergent, margins)


@functools.partial(jax.jit, static_argnames='target')
def _logits_after(
  target: LanguageModel, params: Params, state: DecodeState, position: Array
) -> Array:
  """Returns processed logits `[B, V]` after `position` tokens, without the mask
  of a grammar."""
  # The cache, which holds the whole text, is rewound by one token more, and
  # that token is fed again for its logits.
  lengths = jnp.full_like(state.context.lengths, position)
  last = arrays.read_block(state.context.tokens, lengths - 1, 1)
  cache = target.rewind(state.target_cache, lengths - 1)
  logits, _ = target.extend(params.target, last, cache)
  text = dataclasses.replace(state.context, lengths=lengths)
  return processors.after_text(logits[:, 0], text)
