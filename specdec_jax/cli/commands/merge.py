"""Joins the shards that several `infer --shard_id` runs wrote to one file."""

import argparse

from specdec_jax.files.local_path import local_path
from specdec_jax.infer import output
from specdec_jax.launch import progress

HELP = 'join the shards of infer'


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('folder', help='what INFER_OUTPUT_DIR was')


def run(args: argparse.Namespace) -> int:
  folder = local_path(args.folder)
  if not folder.is_dir():
    raise ValueError(f'there is no folder {folder}')
  for path, num_lines in output.merge(folder):
    progress.console().print(f'{path}: {num_lines} examples')
  return 0
