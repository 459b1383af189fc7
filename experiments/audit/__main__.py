"""Audits the samplers of several engines with `specdec_jax.audit`.

    pip install -e '.[audit]'
    python -m experiments.audit --t5x FOLDER

Each row is written as soon as it is measured. After an interrupt, the same
command measures only the missing rows. See README.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import common, provenance, report
from experiments.audit import ways
from experiments.audit.engines import (
  hugging_face,
  keras,
  llama_cpp,
  ours,
  t5x,
  tunix,
)
from experiments.audit.ways import Way
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


class Engine(NamedTuple):
  """An engine: its ways, and the version of what runs them."""

  ways: Callable[[], Iterator[Way]]
  version: Callable[[], str]


def known(clone: str | None) -> dict[str, Engine]:
  """The engines by name; `clone` is of T5X."""
  of = lambda make, *names: Engine(make, lambda: report.versions(*names))
  return {
    'loop': of(ours.loop, 'specdec_jax', 'jax'),
    'load': of(ours.doors, 'specdec_jax', 'jax'),
    'transformers': of(hugging_face.engine, 'transformers', 'torch'),
    'KerasHub': of(keras.engine, 'keras-hub', 'keras', 'jax'),
    'llama.cpp': of(llama_cpp.engine, 'llama-cpp-python'),
    'Tunix': of(tunix.engine, 'google-tunix', 'jax'),
    'T5X': Engine(lambda: t5x.engine(clone), lambda: t5x.version(clone)),
  }


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  names = [*known(None)]
  parser.add_argument('--engines', nargs='+', choices=names, default=names)
  parser.add_argument('--t5x', metavar='FOLDER', help='a clone of T5X')
  parser.add_argument(
    '--rows', default='out/audit', help='folder of the rows that are measured'
  )
  parser.add_argument('--output', default='experiments/audit/results')
  args = parser.parse_args(argv)
  return common.finish('audit', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  engines, started = known(args.t5x), time.time()
  for name in args.engines:  # Misses one before minutes of auditing others.
    engines[name].version()
  found = [
    cells
    for name in args.engines
    for cells in rows(engines[name], Path(args.rows))
  ]
  # Rows may be of earlier runs.
  seconds = sum(int(cells['seconds']) for cells in found)
  header = report.header(MODULE, argv, started) | {'time': f'{seconds} s'}
  table = Table(rows=found, notes=[NOTE])
  print(
    report.write(
      Path(args.output),
      'engines',
      title='Samplers of engines',
      header=header,
      table=table,
    )
  )


def rows(engine: Engine, folder: Path) -> Iterator[Cells]:
  """Audits the ways of an engine; those in the folder are read."""
  name = version = engine.version()
  if 'specdec_jax' in version:  # A checkout changes without its version.
    name += f', {provenance.code()}'
  path = folder / f'{name}.jsonl'.replace(', ', '+').replace(' ', '-')
  path.parent.mkdir(parents=True, exist_ok=True)
  found = {cells['way']: cells for cells in report.lines(path)}
  for way in engine.ways():
    if way.name not in found:
      found[way.name] = cells = {'engine': version, **row(way)}
      with path.open('a', encoding='utf-8') as file:
        file.write(json.dumps(cells) + '\n')
    yield found[way.name]


def row(way: Way) -> dict[str, Any]:
  """Audits a way."""
  started = time.time()
  found = audit(
    way.sample,
    way.next_probs,
    way.prompts,
    num_tokens=ways.NUM_TOKENS,
    num_draws=way.num_draws,
    greedy=way.greedy,
    eos_ids=way.eos_ids,
  )
  print(f'{way.name}\n{found}\n', file=sys.stderr, flush=True)
  whole = [c for c in found.checks if c.name.endswith('sequences')]
  greedy = None
  if found.differences is not None:
    num_same = len(way.prompts) - len(found.differences)
    greedy = f'{num_same} of {len(way.prompts)}'
  return {
    'way': way.name,
    'draws': sum(check.test.num_draws for check in whole),
    'tests': len(found.checks),
    'least p, corrected': f'{found.p_value:.2g}',
    'bias seen from': f'{max(check.detectable for check in whole):.3f}',
    'bias below': f'{max(check.bound for check in whole):.3f}',
    'greedy as plain': greedy,
    'verdict': found.verdict,
    'seconds': f'{time.time() - started:.0f}',
  }


if __name__ == '__main__':
  sys.exit(main())
