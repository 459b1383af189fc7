"""How far a row may draft, decided by what became of its earlier drafts."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax import theory
from specdec_jax.base import Array, Arrays


class Schedule(NamedTuple):
  """A limit for the next draft of each row, and what it is made from.

  Attributes:
    init: `batch_size -> memory`, a tree of arrays `[B, ...]`.
    update: `(memory, num_drafted[B], num_accepted[B], gamma) -> (memory,
      limits[B])`, int32 but for the memory. A row whose `num_drafted` is 0 has
      nothing to learn from. Limits are clipped to 1 and gamma.
  """

  init: Callable[[int], Arrays]
  update: Callable[[Arrays, Array, Array, int], tuple[Arrays, Array]]


def fixed() -> Schedule:
  """Always gamma."""
  update = lambda memory, drafted, accepted, gamma: (
    memory,
    jnp.full_like(drafted, gamma),
  )
  return Schedule(lambda batch_size: (), update)


def heuristic(*, start: int = 5) -> Schedule:
  """Two tokens more after full acceptance, one less otherwise: the schedule of
  Hugging Face's assisted generation
  (https://huggingface.co/docs/transformers/generation_strategies), one per row,
  of which `start` is the first limit."""

  def update(limits, drafted, accepted, gamma):
    moved = jnp.where(accepted == drafted, limits + 2, limits - 1)
    limits = jnp.clip(jnp.where(drafted > 0, moved, limits), 1, gamma)
    return limits, limits

  return Schedule(lambda size: jnp.full(size, start, jnp.int32), update)


def running_alpha(
  *, c: float, prior: float = 0.7, weight: float = 4.0, discount: float = 0.9
) -> Schedule:
  """The best gamma for the acceptance rate of late (Leviathan et al., Sec. 3.5,
  https://arxiv.org/abs/2211.17192, who propose predicting it).

  `c` is the time of a drafter step over the target's call on a block, `prior`
  alpha before anything is known, worth `weight` tested tokens, and `discount`
  that of older counts per iteration; 1 forgets nothing. ValueError for what is
  out of range.
  """
  for name, value in (('prior', prior), ('discount', discount)):
    if not 0 < value <= 1:
      raise ValueError(f'{name} must lie in (0, 1], got {value}')
  if not weight > 0:
    raise ValueError(f'weight must be above 0, got {weight}')

  def update(counts, drafted, accepted, gamma):
    tested = accepted + (accepted < drafted).astype(jnp.int32)
    seen = jnp.stack([accepted, tested], axis=1).astype(jnp.float32)
    counts = jnp.where(drafted[:, None] > 0, discount * counts + seen, counts)
    alpha = counts[:, 0] / counts[:, 1]
    table = theory.best_gamma(np.linspace(0, 1, 101), c, gamma)
    limits = jnp.asarray(table, jnp.int32)[
      jnp.rint(alpha * 100).astype(jnp.int32)
    ]
    return counts, limits

  start = jnp.array([[prior * weight, weight]], jnp.float32)
  return Schedule(lambda size: jnp.tile(start, (size, 1)), update)
