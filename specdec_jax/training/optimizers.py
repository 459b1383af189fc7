"""Optax's optimisers with T5's settings, and T5X's learning-rate schedules."""

import math
from collections.abc import Callable

import jax.numpy as jnp
import optax

from specdec_jax.base import Array

Schedule = Callable[[Array], Array]


def learning_rate(
  factors: str = 'constant * linear_warmup * rsqrt_decay',
  *,
  base_learning_rate: float = 1.0,
  warmup_steps: int = 10_000,
  decay_factor: float = 0.5,
  steps_per_decay: int = 20_000,
  steps_per_cycle: int = 100_000,
) -> Schedule:
  """Multiplies named factors (`t5x.utils.create_learning_rate_scheduler`).

  Factors are names joined by `*`, with s the number of steps taken and w
  `warmup_steps`: `constant`, the base rate; `linear_warmup`, min(1, s / w);
  `linear_decay`, from 1 after warm-up to 0 at `steps_per_cycle`; `rsqrt_decay`,
  1 / sqrt(max(s, w)); `rsqrt_normalized_decay`, the same times sqrt(w);
  `decay_every`, `decay_factor` for every `steps_per_decay`; `cosine_decay`,
  half a cosine from 1 to 0 every `steps_per_cycle` after warm-up.

  Returns a function from int32 steps to a float32 rate. Raises ValueError if a
  factor is not known, or the rate or a number of steps is not positive.
  """
  for name, value in (
    ('base_learning_rate', base_learning_rate),
    ('warmup_steps', warmup_steps),
    ('steps_per_decay', steps_per_decay),
    ('steps_per_cycle', steps_per_cycle),
  ):
    if not 0 < value < float('inf'):
      raise ValueError(f'{name} must be a number greater than 0, got {value}')
  # From s and the steps since warm-up.
  factor_fns: dict[str, Callable[[Array, Array], Array | float]] = {
    'constant': lambda s, since: base_learning_rate,
    'linear_warmup': lambda s, since: jnp.minimum(1.0, s / warmup_steps),
    'linear_decay': lambda s, since: jnp.maximum(
      0.0, 1.0 - since / max(steps_per_cycle - warmup_steps, 1)
    ),
    'rsqrt_decay': lambda s, since: jnp.maximum(s, warmup_steps) ** -0.5,
    'rsqrt_normalized_decay': lambda s, since: (
      (jnp.maximum(s, warmup_steps) / warmup_steps) ** -0.5
    ),
    'decay_every': lambda s, since: (
      decay_factor ** jnp.floor(s / steps_per_decay)
    ),
    'cosine_decay': lambda s, since: (
      0.5 * (1.0 + jnp.cos(jnp.pi * (since / steps_per_cycle % 1.0)))
    ),
  }
  names = [name.strip() for name in factors.split('*')]
  unknown = [name for name in names if name not in factor_fns]
  if unknown:
    choices = ', '.join(factor_fns)
    raise ValueError(f'{unknown[0]!r} is no factor, expected one of {choices}')

  def schedule(step: Array) -> Array:
    steps = jnp.asarray(step, jnp.float32)
    since_warmup = jnp.maximum(0.0, steps - warmup_steps)
    rates = (factor_fns[name](steps, since_warmup) for name in names)
    return jnp.asarray(math.prod(rates, start=jnp.float32(1.0)))

  return schedule


# As T5 was trained with (Shazeer and Stern, arXiv 1804.04235). By default optax
# factors second moments where both sides have 128 entries, has no momentum, and
# takes steps relative to the parameter's own root mean square.
adafactor = optax.adafactor


def adamw(
  learning_rate: float | Schedule,
  *,
  b1: float = 0.9,
  b2: float = 0.98,
  eps: float = 1e-9,
  weight_decay: float = 0.0,
  max_grad_norm: float | None = 1.0,
) -> optax.GradientTransformation:
  """Makes AdamW (Loshchilov and Hutter, arXiv 1711.05101), gradients clipped,
  with the momenta of Vaswani et al. (arXiv 1706.03762, Sec. 5.3)."""
  steps = [
    optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
  ]
  if max_grad_norm is not None:
    # Before the momenta, which one huge gradient would spoil for long.
    steps.insert(0, optax.clip_by_global_norm(max_grad_norm))
  return optax.chain(*steps)
