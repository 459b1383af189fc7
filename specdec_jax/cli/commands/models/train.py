"""Trains a model on token files, as gin files say."""

import argparse
import contextlib

from specdec_jax.integrations.t5x import names
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
  configuration = gin_launch.given(args, names.FILES)
  meeting = processes.given(args)
  with processes.joined(meeting), contextlib.ExitStack() as reading:
    # gin reads the data while it makes the arguments.
    reading.enter_context(training.waiting('reading the training data'))
    gin_launch.call(training.train, configuration, on_begin=reading.close)
  return 0
