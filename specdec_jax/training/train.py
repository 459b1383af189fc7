"""Trains a model on token files, as gin files say."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specdec_jax.checkpoints import formats, loading, orbax
from specdec_jax.files import replacing
from specdec_jax.files.paths import user_path
from specdec_jax.launch import (
  agreement,
  failures,
  gin_launch,
  processes,
  progress,
)
from specdec_jax.models import families, presets
from specdec_jax.models.families import DrafterConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.sharding import mesh as meshes
from specdec_jax.text import vocabulary_files
from specdec_jax.text.vocabularies import AnyVocabulary
from specdec_jax.training import loop, losses, metrics_log
from specdec_jax.training.data.datasets import Dataset
from specdec_jax.training.losses import ArrayTree, LossFn

# Names what takes longer than five seconds.
waiting = functools.partial(progress.waiting, notice_after=5.0)


def train(
  *,
  config: T5Config | DrafterConfig,
  dataset: Dataset,
  optimizer: optax.GradientTransformation,
  schedule: loop.Schedule,
  model_dir: str,
  loss: Callable[..., LossFn] = losses.supervised_loss,
  dropout_rate: float = 0.0,
  dtype: str = 'float32',
  num_microbatches: int = 1,
  num_partitions: int | None = None,
  model_parallel_submesh: Sequence[int] | None = None,
  initial_checkpoint_path: str | None = None,
  initial_params: Callable[..., ArrayTree] | None = None,
  vocabulary: str | None = None,
  seed: int = 0,
  settings: Callable[[], Mapping[str, str]] = dict,
  on_begin: Callable[[], None] = lambda: None,
) -> int:
  """Trains a new or resumed run to the end of its schedule, and writes the
  model. Returns the exit status: 75 if several processes were asked to end and
  stopped at a checkpoint, else 0.

  Args:
    model_dir: the run's folder: `checkpoints/`, `metrics.jsonl`, `config.gin`
      and, at the end, `model/`, for `--model` and `specdec infer`.
    loss: `(config)` to the loss function, such as `@eagle.eagle_loss`.
    dtype: of activations, 'float32' or 'bfloat16'; all else is float32.
    num_microbatches: parts in which a batch is computed, to save memory.
    num_partitions: the number of devices that share one copy of the model.
    model_parallel_submesh: the same, as a box of a TPU slice.
    initial_checkpoint_path: the model that a new run starts from.
    initial_params: `(config, key)` to the parameters of a new run, such as
      `@eagle_start.eagle_params`; ignored with a path. By default random ones
      of a T5.
    vocabulary: the SentencePiece model to write next to the weights; by default
      that of the data set.
    seed: of the initial parameters and of dropout.
    settings: returns, by name, the settings besides the data that affect the
      steps; a run that resumes with others says so.
    on_begin: called first, when gin has constructed all arguments.

  Raises ValueError if the arguments contradict each other or the folder's run,
  or the loss is NaN or infinite.
  """
  on_begin()
  if not 0 <= seed < 2**32:
    raise ValueError(f'seed must be from 0 to 2**32 - 1, got {seed}')
  config = _with_dtype(config, dtype, dropout_rate)
  model_vocabulary = _read_vocabulary(vocabulary, dataset, config)
  if vocabulary is not None:
    dataset = dataset._replace(vocabulary=user_path(vocabulary))
  data_digest = {'digest of the data': agreement.of_arrays(dataset.contents)}
  _check_processes(data_digest, initial_checkpoint_path)
  # Weights are read, trained and written in float32, whatever the dtype.
  float32_config = _with_dtype(config, 'float32', 0.0)
  folder = user_path(model_dir)
  with (
    _mesh(num_partitions, model_parallel_submesh),
    _reporting(folder, schedule) as reporting,
  ):
    params_at_start = None
    if initial_checkpoint_path is not None:
      path = loading.locate(initial_checkpoint_path)
      params_at_start = formats.read_whole_params(path, float32_config)
    elif initial_params is not None:
      params_at_start = initial_params(config, jax.random.key(seed))
    params = loop.train(
      config=config,
      dataset=dataset,
      optimizer=optimizer,
      loss_fn=loss(config),
      model_dir=folder,
      schedule=schedule,
      num_microbatches=num_microbatches,
      seed=seed,
      initial_params=params_at_start,
      settings={**settings(), **data_digest},
      report=reporting.report,
      say=reporting.say,
    )
    if params is None:
      reporting.write_mean()
      return failures.EXIT_TRY_AGAIN
  _write(folder / 'model', float32_config, params, model_vocabulary)
  return 0


def _write(
  folder: Path,
  config: T5Config | DrafterConfig,
  params: ArrayTree,
  vocabulary: AnyVocabulary | None,
) -> None:
  """Writes the model, and its vocabulary if it has one."""
  new = replacing.new_folder(folder, overwrite=True)
  with processes.entered_by_first(new) as partial:
    if vocabulary is not None and processes.is_first():
      vocabulary_files.write(partial, vocabulary)
    orbax.save(partial, config, params)
  if processes.is_first():
    progress.show(f'the model is in {folder}')


def _with_dtype(
  config: T5Config | DrafterConfig, dtype: str, dropout_rate: float
) -> T5Config | DrafterConfig:
  """Returns the config with a dtype and, if it has one, a dropout rate."""
  if dtype not in presets.DTYPES:
    names = ' or '.join(presets.DTYPES)
    raise ValueError(f'dtype is {dtype!r}, expected {names}')
  fields: dict[str, Any] = {'dtype': jnp.dtype(dtype)}
  if hasattr(config, 'dropout_rate'):
    losses.check_share('dropout_rate', dropout_rate)
    fields['dropout_rate'] = dropout_rate
  elif dropout_rate:
    raise ValueError(
      f'dropout_rate is {dropout_rate}, and a {families.of(config).name} '
      'has no dropout'
    )
  return dataclasses.replace(config, **fields)


def _check_processes(
  data_digest: Mapping[str, str], checkpoint: str | None
) -> None:
  """Raises ValueError unless all processes have the same data and weights."""
  if jax.process_count() == 1:
    return
  digests = dict(data_digest)
  if checkpoint is not None:
    parts = formats.parts(loading.locate(checkpoint))
    digests['digest of the first weights'] = agreement.of_files(parts)
  agreement.check_everywhere(digests)


def _read_vocabulary(
  path: str | None, dataset: Dataset, config: T5Config | DrafterConfig
) -> AnyVocabulary | None:
  """Reads the vocabulary of the model; None for a drafter without one."""
  if not families.of(config).has_vocabulary:
    if path is not None:
      raise ValueError('heads have no vocabulary: leave vocabulary out')
    return None
  model_path = dataset.vocabulary if path is None else user_path(path)
  if model_path is None and families.only_drafts(config):
    return None
  if model_path is None:
    raise ValueError(
      'the data comes without a vocabulary, which a model needs: pass the '
      'SentencePiece model, '
      '--gin.VOCABULARY=\'"FILE"\', or prepare the token files again'
    )
  vocabulary = vocabulary_files.read(model_path, extra_ids=dataset.extra_ids)
  loading.check_vocabulary(model_path, vocabulary, config)
  return vocabulary


def _mesh(
  num_partitions: int | None, submesh: Sequence[int] | None
) -> AbstractContextManager:
  """Sets the mesh of all devices; none for a single one."""
  if jax.device_count() == 1 and num_partitions is None and submesh is None:
    return contextlib.nullcontext()
  return jax.set_mesh(
    meshes.make(num_partitions=num_partitions, model_parallel_submesh=submesh)
  )


class _Reporting(NamedTuple):
  """Functions that report metrics, as means over steps; that print sentences;
  and that write the mean of the steps so far, when a run is stopped."""

  report: loop.Report
  say: Callable[[str], None]
  write_mean: Callable[[], None]


@contextlib.contextmanager
def _reporting(folder: Path, schedule: loop.Schedule) -> Iterator[_Reporting]:
  # A mean also ends at a checkpoint, so that a resumed run writes the same
  # lines as an uninterrupted one. Of several processes only the first reports.
  with contextlib.ExitStack() as stack:
    bar: progress.Bar | None = None
    write: loop.Report | None = None
    since: list[Mapping[str, float]] = []
    last_step = 0
    compiling = stack.enter_context(contextlib.ExitStack())

    def wait() -> None:
      compiling.enter_context(waiting('preparing and compiling the first step'))

    def say(sentence: str) -> None:
      if not processes.is_first():
        return
      if bar is not None:
        with bar.hidden():
          progress.show(sentence)
        return
      compiling.close()
      progress.show(sentence)
      wait()

    def report(step: int, metrics: Mapping[str, float]) -> None:
      nonlocal bar, write, last_step
      last_step = step
      if bar is None:
        compiling.close()
        new_bar = progress.bar(
          'training', schedule.train_steps, is_shown=processes.is_first()
        )
        bar = stack.enter_context(new_bar)
        bar.advance(step - 1)  # The steps before a resumed run.
        if processes.is_first():
          log = metrics_log.open_log(folder, step=step - 1)
          write = stack.enter_context(log)
          # Every binding that the run uses, defaults included.
          text = gin_launch.operative_config()
          replacing.write_text(folder / 'config.gin', text)
      if 'loss' not in metrics:
        write_line(metrics)
        return
      bar.advance(1)
      since.append(metrics)
      periods = schedule.log_period, schedule.checkpoint_period
      if any(schedule.is_due(step, period) for period in periods):
        write_mean()

    def write_mean() -> None:
      if since:
        metrics = _mean(since)
        since.clear()
        write_line(metrics)

    def write_line(metrics: Mapping[str, float]) -> None:
      if write is not None:
        write(last_step, metrics)
        figures = (f'{name} {value:.4g}' for name, value in metrics.items())
        say(f'step {last_step:,}  {"  ".join(figures)}')

    wait()
    yield _Reporting(report, say, write_mean)


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
  # Steps of more targets count for more, as in the loss of one large batch.
  weight = sum(row['weight'] for row in rows)
  seconds = sum(row['seconds'] for row in rows)
  # Of all cores, for this process: other work on the machine hardly counts.
  processor_seconds = sum(row['processor_seconds'] for row in rows)
  common = ('loss', 'nats', 'accuracy')
  of_steps = ('grad_norm', 'weight', 'seconds', 'processor_seconds')
  # The metrics of this loss.
  extra = sorted(rows[0].keys() - {*common, *of_steps})
  per_target = {
    name: sum(row[name] * row['weight'] for row in rows) / max(weight, 1.0)
    for name in (*common, *extra)
  }
  return {
    **per_target,
    'grad_norm': sum(row['grad_norm'] for row in rows) / len(rows),
    'targets': weight,
    'targets_per_second': weight / max(seconds, 1e-9),
    'targets_per_processor_second': weight / max(processor_seconds, 1e-9),
  }
