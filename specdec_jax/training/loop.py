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
  """The schedule of a run, in steps.

  Attributes:
    train_steps: the total number of training steps.
    eval_period: steps between validations.
    checkpoint_period: steps between checkpoints.
    log_period: steps that a line of metrics averages, up to a checkpoint.
    keep: the number of newest checkpoints to keep.
    average_last: the number of newest checkpoints whose mean is the model.
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
        f'average_last {self.average_last} exceeds keep {self.keep}, the '
        'number of checkpoints that are kept'
      )

  def is_due(self, step: int, period: int) -> bool:
    """Tells whether a step is the last one or a multiple of `period`."""
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

  Returns the new run, and float32 scalars: `loss`, `nats` and `accuracy` per
  target, `weight` of the targets, `grad_norm`, and the metrics of the loss.
  """
  key = jax.random.fold_in(run.rng_key, run.step)
  grads, sums = _gradients(loss_fn, run.params, batch, key, num_microbatches)
  scale = 1.0 / jnp.maximum(sums.weight, 1.0)
  grads = jax.tree.map(lambda g: g * scale, grads)
  trained, fixed = run_checkpoints.partition(run.params)
  with jax.numpy_dtype_promotion('standard'):  # optax relies on it.
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
    part_sums = part_gradients(part, jax.random.fold_in(key, index))
    return jax.tree.map(jnp.add, total, part_sums), None

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
  """Trains until `schedule.train_steps`, resuming the run in the folder.

  A run that was killed resumes from its last checkpoint with the losses that it
  would have had. With a mesh set (`jax.set_mesh`), rows are sharded over `data`
  and parameters over `model`; see `sharding.rules`.

  Args:
    loss_fn: the loss to minimise, per target.
    initial_params: of a new run; by default random ones of a T5.
    settings: by name, the settings that affect the steps; a run that resumes
      with others says so.
    report: called with the metrics of every step.
    say: called with a sentence about other events: that a run resumes, that it
      is already complete, that a checkpoint is damaged.

  Returns the parameters; None if several processes were asked to end
  (`processes.is_ending`), after a checkpoint. Raises ValueError if the loss or
  the gradient is NaN or infinite (the last checkpoint is older), if the folder
  has another run, or if another process trains in it; OSError if the disk is
  full.
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
    restored = checkpoints.restore_newest(run, say)
    if restored:
      run = restored
      say(f'{checkpoints.folder}: {_remaining(run, schedule)}')
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
        'this job was asked to end (SIGTERM): the same command resumes after '
        f'step {int(run.step):,}, of which there is a checkpoint'
      )
      return None
    if schedule.average_last == 1:
      return run.params
    return run_checkpoints.average(checkpoints, run, last=schedule.average_last)


def _check_ids(dataset: Dataset, config: T5Config | DrafterConfig) -> None:
  """Raises ValueError for token ids without an embedding."""
  vocab_size = getattr(config, 'vocab_size', None)
  if vocab_size and dataset.num_ids and dataset.num_ids > vocab_size:
    raise ValueError(
      f'the data has token ids up to {dataset.num_ids - 1}, the network '
      f'{vocab_size} tokens'
    )


def _remaining(run: Run, schedule: Schedule) -> str:
  """Describes where a resumed run is in its schedule."""
  step = int(run.step)
  if step < schedule.train_steps:
    return f'training resumes after step {step:,}'
  return (
    f'the run has {step:,} steps and train_steps is {schedule.train_steps:,}, '
    'so nothing is left to train'
  )


def _check_averaged(
  run: Run, schedule: Schedule, checkpoints: Checkpoints
) -> None:
  """Raises ValueError unless there will be enough checkpoints to average."""
  remaining = range(int(run.step) + 1, schedule.train_steps + 1)
  is_saved = lambda step: schedule.is_due(step, schedule.checkpoint_period)
  count = len(checkpoints.regular_steps()) + sum(map(is_saved, remaining))
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
  """Returns a run at step 0; only a T5 can have random parameters."""
  rng_key = jax.random.key(seed)
  if params is None:
    family = families.of(config)
    if families.only_drafts(config):
      raise ValueError(f'a {family.name} needs initial_params')
    init_key = jax.random.fold_in(rng_key, -1 % 2**32)
    params = jax.jit(families.init_params, static_argnums=0)(config, init_key)
  return Run(
    step=jnp.zeros((), jnp.int32),
    # A copy, as steps donate their arguments.
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
  # Step n reads batch n, counted from 0; the data has no other state.
  for position in range(int(run.step), schedule.train_steps):
    step_number = position + 1
    started, processor_started = time.perf_counter(), time.process_time()
    if dataset.prepare is not None:
      dataset.prepare(position, run.params)
    batch = meshes.place_batch(dataset.batch(position))
    run, step_metrics = step_fn(run, batch)
    metrics = {name: float(value) for name, value in step_metrics.items()}
    # Stop before a checkpoint with NaN is written.
    errors = _errors(metrics)
    if errors:
      steps = checkpoints.steps()
      newest = 'no checkpoint'
      if steps:
        newest = f'the checkpoint of step {steps[-1]}'
      raise ValueError(
        f'training stopped at step {step_number}, batch {position}: {errors}; '
        f'{newest} in {checkpoints.folder} is from before it'
      )
    metrics['seconds'] = time.perf_counter() - started
    metrics['processor_seconds'] = time.process_time() - processor_started
    report(step_number, metrics)
    if dataset.validation and schedule.is_due(
      step_number, schedule.eval_period
    ):
      report(step_number, validate(evaluate, run.params, dataset))
    # The checkpoint comes last, so that a resumed run reports no step twice.
    is_due = schedule.is_due(step_number, schedule.checkpoint_period)
    is_ending = processes.is_ending()
    if is_due or is_ending:
      checkpoints.save(run, is_extra=not is_due)
    if is_ending:
      break
  return run


def _errors(metrics: Mapping[str, float]) -> str:
  """Describes the impossible metrics of a step; empty if there are none."""
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
  """Computes nats, accuracy and the metrics of the loss over a split."""
  assert dataset.validation is not None
  # In float64: a split has more targets than float32 can count one by one.
  batches = map(meshes.place_batch, dataset.validation())
  sums = (jax.device_get(evaluate(params, batch)) for batch in batches)
  batch_sums = [jax.tree.map(np.float64, one) for one in sums]
  # A split without rows has zeros.
  zero = jnp.float32(0)
  zeros = LossSums(loss=zero, nats=zero, num_correct=zero, weight=zero)
  total = jax.tree.map(lambda *terms: sum(terms), *(batch_sums or [zeros]))
  weight = max(total.weight, 1.0)
  figures = {
    f'validation_{name}': float(value / max(value_weight, 1.0))
    for name, (value, value_weight) in total.figures.items()
  }
  return {
    'validation_nats': float(total.nats / weight),
    'validation_accuracy': float(total.num_correct / weight),
    **figures,
  }
