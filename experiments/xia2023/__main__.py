"""Regenerates the tables of Xia et al. 2023 (SpecDec) on a pair of models.

    python -m experiments.xia2023 --target=runs/ende_mini/model \
      --drafter=runs/ende_spec_drafter/model \
      --heads=runs/ende_block_heads/model \
      --task=debian_ende/test.jsonl --output=experiments/xia2023/results

Each table is one call, `--tables=main`; without `--tables` it is all of them.
A table is written as soon as it is measured, as Markdown and as JSON.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import report
from experiments.xia2023 import paper
from experiments.xia2023.tables import EXACT, FULL, TABLES, Settings
from experiments.xia2023.ways import Pair
from specdec_jax.checkpoints import loading
from specdec_jax.cli import options
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Layout
from specdec_jax.launch import compilation_cache
from specdec_jax.models import families, layers, presets
from specdec_jax.models.block_decoder import BlockDecoderConfig
from specdec_jax.models.block_heads import BlockHeadsConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.text import tasks
from specdec_jax.training import glancing

EXACT_DTYPE = 'float32'


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  args.dtype = report.verifying_dtype(args)
  compilation_cache.enable()
  try:
    pairs = _load_all(args)
  except (ValueError, ImportError) as error:
    print(f'xia2023: error: {error}', file=sys.stderr)
    return 2
  settings = Settings(
    gamma=args.gamma,
    gammas=args.gammas,
    batch_sizes=args.batch_sizes,
    num_timed=args.num_timed,
    repeats=args.repeats,
    batch_size=args.batch_size,
  )
  folder = Path(args.output)
  for name in args.tables:
    title, make = TABLES[name]
    started = time.time()
    dtype = EXACT_DTYPE if name in EXACT else args.dtype
    rows = make(pairs[dtype], settings)
    header = report.header('experiments.xia2023', argv, started) | {
      'dtype': dtype
      if name in EXACT
      else f'{dtype}, beam search and greedy decoding the fastest of '
      f'{" and ".join(args.plain_dtypes)}',
      'examples': f'{len(pairs[dtype].rows)}, {args.num_timed} of them timed',
      'target': _name(args.target),
      'drafter': ', '.join(map(_name, args.drafter)) or 'untrained',
      'paper': paper.SOURCE,
    }
    text = report.write(
      folder, name, title=title, header=header, table=report.Table(rows=rows)
    )
    print(text, flush=True)
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m experiments.xia2023', description=__doc__.splitlines()[0]
  )
  parser.add_argument('--target', required=True, help='a T5, and vocabulary')
  parser.add_argument('--sizes', help='of a T5X target: see loading.load')
  parser.add_argument('--vocabulary', help='unless it lies beside the target')
  parser.add_argument(
    '--drafter',
    action='append',
    default=[],
    metavar='[NAME=]FOLDER',
    help='a Spec-Drafter; the first is the full one, others are variants '
    'such as without_latency=FOLDER. None: an untrained one, to try this out',
  )
  parser.add_argument('--heads', help='of blockwise decoding')
  parser.add_argument('--task', required=True, help='.jsonl, .tsv, or SeqIO')
  parser.add_argument('--output', default='experiments/xia2023/results')
  report.add_tables(parser, TABLES)
  parser.add_argument('--gamma', type=options.positive_int, default=25)
  gammas = [10, 15, 20, 25, 30]
  parser.add_argument('--gammas', type=report.numbers, default=gammas)
  parser.add_argument(
    '--batch_sizes', type=report.numbers, default=[1, 2, 4, 8, 16, 32, 64]
  )
  report.add_dtypes(parser)
  parser.add_argument('--inputs_length', type=options.positive_int, default=64)
  parser.add_argument('--targets_length', type=options.positive_int, default=64)
  parser.add_argument(
    '--num_examples', type=options.positive_int, help='None: all'
  )
  parser.add_argument('--num_timed', type=options.positive_int, default=100)
  parser.add_argument('--repeats', type=options.positive_int, default=3)
  parser.add_argument('--batch_size', type=options.positive_int, default=32)
  return parser


def _load_all(args: argparse.Namespace) -> dict[str, Pair]:
  """Reads all models and encodes the task, in every dtype that is needed.

  Raises:
    ValueError: if they do not fit together.
  """
  dtypes = {args.dtype, *args.plain_dtypes}
  if EXACT & {*args.tables}:
    dtypes.add(EXACT_DTYPE)
  pairs = {dtype: _load(args, jnp.dtype(dtype)) for dtype in sorted(dtypes)}
  plain = [pairs[name] for name in args.plain_dtypes if name != args.dtype]
  own = dataclasses.replace(pairs[args.dtype], plain=plain)
  return pairs | {args.dtype: own}


def _load(args: argparse.Namespace, dtype: jnp.dtype) -> Pair:
  target = loading.load(
    args.target, dtype=dtype, config=args.sizes, vocabulary=args.vocabulary
  )
  config = target.config
  if not isinstance(config, T5Config):
    raise ValueError(f'{args.target} is no T5')
  layout = Layout(
    config=config,
    vocabulary=target.vocabulary,
    inputs_length=args.inputs_length,
    targets_length=args.targets_length,
  )
  rows = list(examples.encode(tasks.find(args.task), layout, 0, 1))
  return Pair(
    layout=layout,
    target=target.params,
    rows=rows[: args.num_examples],
    spec_drafters=_spec_drafters(args, config),
    heads=_heads(args.heads, config),
  )


def _spec_drafters(
  args: argparse.Namespace, target: T5Config
) -> dict[str, tuple[BlockDecoderConfig, Any]]:
  """Every drafter by the name of its variant."""
  if not args.drafter:
    longest = max(args.gamma, *args.gammas)
    config = presets.spec_drafter_of(
      target,
      num_encoder_layers=target.num_encoder_layers,
      num_decoder_layers=2,
      max_positions=max(args.inputs_length, args.targets_length + longest),
    )
    params = glancing.init_params(config, jax.random.key(0))
    return {FULL: (config, layers.with_cpu_copies(params, is_tied=True))}
  found = {}
  for i, given in enumerate(args.drafter):
    name, equals, folder = given.rpartition('=')
    if i and not equals:
      raise ValueError(f'give the variant a name: --drafter=NAME={folder}')
    sizes, params = loading.read_drafter(folder, dtype=target.dtype)
    if (
      families.of(sizes).block_model is None
      or sizes.vocab_size != target.vocab_size
    ):
      raise ValueError(f'{folder} is no Spec-Drafter of this vocabulary')
    params = layers.with_cpu_copies(params, is_tied=True)
    found[FULL if i == 0 else name] = sizes, params
  return found


def _heads(
  folder: str | None, target: T5Config
) -> tuple[BlockHeadsConfig, Any] | None:
  if folder is None:
    return None
  config, params = loading.read_drafter(folder, dtype=target.dtype)
  if (
    families.of(config).with_heads is None
    or config.embed_dim != target.embed_dim
  ):
    raise ValueError(f'{folder} has no heads that fit the target')
  return config, params


def _name(path: str) -> str:
  """A model without the folders of the machine that it lies on."""
  parts = Path(path.rpartition('=')[2]).parts
  return '/'.join(parts[-2:] if parts[-1] == 'model' else parts[-1:])


if __name__ == '__main__':
  sys.exit(main())
