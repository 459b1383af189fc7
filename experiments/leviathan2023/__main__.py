"""Regenerates the tables and figures of Leviathan et al. 2023.

    python -m experiments.corpora debian --out corpora/debian
    python -m experiments.leviathan2023

`--tables=3` makes one table; without `--tables` it makes all. The default pairs
are the shipped ones; `--pair=ende:runs/mini/model:runs/nano/model` names
others. A table is written as soon as it is measured, as Markdown and as JSON.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import common, report
from experiments.leviathan2023 import pairs
from experiments.leviathan2023.measured import Settings
from experiments.leviathan2023.pairs import Dtypes
from experiments.leviathan2023.tables import TABLES
from specdec_jax.models import presets

MODULE = 'experiments.leviathan2023'
# Which need no model.
_OF_THEORY = {'1'}


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('leviathan2023', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  dtypes = Dtypes(
    target=common.verifying_dtype(args),
    draft=args.draft_dtype,
    plain=args.plain_dtypes,
  )
  settings = common.chosen(Settings, args)
  folder = Path(args.output)
  given = []
  if set(args.tables) - _OF_THEORY:
    given = pairs.load_all(args, dtypes)
  for name in args.tables:
    title, make = TABLES[name]
    more = {
      'dtypes': f'{dtypes}, plain decoding the fastest of '
      f'{" and ".join(dtypes.plain)}',
      'examples': f'{args.num_alpha} for acceptance, {args.num_timed} timed in '
      f'{args.repeats} turns',
    }
    report.measure(
      (MODULE, argv),
      folder,
      f'table_{name}' if name.isdigit() else name,
      title,
      functools.partial(make, given, settings, folder),
      {} if name in _OF_THEORY else more,
    )


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  pairs.add_arguments(parser)
  parser.add_argument('--output', default='experiments/leviathan2023/results')
  common.add_tables(parser, TABLES)
  common.add_dtypes(parser)
  parser.add_argument(
    '--draft_dtype', choices=presets.DTYPES, default='float32'
  )
  common.add_counts(
    parser,
    num_alpha=200,
    num_timed=24,
    repeats=11,
    max_gamma=12,
    batch_size=20,
    ngram_examples=20_000,
  )
  return parser


if __name__ == '__main__':
  sys.exit(main())
