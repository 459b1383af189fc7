"""Times of plain and speculative decoding of the same examples."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from specdec_jax.theory import estimates
from specdec_jax.theory.costs import Costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
  """What one way of decoding took for all examples.

  Attributes:
    turns: float64 `[repeats, N]`, seconds of each example after the prefill.
    launch_seconds: of each of them what a decode costs beyond its iterations;
      0 where it is not known.
    prefill_seconds: of all examples.
    lengths: new tokens of each.
    num_runs: target runs.
    num_drafted: tokens proposed.
  """

  turns: np.ndarray
  launch_seconds: float
  prefill_seconds: float
  lengths: tuple[int, ...]
  num_runs: int
  num_drafted: int

  @property
  def seconds(self) -> float:
    """Of all examples, each the median of its turns: another program that has
    the machine for a moment then costs nothing."""
    return float(np.median(self.turns, axis=0).sum())

  @property
  def num_tokens(self) -> int:
    return sum(self.lengths)

  @property
  def tokens_per_run(self) -> float:
    return estimates.quotient(self.num_tokens, self.num_runs)

  @property
  def seconds_per_run(self) -> float:
    launches = self.launch_seconds * len(self.lengths)
    return (self.seconds - launches) / self.num_runs

  def speedups(self, plain: 'Timed') -> np.ndarray:
    """Tokens per second over plain decoding's, turn by turn, `[repeats]`."""
    own = self.num_tokens / self.turns.sum(axis=1)
    return own / (plain.num_tokens / plain.turns.sum(axis=1))

  def speedup(self, plain: 'Timed') -> float:
    """Tokens per second over plain decoding's, prefill apart."""
    own = self.num_tokens / self.seconds
    return own / (plain.num_tokens / plain.seconds)

  def whole_speedup(self, plain: 'Timed') -> float:
    """The same with the prefill, the encoder's run included."""
    own = self.num_tokens / (self.seconds + self.prefill_seconds)
    theirs = plain.num_tokens / (plain.seconds + plain.prefill_seconds)
    return own / theirs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
  """Plain and speculative decoding of the same examples.

  Attributes:
    plain: one token per target run.
    fixed: by gamma.
    adaptive: by threshold, and the most tokens of a draft.
    costs: an iteration's parts, where they took turns with the rest.
  """

  plain: Timed
  fixed: Mapping[int, Timed]
  adaptive: Mapping[tuple[str, int], Timed]
  costs: Costs | None = None
