"""Whether two decodes of the same prompts gave the same tokens."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Params
from specdec_jax.decoding.state import DecodeState
from specdec_jax.sampling import processors


def sameness(
  target: LanguageModel,
  params: Params,
  expected: Sequence[DecodeState],
  found: Sequence[DecodeState],
) -> dict[str, object]:
  """Says whether both sides decoded the same tokens, and if not, how near the
  miss was: the margin of plain decoding's token at the first difference, in
  logits that were processed.

  Given are the plain side's params, where it ended, one state per batch, and
  where the other did. Margins are None where there are none: a row that only
  ends earlier than the other has no such token.
  """
  margins, num_divergent = [], 0
  for state, other in zip(expected, found, strict=True):
    # Tokens beyond a row's length are whatever was left there.
    a, b = jax.device_get((state.context, other.context))
    for row in range(a.lengths.size):
      length = min(a.lengths[row], b.lengths[row])
      differs = a.tokens[row, :length] != b.tokens[row, :length]
      num_divergent += bool(differs.any() or a.lengths[row] != b.lengths[row])
      if differs.any():
        # Plain decoding said `ours` where the other said `theirs`; both follow
        # the same tokens, so that plain decoding's logits judge them.
        position = int(differs.argmax())
        logits = _logits_after(target, params, state, np.int32(position))[row]
        ours, theirs = a.tokens[row, position], b.tokens[row, position]
        margins.append(float(logits[ours] - logits[theirs]))
  return {
    'identical': not num_divergent,
    'num_divergent_rows': num_divergent,
    'divergence_margins': margins,
    'first_divergence_margin': margins[0] if margins else None,
    'largest_divergence_margin': max(margins, default=None),
  }


@functools.partial(jax.jit, static_argnames='target')
def _logits_after(
  target: LanguageModel, params: Params, state: DecodeState, position: Array
) -> Array:
  """Returns processed logits `[B, V]` of what follows `position` tokens; a mask
  of a grammar has no part in margins."""
  # The cache holds all of the text: rewound to one token before `position`, it
  # is fed that token again, and gives what follows it.
  lengths = jnp.full_like(state.context.lengths, position)
  last = arrays.read_block(state.context.tokens, lengths - 1, 1)
  cache = target.rewind(state.target_cache, lengths - 1)
  logits, _ = target.extend(params.target, last, cache)
  text = dataclasses.replace(state.context, lengths=lengths, grammar=None)
  return processors.after_text(logits[:, 0], text)
