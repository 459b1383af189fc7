"""Joins the shards that several `infer --shard_id` runs wrote to one file."""

import argparse

from specdec_jax.cli import infer_output, progress
from specdec_jax.data.local_path import local_path

HELP = 'join the shards of infer'


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('folder', help='what INFER_OUTPUT_DIR was')


def run(args: argparse.Namespace) -> int:
  folder = local_path(args.folder)
  if not folder.is_dir():
    raise ValueError(f'there is no folder {folder}')
  for path, num_lines in infer_output.merge(folder):
    progress.console().print(f'{path}: {num_lines} examples')
  return 0
