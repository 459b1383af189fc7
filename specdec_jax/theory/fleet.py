"""Chip-hours and cost of many tokens, as plans predict them."""

from collections.abc import Sequence
from typing import NamedTuple

from specdec_jax.theory.costs import Costs
from specdec_jax.theory.planner import GammaPlan


class Prediction(NamedTuple):
  """What a way of decoding takes; `gamma` 0 is plain, a price may be None."""

  gamma: int
  tokens_per_second_per_chip: float
  chip_hours: float
  cost_per_million_tokens: float | None


def predict(
  costs: Costs,
  plans: Sequence[GammaPlan],
  *,
  num_tokens: float,
  num_chips: int,
  batch_size: int,
  length: int,
  price: float | None = None,
) -> list[Prediction]:
  """Predicts for plain decoding, then for the best gamma of each plan.

  Chips decode one full batch after the other, and nothing else: no prefill, no
  encoder, no chip that waits. `costs` are of a whole batch, on all its chips
  together, `length` is in output tokens per row, `price` of one chip-hour.
  """
  plain = costs.decode_seconds(0, length) * num_chips / (batch_size * length)
  ways = [(0, plain)]
  ways += [(plan.best.gamma, plain / plan.best.speedup) for plan in plans]

  def way(gamma: int, seconds: float) -> Prediction:
    cost = None if price is None else price * seconds / 3600 * 1e6
    return Prediction(gamma, 1 / seconds, num_tokens * seconds / 3600, cost)

  return [way(*each) for each in ways]
