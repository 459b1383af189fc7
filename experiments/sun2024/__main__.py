"""Measures block against token verification (Sun et al. 2024).

    python -m experiments.corpora debian --out corpora/debian
    python -m experiments.sun2024

Name pairs of models as for `experiments.leviathan2023`.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import common, report
from experiments.leviathan2023 import pairs
from experiments.sun2024 import tables

MODULE = 'experiments.sun2024'


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('sun2024', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  command, folder = (MODULE, argv), Path(args.output)
  report.measure(command, folder, 'toy', "The paper's example", tables.toy)
  report.measure(
    command,
    folder,
    'tokens_per_run',
    'Tokens per target run',
    functools.partial(
      tables.tokens_per_run,
      pairs.load_all(args),
      gammas=args.gammas,
      num_examples=args.num_examples,
      batch_size=args.batch_size,
    ),
    {'dtypes': str(pairs.Dtypes()), 'examples': f'{args.num_examples}'},
  )


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  pairs.add_arguments(parser)
  parser.add_argument('--output', default='experiments/sun2024/results')
  parser.add_argument('--gammas', type=common.numbers, default=[1, 2, 4, 6, 8])
  common.add_counts(parser, num_examples=600, batch_size=40)
  return parser


if __name__ == '__main__':
  sys.exit(main())
