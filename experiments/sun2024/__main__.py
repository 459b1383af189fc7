"""Measures block against token verification (Sun et al. 2024).

    python -m experiments.corpora debian --out corpora/debian
    python -m experiments.sun2024

Pairs of models are given as to `experiments.leviathan2023`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import report
from experiments.leviathan2023 import pairs
from experiments.sun2024 import tables
from specdec_jax.cli import options
from specdec_jax.launch import compilation_cache

MODULE = 'experiments.sun2024'


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  folder = Path(args.output)
  try:
    compilation_cache.enable()
    started = time.time()
    shown = report.write(
      folder,
      'toy',
      title="The paper's example",
      header=report.header(MODULE, argv, started),
      table=tables.toy(),
    )
    print(shown, flush=True)
    given = pairs.load_all(args)
    started = time.time()
    table = tables.tokens_per_run(
      given,
      gammas=args.gammas,
      num_examples=args.num_examples,
      batch_size=args.batch_size,
    )
    header = report.header(MODULE, argv, started)
    header['dtypes'] = str(pairs.Dtypes())
    header['examples'] = f'{args.num_examples}'
    shown = report.write(
      folder,
      'tokens_per_run',
      title='Tokens per target run',
      header=header,
      table=table,
    )
    print(shown, flush=True)
  except (ValueError, ImportError) as error:
    print(f'sun2024: error: {error}', file=sys.stderr)
    return 2
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  pairs.add_arguments(parser)
  parser.add_argument('--output', default='experiments/sun2024/results')
  parser.add_argument('--gammas', type=report.numbers, default=[1, 2, 4, 6, 8])
  parser.add_argument('--num_examples', type=options.positive_int, default=600)
  parser.add_argument('--batch_size', type=options.positive_int, default=40)
  return parser


if __name__ == '__main__':
  sys.exit(main())
