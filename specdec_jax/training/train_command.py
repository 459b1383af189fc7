"""Trains a model on token files, as gin files say."""

import argparse
import contextlib

from specdec_jax.assembly import t5x_names as names
from specdec_jax.launch import gin_launch, processes
from specdec_jax.training import train as training

# Gin files whose macros --help lists.
_SHOWN = (
  'runs/train.gin',
  'runs/train_task.gin',
  'runs/distill.gin',
  'runs/train_eagle.gin',
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  gin_launch.add_arguments(parser, _SHOWN)
  processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
  configuration = gin_launch.from_args(args, names.FILES)
  meeting = processes.from_args(args)
  with processes.joined(meeting), contextlib.ExitStack() as reading:
    # gin reads the data while it makes the arguments.
    reading.enter_context(training.waiting('reading the training data'))
    return gin_launch.call(
      training.train,
      configuration,
      settings=_settings,
      on_begin=reading.close,
    )


def _settings() -> dict[str, str]:
  """Returns the bindings, but for where the run's folder is."""
  is_folder = lambda name: name.endswith(('MODEL_DIR', 'model_dir'))
  bound = gin_launch.bindings().items()
  return {name: value for name, value in bound if not is_folder(name)}
