"""Samplers of several engines, audited by `specdec_jax.audit`.

    pip install -e '.[peers]' keras-hub google-tunix
    python -m experiments.audit

An engine that is not installed is left out by `--engines`. See README.md.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments import common, report
from experiments.audit import engines
from experiments.report import Cells, Table
from specdec_jax.audit import audit

MODULE = 'experiments.audit'
NOTE = (
  '"Bias seen from": the total variation from which on any bias of whole '
  'continuations would have been rejected with a chance of 95%, of the prompt '
  'where that is largest; "bias below": a bound on it with 95% confidence, '
  'which says nothing after a rejection. An engine without a bias is rejected '
  'with a chance of 0.0001 per row.'
)


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  parser.add_argument(
    '--engines', nargs='+', choices=engines.ENGINES, default=[*engines.ENGINES]
  )
  parser.add_argument('--output', default='experiments/audit/results')
  args = parser.parse_args(argv)
  return common.finish('audit', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  report.measure(
    (MODULE, argv),
    Path(args.output),
    'engines',
    'Samplers, audited',
    lambda: Table(
      rows=[row for name in args.engines for row in rows(name)], notes=[NOTE]
    ),
  )


def rows(name: str) -> Iterator[Cells]:
  """Audits the ways of an engine; a row for each."""
  make, packages = engines.ENGINES[name]
  for way in make():
    found = audit(
      way.sample,
      way.next_probs,
      way.prompts,
      num_tokens=engines.NUM_TOKENS,
      num_draws=way.num_draws,
      greedy=way.greedy,
      eos_ids=way.eos_ids,
    )
    print(f'{name}, {way.name}\n{found}\n', file=sys.stderr, flush=True)
    whole = [c for c in found.checks if c.name.endswith('sequences')]
    greedy = None
    if found.differences is not None:
      num_same = len(way.prompts) - len(found.differences)
      greedy = f'{num_same} of {len(way.prompts)}'
    yield {
      'engine': engines.versions(*packages),
      'drafter and setting': way.name,
      'draws': sum(check.test.num_draws for check in whole),
      'tests': len(found.checks),
      'least p, corrected': f'{found.p_value:.2g}',
      'bias seen from': f'{max(check.detectable for check in whole):.3f}',
      'bias below': f'{max(check.bound for check in whole):.3f}',
      'greedy as plain': greedy,
      'verdict': found.verdict,
    }


if __name__ == '__main__':
  sys.exit(main())
