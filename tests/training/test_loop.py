"""Runs: killed and resumed, gone astray, full disks, and one that learns."""

import collections
import contextlib
import dataclasses
import errno
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import orbax, stored_arrays
from specdec_jax.launch import processes
from specdec_jax.training import (
  loop,
  losses,
  optimizers,
  run_checkpoints,
)
from specdec_jax.training.data.datasets import Dataset
from specdec_jax.training.losses import LossSums
from tests import slow
from tests.training import tiny_runs

CONFIG = dataclasses.replace(tiny_runs.CONFIG, dropout_rate=0.1)
OPTIMIZER = optimizers.adamw(0.003)
LOSS_FN = losses.supervised_loss(CONFIG)


class Killed(Exception):
  """Raised where a kill would strike."""


@pytest.fixture(scope='module', autouse=True)
def one_compilation():
  """All runs here have one step; `jax.jit` of it is made once."""
  patch = pytest.MonkeyPatch()
  original = jax.jit
  jitted = {}

  def jit(function, **settings):
    if getattr(function, 'func', None) is loop.step:
      key = function.keywords['loss_fn']
      if key not in jitted:
        jitted[key] = original(function, **settings)
      return jitted[key]
    return original(function, **settings)

  patch.setattr(jax, 'jit', jit)
  yield
  patch.undo()


def train(
  folder,
  *,
  steps,
  dataset=None,
  kill_at=None,
  loss_fn=LOSS_FN,
  say=lambda sentence: None,
  **kw,
):
  """Losses by step, and the parameters."""
  losses = collections.OrderedDict()

  def report(step, metrics):
    if 'loss' in metrics:
      losses[step] = metrics['loss']
    if step == kill_at:
      raise Killed

  schedule = {'eval_period': 100, 'checkpoint_period': 3, **kw}
  params = None
  with contextlib.suppress(Killed):
    params = loop.train(
      config=CONFIG,
      dataset=dataset or tiny_runs.dataset()._replace(validation=None),
      optimizer=OPTIMIZER,
      loss_fn=loss_fn,
      model_dir=folder,
      schedule=loop.Schedule(train_steps=steps, **schedule),
      report=report,
      say=say,
    )
  return losses, params


@pytest.fixture(scope='module')
def unbroken(tmp_path_factory):
  return train(tmp_path_factory.mktemp('unbroken'), steps=10)


@slow.parametrize('kill_at', [2, 5, 9], now=[5])
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, unbroken, kill_at):
  before, _ = train(tmp_path, steps=10, kill_at=kill_at)
  after, params = train(tmp_path, steps=10)
  assert list(after) == list(range((kill_at - 1) // 3 * 3 + 1, 11))
  for step, loss in {**before, **after}.items():
    np.testing.assert_allclose(loss, unbroken[0][step], rtol=0, atol=1e-6)
  jax.tree.map(np.testing.assert_array_equal, params, unbroken[1])


def test_a_finished_run_takes_no_more_steps_and_says_so(tmp_path, unbroken):
  train(tmp_path, steps=10)
  said = []
  losses, params = train(tmp_path, steps=10, say=said.append)
  assert not losses
  assert said == [
    f'{tmp_path}: the run has 10 steps and train_steps is 10, so nothing is '
    'left to train'
  ]
  jax.tree.map(np.testing.assert_array_equal, params, unbroken[1])


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
  """A NaN in the data stops before anything of it is written."""
  good = tiny_runs.dataset()

  def batch(position):
    features = dict(good.batch(position))
    if position == 4:
      weights = features['decoder_loss_weights']
      features['decoder_loss_weights'] = np.full_like(weights, np.nan)
    return features

  with pytest.raises(ValueError, match='step 5, batch 4') as error:
    train(tmp_path, steps=10, dataset=Dataset(batch))
  assert 'checkpoint of step 3' in str(error.value)
  with run_checkpoints.open_run(tmp_path, CONFIG) as checkpoints:
    assert checkpoints.steps() == [3]
    run = checkpoints.restore(loop.new_run(CONFIG, OPTIMIZER, seed=0), 3)
  assert int(run.step) == 3
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(run.params))


def test_a_gradient_that_is_no_number_stops_the_run(tmp_path):
  def kinked(params, batch, key):
    del batch, key
    zero = jnp.sqrt(sum(x.sum() * 0 for x in jax.tree.leaves(params)))
    one = jnp.ones(())
    return LossSums(loss=zero, nats=zero, num_correct=zero, weight=one)

  with pytest.raises(ValueError, match=r'batch 0.*grad_norm nan'):
    train(tmp_path, steps=10, loss_fn=kinked)


def test_ids_that_the_network_has_not_are_refused(tmp_path):
  dataset = tiny_runs.dataset()._replace(num_ids=17)
  with pytest.raises(ValueError, match=r'up to 16.*network 16'):
    train(tmp_path, steps=1, dataset=dataset)


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
  with run_checkpoints.open_run(tmp_path, CONFIG):
    pass
  wider = dataclasses.replace(CONFIG, mlp_dim=96)
  with (
    pytest.raises(ValueError, match=r'mlp_dim 64.*96'),
    run_checkpoints.open_run(tmp_path, wider),
  ):
    pass


@pytest.mark.slow
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
  train(tmp_path, steps=3)
  other = loop.new_run(CONFIG, optimizers.adafactor(0.1), seed=0)
  with (
    run_checkpoints.open_run(tmp_path, CONFIG) as checkpoints,
    pytest.raises(ValueError, match='another configuration'),
  ):
    checkpoints.restore(other, 3)


def damage(checkpoint):
  """Cuts the largest file of a checkpoint in half, as a full disk may."""
  files = [path for path in checkpoint.rglob('*') if path.is_file()]
  largest = max(files, key=lambda path: path.stat().st_size)
  largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(
  tmp_path, unbroken
):
  train(tmp_path, steps=9)
  damage(tmp_path / 'checkpoints/9')
  said = []
  losses, params = train(tmp_path, steps=10, say=said.append)
  assert list(losses) == [7, 8, 9, 10]
  jax.tree.map(np.testing.assert_array_equal, params, unbroken[1])
  assert 'of step 9 cannot be read and is now damaged_checkpoint_9' in said[0]
  assert said[1] == f'{tmp_path}: training resumes after step 6'
  assert (tmp_path / 'damaged_checkpoint_9').is_dir()
  with run_checkpoints.open_run(tmp_path, CONFIG) as checkpoints:
    assert checkpoints.steps() == [6, 9, 10]
    run = checkpoints.restore(loop.new_run(CONFIG, OPTIMIZER, seed=0), 9)
  assert int(run.step) == 9


def test_a_checkpoint_of_other_values_is_put_aside(tmp_path, unbroken):
  """As a flipped bit can leave it: it can be read."""
  tensorstore = stored_arrays.import_tensorstore()
  train(tmp_path, steps=9)
  arrays = orbax.open_tree(tmp_path / 'checkpoints/9/default')
  spec = arrays['params/encoder/encoder_norm/scale'].spec()
  array = tensorstore.open(spec, open=True, read=True, write=True).result()
  array[3].write(-array[3].read().result()).result()
  said = []
  losses, params = train(tmp_path, steps=10, say=said.append)
  assert 'of step 9 cannot be read and is now damaged_checkpoint_9' in said[0]
  assert 'not those that were written' in said[0]
  assert list(losses) == [7, 8, 9, 10]
  jax.tree.map(np.testing.assert_array_equal, params, unbroken[1])


def test_a_checkpoint_without_a_digest_is_read(tmp_path):
  """As earlier versions wrote them."""
  train(tmp_path, steps=3)
  with run_checkpoints.open_run(tmp_path, CONFIG) as checkpoints:
    run = checkpoints.restore(loop.new_run(CONFIG, OPTIMIZER, seed=0), 3)
    tree = run_checkpoints._as_tree(run)
    checkpoints.manager.delete(3)
    args = orbax.import_orbax().args.StandardSave(tree)
    checkpoints.manager.save(3, args=args)
  arrays = orbax.open_tree(tmp_path / 'checkpoints/3/default')
  assert 'step' in arrays
  assert 'digest' not in arrays
  assert list(train(tmp_path, steps=4)[0]) == [4]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int8', 'bool'])
def test_every_element_counts_in_a_digest(dtype):
  """In its place; only zeros have no sign."""
  values = np.arange(24).reshape(2, 3, 4) % 2
  tree = {'a': values, 'b': np.ones(5)}
  changed = values.copy()
  changed[1, 2, 3] = 0
  others = (
    tree | {'a': changed},
    tree | {'a': values[..., ::-1]},
    {'a': tree['b'], 'b': values},
  )

  def digest(tree):
    arrays = jax.tree.map(lambda x: jnp.asarray(x.astype(dtype)), tree)
    return tuple(np.asarray(run_checkpoints.digest(arrays)).tolist())

  assert len({digest(each) for each in (tree, *others)}) == 4
  zeros = {'a': np.zeros(3)}
  assert digest(zeros) == digest({'a': np.negative(zeros['a'])})


def test_a_stopped_run_goes_on_as_if_unbroken(tmp_path, unbroken, monkeypatch):
  """Its checkpoint between two regular ones is no part of an average, and takes
  the place of none."""
  whole = tmp_path / 'whole', tmp_path / 'stopped'
  expected = train(whole[0], steps=10, keep=2, average_last=2)
  said, calls = [], itertools.count(1)
  with monkeypatch.context() as patch:
    patch.setattr(processes, 'is_ending', lambda: next(calls) == 8)
    losses, params = train(
      whole[1], steps=10, keep=2, average_last=2, say=said.append
    )
  assert params is None
  assert list(losses) == list(range(1, 9))
  assert said == [
    'this job was asked to end (SIGTERM): the same command resumes after step '
    '8, of which there is a checkpoint'
  ]
  with run_checkpoints.open_run(whole[1], CONFIG, keep=2) as checkpoints:
    assert checkpoints.steps() == [3, 6, 8]
    assert checkpoints.regular_steps() == [3, 6]
  losses, params = train(whole[1], steps=10, keep=2, average_last=2)
  assert list(losses) == [9, 10]
  jax.tree.map(np.testing.assert_array_equal, params, expected[1])
  for folder in whole:
    with run_checkpoints.open_run(folder, CONFIG, keep=2) as checkpoints:
      assert checkpoints.steps() == [9, 10]


def test_a_run_with_no_sound_checkpoint_is_left_alone(tmp_path):
  train(tmp_path, steps=6)
  for step in (3, 6):
    damage(tmp_path / f'checkpoints/{step}')
  with pytest.raises(ValueError, match=r'step 6.*another configur'):
    train(tmp_path, steps=10)
  with run_checkpoints.open_run(tmp_path, CONFIG) as checkpoints:
    assert checkpoints.steps() == [3, 6]


def test_one_run_at_a_time_trains_in_a_folder(tmp_path):
  with (
    run_checkpoints.open_run(tmp_path, CONFIG),
    pytest.raises(
      ValueError, match=rf'process \d+ on .* is writing {tmp_path}'
    ),
  ):
    train(tmp_path, steps=3)
  assert list(train(tmp_path, steps=3)[0]) == [1, 2, 3]


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
  train(tmp_path, steps=3)
  usage = collections.namedtuple('usage', 'total used free')
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage(1, 1, 1000))
  with pytest.raises(OSError, match='1,000 free') as error:
    train(tmp_path, steps=6)
  assert error.value.errno == errno.ENOSPC
  with run_checkpoints.open_run(tmp_path, CONFIG) as checkpoints:
    assert checkpoints.steps() == [3]


def test_a_checkpoint_too_many_is_deleted_at_the_end(tmp_path):
  """As a kill leaves it, between writing one and deleting another."""
  train(tmp_path, steps=9)
  with run_checkpoints.open_run(tmp_path, CONFIG, keep=2) as checkpoints:
    assert checkpoints.steps() == [3, 6, 9]
  with run_checkpoints.open_run(tmp_path, CONFIG) as checkpoints:
    assert checkpoints.steps() == [6, 9]


def test_averages_are_means_of_the_newest(tmp_path):
  train(tmp_path, steps=9)
  like = loop.new_run(CONFIG, OPTIMIZER, seed=0)
  with run_checkpoints.open_run(tmp_path, CONFIG) as checkpoints:
    assert checkpoints.steps() == [3, 6, 9]
    kept = [checkpoints.restore(like, step).params for step in (6, 9)]
    mean = run_checkpoints.average(checkpoints, like, last=2)
    jax.tree.map(
      lambda m, a, b: np.testing.assert_allclose(m, (a + b) / 2, rtol=1e-6),
      mean,
      *kept,
    )


@pytest.mark.slow
def test_a_toy_is_learned(tmp_path):
  """Letters moved up by one, 98% right, on unseen packings of 400 examples."""
  found = {}
  loop.train(
    config=tiny_runs.CONFIG,
    dataset=tiny_runs.dataset(batch_size=32),
    optimizer=optimizers.adamw(
      optimizers.learning_rate(
        'constant * linear_warmup', base_learning_rate=0.01, warmup_steps=50
      )
    ),
    loss_fn=losses.supervised_loss(tiny_runs.CONFIG),
    model_dir=tmp_path,
    schedule=loop.Schedule(train_steps=300, checkpoint_period=300),
    report=lambda step, metrics: found.update(metrics),
  )
  assert found['validation_accuracy'] > 0.98
  assert found['validation_nats'] < 0.1
