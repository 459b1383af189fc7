"""Measures packed weights, and quantised targets that draft for themselves.

    python -m experiments.quantized

The tables have the quality that few bits cost; how often a target in few bits
guesses the target's token; plain and verify steps on this device; bytes and
times of compiled TPU programs, and what speculation would gain. See README.md.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import common, report
from experiments.quantized import chips, on_device, quality

MODULE = 'experiments.quantized'
_TABLES = (
  *('perplexity', 'bleu', 'acceptance', 'steps'),
  *('tpu_bytes', 'tpu_gains'),
)


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('quantized', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  where = (MODULE, argv), Path(args.output)
  titles = {
    'perplexity': 'SmolLM2-135M: perplexity by weights',
    'bleu': '`ende-mini`: BLEU by weights',
    'acceptance': 'Acceptance of a target in few bits that drafts for itself',
    'steps': 'Iterations on this device by weights',
  }
  makes: dict[str, Any] = {
    'perplexity': functools.partial(quality.perplexities, args.num_windows),
    'bleu': functools.partial(quality.bleus, args.num_texts),
    'acceptance': functools.partial(
      on_device.acceptance, args.targets, args.max_new_tokens
    ),
    'steps': functools.partial(
      on_device.steps, args.targets, args.max_new_tokens, args.repeats
    ),
  }
  for name in args.tables:
    if name in makes:
      report.measure(*where, name, titles[name], makes[name])
      continue
    for chip in args.chips:
      make, title = functools.partial(chips.tpu_bytes, chip), 'bytes of a step'
      if name == 'tpu_gains':
        make = functools.partial(chips.gains, chip, Path(args.output))
        title = 'targets that draft for themselves'
      slug = f'{name}_{chip.partition(":")[0]}'
      report.measure(*where, slug, f'{chip}: {title}, predicted', make)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  common.add_tables(parser, _TABLES)
  parser.add_argument(
    '--chips', type=common.listed(), default=list(chips.CHIPS)
  )
  parser.add_argument(
    '--targets', type=common.listed(), default=['smollm2-135m', 'ende-mini']
  )
  parser.add_argument('--output', default='experiments/quantized/results')
  common.add_counts(
    parser, num_windows=64, num_texts=200, max_new_tokens=48, repeats=5
  )
  return parser


if __name__ == '__main__':
  sys.exit(main())
