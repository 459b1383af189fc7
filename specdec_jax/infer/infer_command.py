"""Decodes a task to JSONL, under gin: sharded, in chunks, resumable.

Flags, macros and output files are those of `t5x.infer`. The gin file
`runs/infer.gin` binds the arguments of `infer`; a run that was killed resumes
when it is started again, and writes the same bytes.
"""

import argparse

from specdec_jax.assembly import gamma_memory
from specdec_jax.assembly import t5x_names as names
from specdec_jax.cli import options
from specdec_jax.files.paths import user_path
from specdec_jax.infer import output
from specdec_jax.infer.infer import infer
from specdec_jax.launch import (
  compilation_cache,
  gin_launch,
  processes,
  progress,
)

# Gin files whose macros --help lists.
_SHOWN = (
  'models/as_stored.gin',
  'runs/infer.gin',
  'drafters/model.gin',
  'drafters/ngram.gin',
)
# Folders that may differ between processes: those of the first are used.
_FOLDERS = ('INFER_OUTPUT_DIR', 'output_dir', 'metrics_dir', 'profile_dir')
# Bindings that do not change results.
_NO_SETTINGS = (
  *_FOLDERS,
  'infer.dry_run',
  'infer.measure_gamma',
  'infer.shard_id',
  'infer.num_shards',
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  gin_launch.add_arguments(parser, _SHOWN)
  add = parser.add_argument_group('run').add_argument
  add('--model', metavar='NAME', help='models/NAME.gin, before any --gin_file')
  add('--shard_id', type=int, help='overrides --gin.infer.shard_id')
  add('--tfds_data_dir', metavar='DIR', help='the folder of TFDS data sets')
  add(
    '--dry_run',
    action='store_true',
    help='print the mesh, and parameters and caches per chip; load nothing',
  )
  options.add_shared(parser, 'forget', 'measure_gamma')
  add('--profile', metavar='DIR', help='trace one chunk with jax.profiler')
  processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
  if args.model:
    args.gin_file = [f'models/{args.model}.gin', *args.gin_file]
  arguments = {
    'shard_id': args.shard_id,
    'tfds_data_dir': args.tfds_data_dir,
    # None leaves an argument to gin; False would override it.
    'dry_run': args.dry_run or None,
    'measure_gamma': args.measure_gamma or None,
    'profile_dir': args.profile,
  }
  compilation_cache.enable()
  if args.forget:
    gamma_memory.forget()
  with processes.joined(processes.from_args(args)):
    return gin_launch.call(
      infer,
      gin_launch.from_args(args, names.DIALECT),
      may_differ=_FOLDERS,
      settings=lambda: {
        name: value
        for name, value in gin_launch.bindings().items()
        if not name.endswith(_NO_SETTINGS)
      },
      operative_config=gin_launch.operative_config,
      **{name: value for name, value in arguments.items() if value is not None},
    )


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('folder', help='the INFER_OUTPUT_DIR of the shards')


def merge(args: argparse.Namespace) -> int:
  """Joins the shards that several `infer --shard_id` runs wrote to one file."""
  for path, num_lines in output.merge(user_path(args.folder)):
    progress.show(f'{path}: {num_lines} examples')
  return 0
