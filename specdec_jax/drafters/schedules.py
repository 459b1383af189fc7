"""Schedules: how far a row may draft, given what was accepted so far."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax import theory
from specdec_jax.base import Array, Arrays


class Schedule(NamedTuple):
  """A limit for each row's next draft, as two pure functions.

  Attributes:
    init: `batch_size -> memory`, a pytree of arrays `[B, ...]`.
    update: `(memory, num_drafted[B], num_accepted[B], gamma) -> (memory,
      limits[B])`, int32 but for the memory. Rows with `num_drafted` 0 leave
      their memory as it is. The caller clips limits to 1 .. gamma.
  """

  init: Callable[[int], Arrays]
  update: Callable[[Arrays, Array, Array, int], tuple[Arrays, Array]]


def fixed() -> Schedule:
  """Always drafts gamma tokens."""
  update = lambda memory, drafted, accepted, gamma: (
    memory,
    jnp.full_like(drafted, gamma),
  )
  return Schedule(lambda batch_size: (), update)


def heuristic(*, start: int = 5) -> Schedule:
  """Drafts two tokens more after full acceptance and one less otherwise, from
  `start` on: the schedule of Hugging Face's assisted generation
  (https://huggingface.co/docs/transformers/generation_strategies), per row."""

  def update(limits, drafted, accepted, gamma):
    moved = jnp.where(accepted == drafted, limits + 2, limits - 1)
    limits = jnp.clip(jnp.where(drafted > 0, moved, limits), 1, gamma)
    return limits, limits

  return Schedule(lambda size: jnp.full(size, start, jnp.int32), update)


def running_alpha(
  *, c: float, prior: float = 0.7, weight: float = 4.0, discount: float = 0.9
) -> Schedule:
  """Drafts the best gamma for a running estimate of alpha (Leviathan et al.,
  Sec. 3.5, https://arxiv.org/abs/2211.17192, propose predicting it).

  Args:
    c: time of a drafter step over that of the target's call on a block.
    prior: alpha before anything was tested, in (0, 1].
    weight: how many tested tokens the prior counts for, above 0.
    discount: factor on older counts per iteration, in (0, 1]; 1 forgets none.

  Raises ValueError if an argument is out of range.
  """
  for name, value in (('prior', prior), ('discount', discount)):
    if not 0 < value <= 1:
      raise ValueError(f'{name} must lie in (0, 1], got {value}')
  if not weight > 0:
    raise ValueError(f'weight must be above 0, got {weight}')

  def update(counts, drafted, accepted, gamma):
    # 2 of 5 accepted, 3 tested: .9 [2.8, 4] + [2, 3] = [4.52, 6.6], alpha .68
    tested = accepted + (accepted < drafted).astype(jnp.int32)
    seen = jnp.stack([accepted, tested], axis=1).astype(jnp.float32)
    counts = jnp.where(drafted[:, None] > 0, discount * counts + seen, counts)
    alpha = counts[:, 0] / counts[:, 1]
    table = theory.best_gamma(np.linspace(0, 1, 101), c, gamma)
    limits = jnp.asarray(table, jnp.int32)[  # per percent of alpha
      jnp.rint(alpha * 100).astype(jnp.int32)
    ]
    return counts, limits

  start = jnp.array([[prior * weight, weight]], jnp.float32)
  return Schedule(lambda size: jnp.tile(start, (size, 1)), update)
