"""Acceptance by decree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Draft
from specdec_jax.measure.simulated import simulated_acceptance

NUM_ROWS, GAMMA, V = 20_000, 3, 4


def test_every_token_passes_with_the_chance_whatever_the_models_say():
  alpha = 0.7
  p = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
  lengths = jnp.arange(NUM_ROWS, dtype=jnp.int32) % (GAMMA + 1)
  # q has nothing in common with p, and still they pass.
  one_hot = jnp.zeros((NUM_ROWS, GAMMA, V)).at[..., 0].set(1.0)
  draft = Draft(
    tokens=jnp.zeros((NUM_ROWS, GAMMA), jnp.int32),
    probs=one_hot,
    lengths=lengths,
  )
  rule = jax.jit(functools.partial(simulated_acceptance, alpha=alpha))
  found = rule(
    jax.random.split(jax.random.key(0), NUM_ROWS),
    draft,
    jnp.broadcast_to(jnp.asarray(p), (NUM_ROWS, GAMMA + 1, V)),
  )
  assert (found.num_accepted <= lengths).all()
  whole = np.asarray(found.num_accepted)[np.asarray(lengths) == GAMMA]
  for count in range(GAMMA + 1):
    chance = alpha**count * (1 - alpha if count < GAMMA else 1)
    deviation = np.sqrt(chance * (1 - chance) / whole.size)
    assert abs((whole == count).mean() - chance) < 5 * deviation
  # The token after them is the target's.
  counts = np.bincount(found.next_token, minlength=V) / NUM_ROWS
  assert (abs(counts - p) < 5 * np.sqrt(p * (1 - p) / NUM_ROWS)).all()
