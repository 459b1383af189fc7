"""The step: what its loss may and may not depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.models import layers
from specdec_jax.sharding import mesh as meshes
from specdec_jax.training import loop, losses, optimizers, run_checkpoints
from specdec_jax.training.data import training_batches
from tests.training import tiny_runs

LOSS_FN = losses.supervised_loss(
  tiny_runs.CONFIG, label_smoothing=0.1, z_loss=1e-3
)
OPTIMIZER = optimizers.adafactor(0.01)


@pytest.fixture(scope='module')
def run():
  return loop.new_run(tiny_runs.CONFIG, OPTIMIZER, seed=0)


@pytest.fixture(scope='module')
def batch():
  return tiny_runs.dataset(count=200).batch(0)


def step(run, batch, **settings):
  function = jax.jit(
    functools.partial(
      loop.step, loss_fn=LOSS_FN, optimizer=OPTIMIZER, **settings
    )
  )
  run, metrics = function(run, meshes.place_batch(batch))
  return jax.tree.map(np.asarray, (run.params, metrics))


@pytest.fixture(scope='module')
def plain(run, batch):
  return step(run, batch)


def assert_same(found, expected):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    found,
    expected,
  )


def test_packed_examples_have_the_loss_of_lone_ones(run):
  loss_fn = jax.jit(lambda params, batch: LOSS_FN(params, batch, None))

  def total(max_examples):
    rows = tiny_runs.rows(32, max_examples=max_examples)
    num_rows = training_batches.num_rows(rows)
    sums = loss_fn(run.params, meshes.place_batch(rows))
    return num_rows, float(sums.weight), float(sums.loss)

  packed_rows, packed_weight, packed_loss = total(None)
  lone_rows, lone_weight, lone_loss = total(1)
  assert packed_rows < lone_rows / 2
  assert packed_weight == lone_weight
  np.testing.assert_allclose(packed_loss, lone_loss, rtol=1e-5)


@pytest.mark.slow
def test_microbatches_are_one_batch(run, batch, plain):
  assert_same(step(run, batch, num_microbatches=4), plain)


@pytest.mark.parametrize('parts', [3, 0])
def test_microbatches_divide_the_batch(run, batch, parts):
  with pytest.raises(ValueError, match=f'16 rows do not divide into {parts}'):
    step(run, batch, num_microbatches=parts)


@pytest.mark.slow
def test_a_mesh_of_eight_devices_changes_nothing(run, batch, plain):
  with jax.set_mesh(meshes.make(num_partitions=2)):
    placed = run_checkpoints.place_run(run, OPTIMIZER)
    kernel = placed.params['decoder']['logits_dense']['kernel']
    assert kernel.addressable_shards[0].data.shape == (32, 8)
    assert_same(step(placed, batch, num_microbatches=2), plain)


def test_a_batch_that_a_mesh_cannot_split_is_refused(batch):
  few = {name: x[:6] for name, x in batch.items()}
  with (
    jax.set_mesh(meshes.make(num_partitions=2)),
    pytest.raises(ValueError, match=r'6 rows.*4 data'),
  ):
    meshes.place_batch(few)


def test_bfloat16_keeps_float32_parameters(run, batch):
  config = dataclasses.replace(tiny_runs.CONFIG, dtype=jnp.bfloat16)
  rounded = losses.supervised_loss(config)
  grads = jax.eval_shape(
    jax.grad(lambda params: rounded(params, batch, None).loss),
    run.params,
  )
  assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype('float32')}


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_gradients_of_projections_are_those_of_a_product(dtype):
  generator = np.random.default_rng(0)
  x = jnp.asarray(generator.normal(size=(2, 3, 8)), dtype)
  kernel = jnp.asarray(generator.normal(size=(8, 5)), dtype)
  weights = jnp.asarray(generator.normal(size=(2, 3, 5)), jnp.float32)

  def with_dense(x, kernel):
    y = layers.Dense(5).apply({'params': {'kernel': kernel}}, x)
    return (y * weights).sum()

  def with_einsum(x, kernel):
    y = jnp.einsum('bti,io->bto', x, kernel)
    return (y * weights).sum()

  found = jax.grad(with_dense, (0, 1))(x, kernel)
  assert all(gradient.dtype == dtype for gradient in found)
  wide = [array.astype(jnp.float32) for array in (x, kernel)]
  for gradient, expected in zip(
    found, jax.grad(with_einsum, (0, 1))(*wide), strict=True
  ):
    np.testing.assert_allclose(
      gradient.astype(jnp.float32),
      expected,
      rtol=1e-5 if dtype == jnp.float32 else 2e-2,
      atol=1e-5 if dtype == jnp.float32 else 3e-2,
    )


def test_dropout_depends_on_the_step_alone(run, batch):
  config = dataclasses.replace(tiny_runs.CONFIG, dropout_rate=0.5)
  loss_fn = jax.jit(losses.supervised_loss(config))
  batch = meshes.place_batch(batch)
  values = [
    float(loss_fn(run.params, batch, jax.random.fold_in(run.rng_key, i)).loss)
    for i in (1, 1, 2)
  ]
  assert values[0] == values[1] != values[2]


@pytest.mark.parametrize('is_compiled', [True, False])
def test_gradients_of_bfloat16_kernels(is_compiled):
  """Whatever way leads to them, their products are right."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  x, kernel, towards = draw(4, 128, 256), draw(256, 512), draw(4, 128, 512)

  def gradient(x, kernel):
    network = layers.Dense(512)
    loss = lambda kernel: (
      network.apply({'params': {'kernel': kernel}}, x)
      * towards.astype(jnp.float32)
    ).sum()
    return jax.grad(loss)(kernel)

  gradient = jax.jit(gradient) if is_compiled else gradient
  expected = np.einsum('btd,btf->df', *(np.float32(a) for a in (x, towards)))
  np.testing.assert_allclose(
    np.float32(gradient(x, kernel)), expected, rtol=1e-2, atol=0.1
  )
