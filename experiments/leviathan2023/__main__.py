"""Regenerates the tables and figures of Leviathan et al. 2023.

    python -m experiments.corpora debian --out corpora/debian
    python -m experiments.leviathan2023

Each is one call, `--tables=3`; without `--tables` it is all of them. Pairs are
the shipped ones, or others: `--pair=ende:runs/mini/model:runs/nano/model`. A
table is written as soon as it is measured, as Markdown and as JSON.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import report
from experiments.leviathan2023 import pairs
from experiments.leviathan2023.measured import Settings
from experiments.leviathan2023.pairs import Dtypes
from experiments.leviathan2023.tables import TABLES
from specdec_jax.cli import options
from specdec_jax.launch import compilation_cache
from specdec_jax.models import presets

MODULE = 'experiments.leviathan2023'
# Which need no model.
_OF_THEORY = {'1'}


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  dtypes = Dtypes(
    target=report.verifying_dtype(args),
    draft=args.draft_dtype,
    plain=args.plain_dtypes,
  )
  settings = Settings(
    num_alpha=args.num_alpha,
    num_timed=args.num_timed,
    repeats=args.repeats,
    max_gamma=args.max_gamma,
    batch_size=args.batch_size,
  )
  try:
    compilation_cache.enable()
    given = []
    if set(args.tables) - _OF_THEORY:
      given = pairs.load_all(args, dtypes)
    for name in args.tables:
      title, make = TABLES[name]
      started = time.time()
      table = make(given, settings, Path(args.output))
      header = report.header(MODULE, argv, started)
      if name not in _OF_THEORY:
        header['dtypes'] = (
          f'{dtypes}, plain decoding the fastest of '
          f'{" and ".join(dtypes.plain)}'
        )
        header['examples'] = (
          f'{args.num_alpha} for acceptance, {args.num_timed} timed in '
          f'{args.repeats} turns'
        )
      text = report.write(
        Path(args.output),
        f'table_{name}' if name.isdigit() else name,
        title=title,
        header=header,
        table=table,
      )
      print(text, flush=True)
  except (ValueError, ImportError) as error:
    print(f'leviathan2023: error: {error}', file=sys.stderr)
    return 2
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  pairs.add_arguments(parser)
  parser.add_argument('--output', default='experiments/leviathan2023/results')
  report.add_tables(parser, TABLES)
  report.add_dtypes(parser)
  parser.add_argument(
    '--draft_dtype', choices=presets.DTYPES, default='float32'
  )
  parser.add_argument('--num_alpha', type=options.positive_int, default=200)
  parser.add_argument('--num_timed', type=options.positive_int, default=24)
  parser.add_argument('--repeats', type=options.positive_int, default=11)
  parser.add_argument('--max_gamma', type=options.positive_int, default=12)
  parser.add_argument('--batch_size', type=options.positive_int, default=20)
  parser.add_argument(
    '--ngram_examples', type=options.positive_int, default=20_000
  )
  return parser


if __name__ == '__main__':
  sys.exit(main())
