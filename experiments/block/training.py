"""Trains a recipe for some minutes of processor time."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.block.recipes import Recipe
from specdec_jax.checkpoints import loading
from specdec_jax.training import metrics_log

# Steps of a trial that tells the time of a step, and of a line of the log.
_FIRST_STEPS, LOG_PERIOD = 20, 5
# The rate is constant after warm-up, since the number of steps is not known
# before; the model is the mean of three checkpoints of the last quarter.
SCHEDULE, WARMUP_STEPS = 'constant * linear_warmup', 20
NUM_AVERAGED, _NUM_CHECKPOINTS = 3, 8
_DONE = 'done'
# More steps than this times those taken are made up for.
_TOLERANCE = 1.1


class Trained(NamedTuple):
  """A finished run.

  Attributes:
    folder: of the model.
    parameters: that were trained or copied; not the target's.
    steps: of the run.
    minutes: of the processor.
  """

  folder: Path
  parameters: int
  steps: int
  minutes: float


def train(
  target: str,
  recipe: Recipe,
  folder: Path,
  minutes: float,
  texts: Mapping[str, Any],
) -> Trained:
  """Trains for as many steps as take `minutes` of the processor, by the time of
  a step in a short trial.

  A run that was stopped goes on from its last checkpoint, and one that is done
  is read. `texts` are the macros that name them, such as `TOKENS`.
  """
  done = folder / _DONE
  if not done.is_file():
    # What the trial has compiled serves the run.
    trial, cache = folder / 'trial', folder.parent / 'compiled'
    if not (trial / 'model').is_dir():
      _run(target, recipe, trial, _FIRST_STEPS, texts, cache)
    steps = max(round(60 * minutes / seconds_per_step(trial)), _FIRST_STEPS)
    if not (folder / 'model').is_dir():
      _run(target, recipe, folder, steps, texts, cache)
    # A trial may have overestimated a step: a constant rate lets a run go on.
    left = 60 * minutes / seconds_per_step(folder)
    if left > _TOLERANCE * _steps(folder):
      _run(target, recipe, folder, round(left), texts, cache)
    done.touch()
  steps = _steps(folder)
  return Trained(
    folder=folder / 'model',
    parameters=num_parameters(folder / 'model'),
    steps=steps,
    minutes=seconds_per_step(folder) * steps / 60,
  )


def _run(
  target: str,
  recipe: Recipe,
  folder: Path,
  steps: int,
  texts: Mapping[str, Any],
  cache: Path,
) -> None:
  """Trains up to a number of steps; compiled programs are kept in `cache`."""
  command = ['specdec_jax', 'train', f'--gin_file={recipe.training}']
  averaging = {'AVERAGE_LAST': NUM_AVERAGED}
  if recipe.training.startswith('gin_configs'):  # These have no such macro.
    averaging = {'loop.Schedule.average_last': NUM_AVERAGED}
  macros = {
    'MODEL_DIR': str(folder),
    'TRAIN_STEPS': steps,
    'WARMUP_STEPS': WARMUP_STEPS,
    'EVAL_PERIOD': steps,
    'CHECKPOINT_PERIOD': checkpoint_period(steps),
    **averaging,
    'loop.Schedule.log_period': LOG_PERIOD,
    'SCHEDULE': SCHEDULE,
    **texts,
    **recipe.macros,
  }
  command += [f'--gin.{name}={value!r}' for name, value in macros.items()]
  if not recipe.training.endswith('.gin'):
    command = [recipe.training, f'--target={target}', f'--steps={steps}']
    command += [f'--texts={texts["TEXTS"]}', f'--model_dir={folder}']
  environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache)}
  python = [sys.executable, '-m']
  subprocess.run([*python, *command], check=True, env=environment)


def _steps(folder: Path) -> int:
  """Counts the steps in a run's log."""
  return int(metrics_log.read_log(folder / metrics_log.NAME)[-1]['step'])


def checkpoint_period(steps: int) -> int:
  """The steps between checkpoints, of which there are some in any run."""
  return max(steps // _NUM_CHECKPOINTS, 1)


def seconds_per_step(folder: Path) -> float:
  """Returns the processor's seconds of a step: the median of the log's lines,
  so that compilation, which the first of them have, does not count."""
  lines = [
    line
    for line in metrics_log.read_log(folder / metrics_log.NAME)
    if 'targets_per_processor_second' in line
  ]
  ends = [int(line['step']) for line in lines]
  seconds = [
    line['targets'] / line['targets_per_processor_second'] for line in lines
  ]
  return float(np.median(np.array(seconds) / np.diff([0, *ends])))


def num_parameters(model: Path) -> int:
  """Counts the parameters in a folder."""
  _, params = loading.read(model, dtype=jax.numpy.dtype('float32'))
  floats = (x for x in jax.tree.leaves(params) if x.dtype == 'float32')
  return sum(x.size for x in floats)
