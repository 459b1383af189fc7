"""Regenerates the tables of Xia et al. 2023 (SpecDec) on a pair of models.

    python -m experiments.xia2023 --target=runs/ende_mini/model \
      --drafter=runs/ende_spec_drafter/model \
      --heads=runs/ende_block_heads/model \
      --task=debian_ende/test.jsonl --output=experiments/xia2023/results

`--tables=main` makes one table; without `--tables` it makes all.
A table is written as soon as it is measured, as Markdown and as JSON.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from experiments import common, report
from experiments.xia2023 import paper, ways
from experiments.xia2023.tables import EXACT, FULL, TABLES, Settings
from experiments.xia2023.ways import BLOCK, HEADS, Loaded, Pair
from specdec_jax.assembly.drafters import Block, BlockHeads, SpecDrafter
from specdec_jax.assembly.models import Model
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Layout
from specdec_jax.launch.numbers import positive_int
from specdec_jax.models.t5 import T5Config
from specdec_jax.text import tasks

EXACT_DTYPE = 'float32'


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('xia2023', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  args.dtype = common.verifying_dtype(args)
  pairs = _load_all(args)
  settings = common.chosen(Settings, args)
  command = 'experiments.xia2023', argv
  for name in args.tables:
    title, make = TABLES[name]
    dtype = EXACT_DTYPE if name in EXACT else args.dtype
    pair = pairs[dtype]
    if name not in EXACT:
      dtype += ', beam search and greedy decoding the fastest of '
      dtype += ' and '.join(args.plain_dtypes)
    more = {
      'dtype': dtype,
      'examples': f'{len(pair.rows)}, {args.num_timed} of them timed',
      'target': _name(args.target),
      'drafter': ', '.join(map(_name, args.drafter)) or 'untrained',
      'paper': paper.SOURCE,
    }
    rows = lambda make=make, pair=pair: report.Table(rows=make(pair, settings))
    report.measure(command, Path(args.output), name, title, rows, more)


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
  parser.add_argument('--block', help='a block drafter, to compare with')
  parser.add_argument('--task', required=True, help='.jsonl, .tsv, or SeqIO')
  parser.add_argument('--output', default='experiments/xia2023/results')
  common.add_tables(parser, TABLES)
  gammas, sizes = [10, 15, 20, 25, 30], [1, 2, 4, 8, 16, 32, 64]
  parser.add_argument('--gammas', type=common.numbers, default=gammas)
  parser.add_argument('--batch_sizes', type=common.numbers, default=sizes)
  common.add_dtypes(parser)
  parser.add_argument('--num_examples', type=positive_int, help='None: all')
  common.add_counts(
    parser,
    gamma=25,
    inputs_length=64,
    targets_length=64,
    num_timed=100,
    repeats=3,
    batch_size=32,
  )
  return parser


def _load_all(args: argparse.Namespace) -> dict[str, Pair]:
  """Reads all models and encodes the task, in every dtype that is needed.

  Raises:
    ValueError: if they do not fit together.
  """
  dtypes = {args.dtype, *args.plain_dtypes}
  if EXACT & {*args.tables}:
    dtypes.add(EXACT_DTYPE)
  pairs = {dtype: _load(args, dtype) for dtype in sorted(dtypes)}
  plain = [pairs[name] for name in args.plain_dtypes if name != args.dtype]
  own = dataclasses.replace(pairs[args.dtype], plain=plain)
  return pairs | {args.dtype: own}


def _load(args: argparse.Namespace, dtype: str) -> Pair:
  chosen = Model(
    checkpoint=args.target,
    sizes=args.sizes,
    vocabulary=args.vocabulary,
    dtype=dtype,
  )
  target = common.load(chosen)
  if not isinstance(target.config, T5Config):
    raise ValueError(f'{args.target} is no T5')
  layout = Layout(
    config=target.config,
    vocabulary=target.vocabulary,
    inputs_length=args.inputs_length,
    targets_length=args.targets_length,
  )
  rows = list(examples.encode(tasks.find(args.task), layout, 0, 1))
  read = lambda kind, folder: ways.load(
    kind(model=Model(checkpoint=folder, dtype=dtype)), target
  )
  drafters = {}
  if args.heads is not None:
    drafters[HEADS] = read(BlockHeads, args.heads)
  if args.block is not None:
    drafters[BLOCK] = read(Block, args.block)
  if not args.drafter:
    drafters[FULL] = _untrained(args, target.config)
  for i, given in enumerate(args.drafter):
    name, equals, folder = given.rpartition('=')
    if i and not equals:
      raise ValueError(f'give the variant a name: --drafter=NAME={folder}')
    drafters[name if i else FULL] = read(SpecDrafter, folder)
  return Pair(
    chosen=chosen,
    layout=layout,
    target=target.params,
    rows=rows[: args.num_examples],
    drafters=drafters,
  )


def _untrained(args: argparse.Namespace, target: T5Config) -> Loaded:
  """A Spec-Drafter of the target's sizes."""
  longest = max(args.gamma, *args.gammas)
  config = ways.spec_drafter_of(
    target,
    num_encoder_layers=target.num_encoder_layers,
    num_decoder_layers=2,
    max_positions=max(args.inputs_length, args.targets_length + longest),
  )
  return ways.untrained(config, jax.random.key(0))


def _name(path: str) -> str:
  return common.short(path.rpartition('=')[2])


if __name__ == '__main__':
  sys.exit(main())
