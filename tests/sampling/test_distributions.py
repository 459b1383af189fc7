"""Distributions over the vocabulary against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.sampling import distributions


def _pairs(seed: int, count: int = 50, size: int = 6):
  rng = np.random.default_rng(seed)
  p, q = rng.dirichlet(np.full(size, 0.4), (2, count)).astype(np.float32)
  return p, q


def test_residual_is_the_normalised_excess():
  p, q = _pairs(0)
  excess = np.maximum(p.astype(np.float64) - q, 0)
  expected = excess / excess.sum(-1, keepdims=True)
  np.testing.assert_allclose(
    distributions.residual(p, q), expected, rtol=1e-4, atol=1e-6
  )


def test_residual_without_mass_is_p():
  p, q = _pairs(1)
  q[0] = p[0]
  q[1] = p[1] + np.float32(1e-3)
  residual = distributions.residual(jnp.asarray(p), jnp.asarray(q))
  np.testing.assert_array_equal(residual[:2], p[:2])
  assert np.isfinite(residual).all()
  assert np.abs(np.asarray(residual[2:]) - p[2:]).max() > 0.1


def test_nan_stays_nan():
  p, q = _pairs(2)
  p[0, 0] = np.nan
  assert np.isnan(distributions.residual(jnp.asarray(p), q)[0]).all()


def test_overlap_is_what_total_variation_leaves():
  p, q = _pairs(3)
  overlap = distributions.overlap(p, q)
  np.testing.assert_allclose(overlap, np.minimum(p, q).sum(-1), rtol=1e-6)
  distance = 0.5 * np.abs(p - q).sum(-1)
  np.testing.assert_allclose(overlap, 1 - distance, atol=1e-6)
  np.testing.assert_allclose(distributions.overlap(p, p), 1, atol=1e-6)


def test_sample_follows_the_distribution_and_never_the_impossible():
  probs = np.array([0.5, 0.0, 0.3, 0.2, 0.0], np.float32)
  count = 50_000
  tokens = distributions.sample(
    jax.random.split(jax.random.key(0), count), jnp.tile(probs, (count, 1))
  )
  assert tokens.dtype == jnp.int32
  counts = np.bincount(tokens, minlength=5)
  assert (counts[probs == 0] == 0).all()
  deviation = np.sqrt(count * probs * (1 - probs))
  assert (np.abs(counts - count * probs) <= 5 * deviation).all()


@pytest.mark.parametrize('size', [127, 128, 300])
def test_sample_follows_a_distribution_of_many_tokens(size):
  """More tokens than one block holds, whole blocks of them impossible."""
  rng = np.random.default_rng(size)
  probs = rng.dirichlet(np.full(size, 0.3)).astype(np.float32)
  probs[rng.random(size) < 0.3] = 0
  probs[128:256] = 0
  probs /= probs.sum()
  count = 50_000
  tokens = distributions.sample(
    jax.random.split(jax.random.key(3), count), jnp.tile(probs, (count, 1))
  )
  counts = np.bincount(tokens, minlength=size)
  assert counts.size == size
  assert (counts[probs == 0] == 0).all()
  deviation = np.sqrt(count * probs * (1 - probs))
  assert (np.abs(counts - count * probs) <= 5 * deviation + 1).all()


@pytest.mark.parametrize('draw', [0.0, 0.5, 1 - 2**-24])
def test_extreme_draws_take_possible_tokens(draw):
  rng = np.random.default_rng(4)
  weights = rng.dirichlet(np.full(64, 0.1), 500).astype(np.float32)
  weights[rng.random(weights.shape) < 0.5] = 0
  weights[:, 40] = 1e-30
  index = distributions._invert(
    jnp.full(500, draw, jnp.float32), jnp.asarray(weights)
  )
  assert (weights[np.arange(500), index] > 0).all()
  cumulated = np.cumsum(weights.astype(np.float64), axis=1)
  wanted = draw * cumulated[:, -1]
  reached = cumulated[np.arange(500), index]
  assert (reached >= wanted * (1 - 1e-6)).all()
  assert (reached - weights[np.arange(500), index] <= wanted + 1e-6).all()


@pytest.mark.parametrize('function', ['sample', 'uniforms'])
def test_each_row_draws_by_its_own_key(function):
  keys = jax.random.split(jax.random.key(1), 64)
  probs = jnp.full((64, 7), 1 / 7)

  def draw(keys):
    if function == 'sample':
      return np.asarray(distributions.sample(keys, probs[: len(keys)]))
    return np.asarray(distributions.uniforms(keys, 3))

  together = draw(keys)
  np.testing.assert_array_equal(draw(keys[5:6]), together[5:6])
  np.testing.assert_array_equal(draw(keys[::-1]), together[::-1])
  assert len(np.unique(together, axis=0)) > 1


def test_uniforms_fill_the_unit_interval_without_its_end():
  keys = jax.random.split(jax.random.key(2), 20_000)
  draws = np.asarray(distributions.uniforms(keys, 2))
  assert draws.shape == (20_000, 2)
  assert draws.dtype == np.float32
  assert draws.min() >= 0
  assert draws.max() < 1
  counts, _ = np.histogram(draws, bins=10, range=(0, 1))
  assert np.abs(counts - 4000).max() < 5 * np.sqrt(3600)
  assert abs(np.corrcoef(draws.T)[0, 1]) < 0.04
