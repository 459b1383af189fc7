"""Measures categories of prompts, drafters and gammas in one table.

    python -m experiments.suite --out out/suite

After an interrupt, the same command continues. README.md describes the options
and columns.
"""

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import common, report
from experiments.report import Cells
from experiments.suite import examples, table
from experiments.suite.examples import Example
from experiments.suite.settings import NGRAM_TEXT, Settings
from experiments.suite.targets import Target
from specdec_jax.assembly.option_fields import options_of
from specdec_jax.files import one_writer

MODULE = 'experiments.suite'
# What may differ between a run and the one that it continues.
_MAY_DIFFER = ('command', 'date', 'time')


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}',
    description=__doc__,
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  for name, field in options_of(Settings).items():
    default = field.default
    if isinstance(default, bool):
      text = field.metadata['help']
      parser.add_argument(f'--{name}', action='store_true', help=text)
      continue
    if isinstance(default, tuple):  # As it is typed.
      default = ','.join(map(str, default))
    parser.add_argument(
      f'--{name}',
      type=field.metadata['type'] or type(field.default),
      default=default,
      help=field.metadata['help'],
    )
  parser.add_argument(
    '--out',
    type=Path,
    default=Path('out/suite'),
    help='folder of cells, tables and the plot',
  )
  args = vars(parser.parse_args(argv))
  out = args.pop('out')
  return common.finish('suite', lambda: _run(Settings(**args), out, argv))


def _run(settings: Settings, folder: Path, argv: Sequence[str]) -> None:
  """Measures what is missing, and writes the tables."""
  started, sets = time.time(), _sets(settings)
  header = report.header(MODULE, argv, started) | {
    'dtype': settings.dtype,
    'texts': hashlib.sha256(repr(sets).encode()).hexdigest()[:10],
    'settings': {
      name: value for name, value in vars(settings).items() if value is not None
    },
  }
  rows: list[Cells] = []
  notes: list[str] = []
  with one_writer.one_writer(folder / '.lock', str(folder)):
    begin(folder, header)
    texts = [
      examples.shown(example, is_translator=False)
      for name in examples.CATEGORIES[:-1]
      for example in sets[name]
    ]
    table.write_text(folder / NGRAM_TEXT, '\n\n'.join(texts))
    for name in settings.targets:
      target = Target(settings, name, folder)
      found, left_out = target.prompts(sets)
      notes += left_out
      for setting in itertools.product(
        settings.temperatures, settings.batch_sizes
      ):
        rows += target.measure(found, *setting)
    header |= {'time': f'{time.time() - started:.0f} s'}
    print(table.write(folder, header, rows, notes))


def _sets(settings: Settings) -> dict[str, list[Example]]:
  """Reads the examples of all categories that are there."""
  sets = examples.own()
  for name in examples.PUBLIC:
    if path := getattr(settings, name.lower().replace('-', '_')):
      sets |= examples.public(name, path)
  known = [*sets, examples.CONTROL]
  for name in settings.categories or ():
    if name not in known:
      raise ValueError(f'--categories {name!r} is none of {", ".join(known)}')
  return sets


def begin(folder: Path, header: Cells) -> None:
  """Makes the folder, or finds one that was begun in the same way; ValueError
  if it was begun in another: figures of two versions do not mix."""
  (folder / 'cells').mkdir(parents=True, exist_ok=True)
  path = folder / 'settings.json'
  flat = lambda settings: {
    name: value
    for name, value in {**settings, **settings['settings']}.items()
    if name not in (*_MAY_DIFFER, 'settings')
  }
  # As JSON has it, where tuples are lists.
  now = flat(json.loads(json.dumps(header)))
  before = flat(json.loads(path.read_text('utf-8'))) if path.exists() else now
  for name in {**before, **now}:
    old, new = before.get(name), now.get(name)
    if old != new:
      raise ValueError(
        f'{folder} was begun with {name} {old}, not {new}: give another --out'
      )
  table.write_text(path, json.dumps(header, indent=2))


if __name__ == '__main__':
  raise SystemExit(main())
