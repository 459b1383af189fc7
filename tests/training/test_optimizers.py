"""Schedules by T5X's formulas; the optimisers' own properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.training import optimizers

STEPS = [0, 1, 50, 100, 101, 400, 1000]


def rates(factors, **settings):
  schedule = optimizers.learning_rate(
    factors, base_learning_rate=0.5, warmup_steps=100, **settings
  )
  return np.array([schedule(jnp.asarray(step)) for step in STEPS])


def test_t5s_schedule():
  expected = [
    0.5 * min(1, step / 100) / np.sqrt(max(step, 100)) for step in STEPS
  ]
  found = rates('constant * linear_warmup * rsqrt_decay')
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  normalized = rates('constant * linear_warmup * rsqrt_normalized_decay')
  np.testing.assert_allclose(normalized, found * 10, rtol=1e-6)


def test_other_decays():
  every = rates('constant * decay_every', steps_per_decay=100, decay_factor=0.1)
  np.testing.assert_allclose(
    every, [0.5 * 0.1 ** (step // 100) for step in STEPS], rtol=1e-5
  )
  cosine = rates('cosine_decay', steps_per_cycle=600)
  np.testing.assert_allclose(cosine[[0, 3, 5]], [1, 1, 0.5], atol=1e-6)
  linear = rates('constant * linear_decay', steps_per_cycle=700)
  np.testing.assert_allclose(linear[[3, 5, 6]], [0.5, 0.25, 0], atol=1e-6)


def test_wrong_schedules_are_refused():
  with pytest.raises(ValueError, match="'rsqrt'"):
    optimizers.learning_rate('constant * rsqrt')
  with pytest.raises(ValueError, match='warmup_steps'):
    optimizers.learning_rate(warmup_steps=0)


def test_adafactor_steps_relative_to_the_parameter_and_factors():
  optimizer = optimizers.adafactor(0.01)
  params = {'w': jnp.full((128, 256), 2.0), 'scale': jnp.ones(128)}
  grads = {'w': jnp.full((128, 256), 1e-3), 'scale': jnp.full(128, 1e-3)}
  state = optimizer.init(params)
  updates, state = optimizer.update(grads, state, params)
  # A first step has the size of the rate times the parameter's own.
  np.testing.assert_allclose(updates['w'], -0.01 * 2.0, rtol=1e-4)
  np.testing.assert_allclose(updates['scale'], -0.01, rtol=1e-4)


def test_adamw_clips():
  optimizer = optimizers.adamw(0.1, eps=1.0, b1=0.0, b2=0.0, max_grad_norm=3.0)
  params = {'w': jnp.zeros(9)}
  with jax.numpy_dtype_promotion('standard'):
    updates, _ = optimizer.update(
      {'w': jnp.full(9, 100.0)}, optimizer.init(params), params
    )
  # The norm 300 becomes 3, so that every entry is 1; 1 / (|1| + eps) is 0.5.
  np.testing.assert_allclose(updates['w'], -0.05, rtol=1e-5)
