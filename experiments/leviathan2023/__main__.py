"""Regenerates the tables and figures of Leviathan et al. 2023.

    specdec data build debian --out corpora/debian
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
from experiments.leviathan2023.tables import TABLES
from specdec_jax.cli import decoder as decoder_lib

MODULE = 'experiments.leviathan2023'
# Which need no model.
_OF_THEORY = {'1'}


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  settings = Settings(
    num_alpha=args.num_alpha,
    num_timed=args.num_timed,
    repeats=args.repeats,
    max_gamma=args.max_gamma,
    batch_size=args.batch_size,
  )
  try:
    decoder_lib.enable_compilation_cache()
    given = []
    if set(args.tables) - _OF_THEORY:
      given = [
        pairs.load(text, Path(args.corpus), args.ngram_examples)
        for text in args.pair or ['ende', 'lm']
      ]
    for name in args.tables:
      title, make = TABLES[name]
      started = time.time()
      table = make(given, settings, Path(args.output))
      header = report.header(MODULE, argv, started)
      if name not in _OF_THEORY:
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
  parser.add_argument(
    '--pair',
    action='append',
    metavar='KIND[:TARGET:DRAFTER:TASKFILE]',
    help=f'{", ".join(pairs.KINDS)}; without models those that are shipped, '
    'without a file the test split of --corpus. May be given several times '
    '(default: ende, lm)',
  )
  parser.add_argument(
    '--corpus',
    default='corpora/debian',
    metavar='DIR',
    help='what `specdec data build debian` wrote',
  )
  parser.add_argument('--output', default='experiments/leviathan2023/results')
  parser.add_argument('--tables', type=_names, default=list(TABLES))
  parser.add_argument('--num_alpha', type=int, default=200)
  parser.add_argument('--num_timed', type=int, default=24)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--max_gamma', type=int, default=12)
  parser.add_argument('--batch_size', type=int, default=20)
  parser.add_argument('--ngram_examples', type=int, default=20_000)
  return parser


def _names(text: str) -> list[str]:
  names = text.split(',')
  for name in names:
    if name not in TABLES:
      raise argparse.ArgumentTypeError(
        f'{name!r} is no table; there are {", ".join(TABLES)}'
      )
  return names


if __name__ == '__main__':
  sys.exit(main())
