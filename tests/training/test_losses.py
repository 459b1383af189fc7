"""The losses against numpy, by their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.training import losses

V = 7


@pytest.fixture
def batch():
  generator = np.random.default_rng(0)
  logits = generator.normal(size=(3, 5, V)) * 3
  targets = generator.integers(0, V, (3, 5))
  weights = (generator.random((3, 5)) < 0.7).astype(np.float32)
  return logits.astype(np.float32), targets.astype(np.int32), weights


def log_softmax(logits):
  logits = logits.astype(np.float64)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_cross_entropy(batch):
  logits, targets, weights = batch
  sums = losses.cross_entropy(*map(jnp.asarray, batch))
  nats = -np.take_along_axis(log_softmax(logits), targets[..., None], -1)[
    ..., 0
  ]
  np.testing.assert_allclose(sums.loss, (nats * weights).sum(), rtol=1e-6)
  np.testing.assert_allclose(sums.nats, (nats * weights).sum(), rtol=1e-6)
  correct = (logits.argmax(-1) == targets) * weights
  assert float(sums.num_correct) == correct.sum()
  assert float(sums.weight) == weights.sum()


def test_label_smoothing_is_a_divergence_from_the_smoothed_labels(batch):
  logits, targets, weights = batch
  smoothing = 0.1
  sums = losses.cross_entropy(
    *map(jnp.asarray, batch), label_smoothing=smoothing
  )
  labels = np.full((*targets.shape, V), smoothing / (V - 1))
  np.put_along_axis(labels, targets[..., None], 1 - smoothing, -1)
  divergence = (labels * (np.log(labels) - log_softmax(logits))).sum(-1)
  np.testing.assert_allclose(sums.loss, (divergence * weights).sum(), rtol=1e-5)


def test_z_loss_is_the_square_of_the_log_normaliser(batch):
  logits, _, weights = batch
  plain = losses.cross_entropy(*map(jnp.asarray, batch))
  with_z = losses.cross_entropy(*map(jnp.asarray, batch), z_loss=0.1)
  squares = np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2
  np.testing.assert_allclose(
    with_z.loss - plain.loss, 0.1 * (squares * weights).sum(), rtol=1e-5
  )
  np.testing.assert_allclose(with_z.nats, plain.nats)


def reference(kind, p, q, beta):
  kl = lambda a, b: (a * np.log(a / b)).sum(-1)
  mixture = beta * p + (1 - beta) * q
  return {
    'forward_kl': kl(p, q),
    'reverse_kl': kl(q, p),
    'jsd': beta * kl(p, mixture) + (1 - beta) * kl(q, mixture),
    'tvd': 1 - np.minimum(p, q).sum(-1),
  }[kind]


@pytest.mark.parametrize('kind', losses.DIVERGENCES)
@pytest.mark.parametrize('beta', [0.5, 0.1])
def test_divergences(batch, kind, beta):
  target, draft = batch[0], batch[0][::-1] * 0.5
  found = losses.divergence(
    jnp.asarray(target), jnp.asarray(draft), kind=kind, beta=beta
  )
  p, q = np.exp(log_softmax(target)), np.exp(log_softmax(draft))
  np.testing.assert_allclose(
    found, reference(kind, p, q, beta), rtol=1e-4, atol=1e-6
  )


@pytest.mark.parametrize('kind', losses.DIVERGENCES)
def test_equal_distributions_have_no_divergence_and_no_gradient(batch, kind):
  target = jnp.asarray(batch[0])

  def total(draft):
    return losses.divergence(target, draft, kind=kind).sum()

  # The same distribution from other logits.
  value, gradient = jax.value_and_grad(total)(target + 1.0)
  np.testing.assert_allclose(value, 0, atol=1e-5)
  if kind != 'tvd':  # Which has a kink there.
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


@pytest.mark.parametrize('kind', losses.DIVERGENCES)
def test_divergences_have_the_gradients_of_their_definitions(batch, kind):
  target, draft = batch[0][0, 0], batch[0][1, 1] * 0.5
  p = np.exp(log_softmax(target))

  def slope(i, step=1e-5):
    ends = [
      reference(
        kind, p, np.exp(log_softmax(draft + sign * step * np.eye(V)[i])), 0.5
      )
      for sign in (1, -1)
    ]
    return (ends[0] - ends[1]) / (2 * step)

  gradient = jax.grad(
    lambda q: losses.divergence(jnp.asarray(target), q, kind=kind)
  )(jnp.asarray(draft))
  expected = [slope(i) for i in range(V)]
  np.testing.assert_allclose(gradient, expected, atol=2e-4)
  assert np.abs(expected).max() > 1e-2


def test_wrong_divergences_are_refused(batch):
  logits = jnp.asarray(batch[0])
  with pytest.raises(ValueError, match="'kl'"):
    losses.divergence(logits, logits, kind='kl')
  with pytest.raises(ValueError, match='0 and 1, got 1'):
    losses.divergence(logits, logits, kind='jsd', beta=1)
