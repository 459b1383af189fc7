"""Rows of the core's tables of tests that are about T5X."""

import jax.numpy as jnp

from specdec_jax.integrations.t5x import decoding

FORCED = jnp.asarray([[0, 0, 0, 0, 0, 1, 4], [0, 2, 0, 1, 0, 0, 3]] + [[0] * 7])
# What makes a model of a model, and must hand placements on.
WRAPPERS = {
  'forced': lambda model: decoding._force(model, FORCED, eos_id=1),
}
