"""The training step, and the loop around it: data, validation, checkpoints."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax.base import Array
from specdec_jax.launch import processes
from specdec_jax.models import families
from specdec_jax.models.families import DrafterConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.sharding import mesh as meshes
from specdec_jax.sharding import rules
from specdec_jax.training import run_checkpoints
from specdec_jax.training.data.datasets import Dataset
from specdec_jax.training.losses import ArrayTree, Batch, LossFn, LossSums
from specdec_jax.training.run_checkpoints import Checkpoints, Run

# `(step, metrics)`, of every step and, as `validation_...`, every validation.
Report = Callable[[int, Mapping[str, float]], None]

# Coverage is a probability; this leaves room for rounding.
_MOST_COVERAGE = 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """When a run does what, in steps.

  Attributes:
    train_steps: where it ends.
    eval_period: from one validation to the next.
    checkpoint_period: from one checkpoint to the next.
    log_period: steps that a line of metrics averages, up to a checkpoint.
    keep: newest checkpoints that are kept.
    average_last: newest checkpoints whose mean is the model.
  """

  train_steps: int
  eval_period: int = 1000
  checkpoint_period: int = 1000
  log_period: int = 50
  keep: int = 3
  average_last: int = 1

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if (value := getattr(self, field.name)) < 1:
        raise ValueError(f'{field.name} must be at least 1, got {value}')
    if self.average_last > self.keep:
      raise ValueError(
        f'average_last {self.average_last} is not among the {self.keep} '
        'checkpoints that are kept'
      )

  def is_due(self, step: int, period: int) -> bool:
    """Tells whether what is done every `period` steps, and last, is due."""
    return step == self.train_steps or step % period == 0


def step(
  run: Run,
  batch: Batch,
  *,
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  num_microbatches: int = 1,
) -> tuple[Run, dict[str, Array]]:
  """Takes a step on a batch's mean loss, computed in `num_microbatches` parts.

  Returns the run after it, and float32 scalars: `loss`, `nats` and `accuracy`
  per target, `weight` of the targets, `grad_norm`, and the loss's own figures.
  """
  key = jax.random.fold_in(run.rng_key, run.step)
  grads, sums = _gradients(loss_fn, run.params, batch, key, num_microbatches)
  scale = 1.0 / jnp.maximum(sums.weight, 1.0)
  grads = jax.tree.map(lambda g: g * scale, grads)
  trained, fixed = run_checkpoints.partition(run.params)
  with jax.numpy_dtype_promotion('standard'):  # optax counts on it.
    updates, opt_state = optimizer.update(grads, run.opt_state, trained)
  trained = jax.tree.map(lambda p, u: p + u, trained, updates)
  params = run_checkpoints.combine(trained, fixed)
  metrics = {
    'loss': sums.loss * scale,
    'nats': sums.nats * scale,
    'accuracy': sums.num_correct * scale,
    'weight': sums.weight,
    # Of the mean loss's gradient, before the optimiser clips it.
    'grad_norm': optax.tree.norm(grads),
    **sums.means(),
  }
  run = dataclasses.replace(
    run, step=run.step + 1, params=params, opt_state=opt_state
  )
  return run, metrics


def _gradients(
  loss_fn: LossFn, params: ArrayTree, batch: Batch, key: Array, parts: int
) -> tuple[ArrayTree, LossSums]:
  """Computes gradients and sums of a batch, added up over its `parts`."""
  trained, fixed = run_checkpoints.partition(params)

  def part_gradients(part: Batch, part_key: Array):
    def loss_of(trained):
      params = run_checkpoints.combine(trained, fixed)
      sums = loss_fn(params, part, part_key)
      return sums.loss, sums

    return jax.grad(loss_of, has_aux=True)(trained)

  if parts == 1:
    return part_gradients(batch, jax.random.fold_in(key, 0))
  size = batch['decoder_target_tokens'].shape[0]
  if parts < 1 or size % parts:
    raise ValueError(f'{size} rows do not divide into {parts} microbatches')
  # Interleaved, so that every part has some of every device's rows: of rows 0
  # to 5 in two parts, [0, 2, 4] and [1, 3, 5].
  split = jax.tree.map(
    lambda x: x.reshape(size // parts, parts, *x.shape[1:]).swapaxes(0, 1),
    dict(batch),
  )

  def body(total, part_and_index):
    part, index = part_and_index
    part = jax.tree.map(
      lambda x: rules.constrain(x, 'batch', *(None,) * (x.ndim - 1)), part
    )
    found = part_gradients(part, jax.random.fold_in(key, index))
    return jax.tree.map(jnp.add, total, found), None

  first = jax.tree.map(lambda x: x[0], split)
  shapes = jax.eval_shape(part_gradients, first, key)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  indices = jnp.arange(parts, dtype=jnp.int32)
  return jax.lax.scan(body, zeros, (split, indices))[0]


def train(
  *,
  config: T5Config | DrafterConfig,
  dataset: Dataset,
  optimizer: optax.GradientTransformation,
  loss_fn: LossFn,
  model_dir: str | os.PathLike[str],
  schedule: Schedule,
  num_microbatches: int = 1,
  seed: int = 0,
  initial_params: ArrayTree = None,
  settings: Mapping[str, str] | None = None,
  report: Report = lambda step, metrics: None,
  say: Callable[[str], None] = lambda sentence: None,
) -> ArrayTree | None:
  """Trains until `schedule.train_steps`, from where the folder's run stopped.

  A run that was killed goes on from its last checkpoint with the losses that it
  would have had. With a mesh set (`jax.set_mesh`), rows are split over `data`
  and parameters over `model`; see `sharding.rules`.

  Args:
    loss_fn: what is minimised, per target.
    initial_params: where a new run begins; None draws those of a T5.
    settings: by name, what the steps depend on: a run that goes on with others
      says so.
    report: told of every step.
    say: told, in a sentence each, what else a user should know: where a run
      goes on, that nothing is left to do, that a checkpoint is damaged.

  Returns the parameters; None if several processes were asked to end
  (`processes.is_ending`), after a checkpoint. Raises ValueError if the loss or
  the gradient is NaN or infinite (the last checkpoint is from before that), if
  the folder is of another run, or if another process trains in it; OSError if
  the disk is full.
  """
  _check_ids(dataset, config)
  step_fn = functools.partial(
    step,
    loss_fn=loss_fn,
    optimizer=optimizer,
    num_microbatches=num_microbatches,
  )
  opened = run_checkpoints.open_run(
    model_dir, config, vocabulary=dataset.vocabulary, keep=schedule.keep
  )
  with opened as checkpoints:
    run = new_run(config, optimizer, seed=seed, params=initial_params)
    run = run_checkpoints.place_run(run, optimizer)
    if restored := checkpoints.restore_newest(run, say):
      run = restored
      say(f'{checkpoints.folder}: {_what_is_left(run, schedule)}')
    if settings is not None:
      tell = functools.partial(checkpoints.tell_changes, settings, say)
      processes.ask_first(tell)
    _check_averaged(run, schedule, checkpoints)
    run = _train_from(
      run,
      dataset,
      jax.jit(step_fn, donate_argnums=0),
      schedule,
      checkpoints,
      report,
      loss_fn,
    )
    if int(run.step) < schedule.train_steps:
      say(
        'this job was asked to end (SIGTERM): the same command goes on after '
        f'step {int(run.step):,}, of which there is a checkpoint'
      )
      return None
    if schedule.average_last == 1:
      return run.params
    return run_checkpoints.average(checkpoints, run, last=schedule.average_last)


def _check_ids(dataset: Dataset, config: T5Config | DrafterConfig) -> None:
  """Raises ValueError for ids that the network has no embedding of."""
  vocab_size = getattr(config, 'vocab_size', None)
  if vocab_size and dataset.num_ids and dataset.num_ids > vocab_size:
    raise ValueError(
      f'the data has token ids up to {dataset.num_ids - 1}, the network '
      f'{vocab_size} tokens'
    )


def _what_is_left(run: Run, schedule: Schedule) -> str:
  taken, end = int(run.step), schedule.train_steps
  if taken < end:
    return f'training goes on after step {taken:,}'
  return (
    f'{taken:,} steps have been taken already and {end:,} are asked for, so '
    'nothing is left to train'
  )


def _check_averaged(
  run: Run, schedule: Schedule, checkpoints: Checkpoints
) -> None:
  """Raises ValueError unless the run leaves enough checkpoints to average."""
  to_come = range(int(run.step) + 1, schedule.train_steps + 1)
  is_saved = lambda step: schedule.is_due(step, schedule.checkpoint_period)
  count = len(checkpoints.regular_steps()) + sum(map(is_saved, to_come))
  if count < schedule.average_last:
    raise ValueError(
      f'average_last is {schedule.average_last}, and {schedule.train_steps} '
      f'steps with a checkpoint_period of {schedule.checkpoint_period} leave '
      f'only {count}'
    )


def new_run(
  config: T5Config | DrafterConfig,
  optimizer: optax.GradientTransformation,
  *,
  seed: int,
  params: ArrayTree = None,
) -> Run:
  """Makes a run before its first step; only a T5 can be drawn."""
  rng_key = jax.random.key(seed)
  if params is None:
    family = families.of(config)
    if families.only_drafts(config):
      raise ValueError(f'a {family.name} has to be given its first parameters')
    init_key = jax.random.fold_in(rng_key, -1 % 2**32)
    params = jax.jit(families.init_params, static_argnums=0)(config, init_key)
  return Run(
    step=jnp.zeros((), jnp.int32),
    # A copy: steps overwrite what they are given.
    params=jax.tree.map(jnp.copy, params),
    opt_state=optimizer.init(run_checkpoints.partition(params)[0]),
    rng_key=rng_key,
  )


def _train_from(
  run: Run,
  dataset: Dataset,
  step_fn: Callable[..., tuple[Run, Mapping[str, Array]]],
  schedule: Schedule,
  checkpoints: Checkpoints,
  report: Report,
  loss_fn: LossFn,
) -> Run:
  evaluate = jax.jit(lambda params, batch: loss_fn(params, batch, None))
  # Step n reads batch n, counted from 0: no other state of the data is kept.
  for position in range(int(run.step), schedule.train_steps):
    taken, started = position + 1, time.perf_counter()
    if dataset.prepare is not None:
      dataset.prepare(position, run.params)
    batch = meshes.place_batch(dataset.batch(position))
    run, found = step_fn(run, batch)
    metrics = {name: float(value) for name, value in found.items()}
    if wrong := _what_is_wrong(metrics):  # Before its state is written.
      kept = checkpoints.steps()
      newest = f'the checkpoint of step {kept[-1]}' if kept else 'no checkpoint'
      raise ValueError(
        f'training stopped at step {taken}, batch {position}: {wrong}; '
        f'{newest} in {checkpoints.folder} is from before it'
      )
    metrics['seconds'] = time.perf_counter() - started
    report(taken, metrics)
    if dataset.validation and schedule.is_due(taken, schedule.eval_period):
      report(taken, validate(evaluate, run.params, dataset))
    # Last: what is reported of a step is not reported again after it.
    is_due = schedule.is_due(taken, schedule.checkpoint_period)
    is_ending = processes.is_ending()
    if is_due or is_ending:
      checkpoints.save(run, is_extra=not is_due)
    if is_ending:
      break
  return run


def _what_is_wrong(metrics: Mapping[str, float]) -> str:
  """Says which metrics of a step cannot be; empty if they all can."""
  checked = {name: metrics[name] for name in ('loss', 'grad_norm')}
  wrong = [f'{k} {x}' for k, x in checked.items() if not math.isfinite(x)]
  if metrics.get('coverage', 0.0) > _MOST_COVERAGE:
    wrong.append(
      f'coverage {metrics["coverage"]:.2f}, a probability: another model '
      'than the target wrote these texts'
    )
  return ' and '.join(wrong)


def validate(
  evaluate: Callable, params: ArrayTree, dataset: Dataset
) -> dict[str, float]:
  """Computes nats, accuracy and the loss's own figures over the whole split."""
  assert dataset.validation is not None
  # In float64: a split has more targets than float32 can count one by one.
  batches = map(meshes.place_batch, dataset.validation())
  sums = (jax.device_get(evaluate(params, batch)) for batch in batches)
  found = [jax.tree.map(np.float64, each) for each in sums]
  # A split without rows has zeros.
  zero = jnp.float32(0)
  nothing = LossSums(loss=zero, nats=zero, num_correct=zero, weight=zero)
  total = jax.tree.map(lambda *each: sum(each), *(found or [nothing]))
  weight = max(total.weight, 1.0)
  figures = {
    f'validation_{name}': float(each / max(each_weight, 1.0))
    for name, (each, each_weight) in total.figures.items()
  }
  return {
    'validation_nats': float(total.nats / weight),
    'validation_accuracy': float(total.num_correct / weight),
    **figures,
  }
