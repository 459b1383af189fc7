"""Rates of a finished decode, and whether two gave the same tokens. Three
acceptance rates go by one name in the field; here each has its own, and its
denominator."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Params
from specdec_jax.decoding.state import DecodeState
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.sampling import processors
from specdec_jax.theory import estimates


class Rates(NamedTuple):
  """Rates over all rows of a batch. None where nothing was counted.

  Attributes:
    alpha: accepted / tested drafted tokens: the estimate of Leviathan's alpha,
      the chance that a token passes given that those before it did.
    acceptance_per_drafted: accepted / drafted tokens; falls with gamma.
    block_efficiency: tokens / target runs.
    mean_accept_prob: acceptance probability of the tested tokens; the same
      expectation as `alpha`, with less variance.
    row_utilisation: target runs of the rows / (rows * runs of the slowest).
  """

  alpha: float | None
  acceptance_per_drafted: float | None
  block_efficiency: float | None
  mean_accept_prob: float | None
  row_utilisation: float | None


@dataclasses.dataclass(frozen=True)
class Counts:
  """Counters of all batches of one run: of their rows, of the loop's
  iterations, and of those of them that scored one position."""

  statistics: Statistics
  iterations: int
  short_iterations: int

  @property
  def num_tokens(self) -> int:
    return int(np.sum(self.statistics.num_tokens))


def count(statistics: Sequence[Statistics]) -> Counts:
  """Returns the counters of batches, together."""
  batches = jax.device_get(list(statistics))
  return Counts(
    statistics=joined(batches),
    iterations=sum(int(s.num_target_runs.max()) for s in batches),
    short_iterations=sum(int(s.num_short_runs.max()) for s in batches),
  )


def joined(statistics: Sequence[Statistics]) -> Statistics:
  """Joins the counters of several batches, in numpy; those by position are as
  wide as the longest drafts."""
  batches = jax.device_get(list(statistics))
  gamma = max(batch.num_tested.shape[1] for batch in batches)

  def widen(values: np.ndarray) -> np.ndarray:
    # Rows of a batch with gamma 2 beside one with gamma 4:
    # `[5, 3]` becomes `[5, 3, 0, 0]`. Other counters have one number per row.
    if values.ndim == 1:
      return values
    return np.pad(values, ((0, 0), (0, gamma - values.shape[1])))

  return jax.tree.map(
    lambda *values: np.concatenate(list(map(widen, values))), *batches
  )


def rates(statistics: Statistics) -> Rates:
  """Computes the rates of a finished decode; pulls the counters to the host."""
  total = jax.tree.map(np.sum, jax.device_get(statistics))
  runs = np.asarray(statistics.num_target_runs)
  num_slots, quotient = runs.size * runs.max(initial=0), estimates.quotient
  return Rates(
    alpha=quotient(total.num_accepted, total.num_tested),
    acceptance_per_drafted=quotient(total.num_accepted, total.num_drafted),
    block_efficiency=quotient(total.num_tokens, total.num_target_runs),
    mean_accept_prob=quotient(total.accept_prob, total.num_tested),
    row_utilisation=quotient(total.num_target_runs, num_slots),
  )


def row_summary(statistics: Statistics, row: int) -> dict[str, float | None]:
  """Returns the counters and rates of one row, as JSON can hold them."""
  one = jax.tree.map(lambda values: values[row : row + 1], statistics)
  found = rates(one)
  return {
    'tokens': int(one.num_tokens[0]),
    'target_runs': int(one.num_target_runs[0]),
    'drafted': int(one.num_drafted[0]),
    'tested': int(np.sum(one.num_tested)),
    'accepted': int(np.sum(one.num_accepted)),
    'alpha': found.alpha,
    'acceptance_per_drafted': found.acceptance_per_drafted,
    'block_efficiency': found.block_efficiency,
  }


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
