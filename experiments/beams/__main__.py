"""Speculative beam search against beam search: the same beams, in fewer calls.

    python -m experiments.corpora debian --out corpora/debian
    python -m experiments.beams --corpus=corpora/debian

It makes two tables: differences over the whole test split, in batches; and the
time per sentence with one row. Lines that are already in `progress.jsonl` are
not measured again, so a stopped run continues.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import common, provenance, report
from experiments.beams import ways
from experiments.beams.ways import Way
from experiments.leviathan2023 import pairs
from experiments.leviathan2023.pairs import Pair
from experiments.report import Table
from specdec_jax.base import Prompt
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Row
from specdec_jax.launch import platforms

MODULE = 'experiments.beams'
# Beam search is code of `contrib`.
_CODE = 'contrib'
# Scores of float32: what rounding can decide otherwise.
TIE = 1e-4


class Progress:
  """Lines that were measured, in a file that a restart reads."""

  def __init__(self, path: Path):
    self.path, self.lines = path, report.lines(path)

  def of(
    self, key: dict[str, Any], measure: Callable[[], list[dict[str, Any]]]
  ) -> list[dict[str, Any]]:
    """The lines under a key, measured now if there are none."""
    for line in self.lines:
      if line['key'] == key:
        return line['found']
    found = measure()
    self.lines.append({'key': key, 'found': found})
    with self.path.open('a', encoding='utf-8') as file:
      file.write(json.dumps(self.lines[-1]) + '\n')
    return found


def equality(pair: Pair, args: argparse.Namespace, progress: Progress) -> Table:
  """All examples in batches, alike in length; every sequence compared."""
  rows = sorted(pair.rows, key=lambda row: len(row.ids))
  rows = common.spread(rows, args.num_examples)
  cells = []
  for num_beams in args.beams:
    made = _compiled_late(pair, num_beams, args, [args.gamma])
    found: list[dict[str, Any]] = []
    batches = common.batches(pair.layout, rows, args.batch_size)
    for i, (prompt, part) in enumerate(batches):
      key = _key('equality', args, beams=num_beams, batch=i, rows=rows)
      compare = functools.partial(_compared, pair, made, prompt, part, args)
      found += progress.of(key, lambda: compare(num_beams))  # noqa: B023
      print(f'equality, {num_beams} beams: batch {i}', file=sys.stderr)
    cells += _summed(found, num_beams)
  gaps = [gap for row in cells for gap in row.pop('gaps')]
  text = 'No sequence differs.'
  if gaps:
    text = (
      f'Of every example with a difference the whole search was followed: the '
      f'least gap that decided anything is at most {max(gaps):.1g} of '
      f'log-probability or score. Less than {TIE:g} counts as a tie.'
    )
  return Table(rows=cells, notes=[text])


def _compiled_late(
  pair: Pair, num_beams: int, args: argparse.Namespace, gammas: Sequence[int]
) -> Callable[[], list[Way]]:
  """Plain beam search and the others, made when they are first needed."""

  @functools.cache
  def make() -> list[Way]:
    chosen = ways.choices(pair, gammas, args.copied)
    return [
      ways.plain(pair, num_beams, args.alpha),
      *(ways.speculative(pair, num_beams, args.alpha, each) for each in chosen),
    ]

  return make


def _compared(
  pair: Pair,
  made: Callable[[], list[Way]],
  prompt: Prompt,
  part: Sequence[Row],
  args: argparse.Namespace,
  num_beams: int,
) -> list[dict[str, Any]]:
  """Of each way, what a batch shows."""
  plain, *others = made()
  expected = jax.device_get(plain.search(prompt))
  result, gap_of = (
    [],
    functools.cache(
      lambda row: ways.smallest_gap(
        pair, common.pack(pair.layout, [part[row]], 1), num_beams, args.alpha
      )
    ),
  )
  for way in others:
    found = jax.device_get(way.search(prompt))
    counts = found.statistics
    different = [
      row
      for row in range(len(part))
      if ways.num_different(found, expected, row)
    ]
    here = slice(len(part))
    is_same = np.isin(np.arange(len(part)), different, invert=True)
    off = np.abs(found.scores[here] - expected.scores[here])[is_same]
    result.append(
      {
        'drafter': way.name,
        'gamma': way.gamma,
        'width': way.width,
        'examples': len(part),
        'different': len(different),
        'gaps': [gap_of(row) for row in different],
        'best_different': sum(
          not np.array_equal(found.tokens[row, -1], expected.tokens[row, -1])
          for row in different
        ),
        'largest_error': float(off.max(initial=0.0)),
        'plain_runs': int(expected.statistics.num_target_runs[here].sum()),
        'runs': int(counts.num_target_runs[here].sum()),
        'tested': int(counts.num_tested[here].sum()),
        'accepted': int(counts.num_accepted[here].sum()),
      }
    )
  return result


def _summed(
  found: Sequence[dict[str, Any]], num_beams: int
) -> Iterator[dict[str, Any]]:
  """A row of the table for each drafter."""
  for name, gamma, width in dict.fromkeys(
    (each['drafter'], each['gamma'], each['width']) for each in found
  ):
    own = [each for each in found if each['drafter'] == name]
    total = lambda key: sum(each[key] for each in own)  # noqa: B023
    gaps = [gap for each in own for gap in each['gaps']]
    accepted, tested = total('accepted'), total('tested')
    yield {
      'beams': num_beams,
      'drafter': name,
      'gamma': gamma,
      'nodes per level': width,
      'examples': total('examples'),
      'examples with a difference': total('different'),
      'float ties': sum(gap < TIE for gap in gaps),
      'another best sequence': total('best_different'),
      'largest difference of scores': (
        f'{max(each["largest_error"] for each in own):.1e}'
      ),
      'target calls of beam search': total('plain_runs'),
      'target calls': total('runs'),
      'steps per call': total('plain_runs') / total('runs'),
      'levels followed': accepted / tested if tested else None,
      'gaps': gaps,
    }


def speed(pair: Pair, args: argparse.Namespace, progress: Progress) -> Table:
  """One row at a time: the median of `repeats` turns of each example."""
  rows = common.spread(pair.rows, args.num_timed)
  cells = []
  for num_beams in args.beams:
    made = _compiled_late(pair, num_beams, args, args.gammas)
    found: list[list[dict[str, Any]]] = []
    for i, row in enumerate(rows):
      key = _key('speed', args, beams=num_beams, example=i, rows=rows)
      prompt = common.pack(pair.layout, [row], 1)
      time_it = functools.partial(_timed, made, prompt, args.repeats)
      found.append(progress.of(key, time_it))
      print(f'speed, {num_beams} beams: example {i}', file=sys.stderr)
    total = lambda way, key: sum(each[way][key] for each in found)  # noqa: B023
    plain = total(0, 'seconds')
    for way, each in enumerate(found[0]):
      runs = total(way, 'runs')
      cells.append(
        {
          'beams': num_beams,
          'drafter': each['drafter'],
          'gamma': each['gamma'],
          'nodes per level': each['width'],
          'ms per sentence': 1000 * total(way, 'seconds') / len(rows),
          'speed over beam search': plain / total(way, 'seconds'),
          'target calls': runs,
          'steps per call': total(0, 'runs') / runs,
        }
      )
  return Table(rows=cells)


def _timed(
  made: Callable[[], list[Way]], prompt: Prompt, repeats: int
) -> list[dict[str, Any]]:
  """Of each way, its time for an example, the ways taking turns."""
  searches = made()
  outputs = [jax.device_get(way.search(prompt)) for way in searches]
  seconds = np.zeros((repeats, len(searches)))
  for turn in range(repeats):
    for i, way in enumerate(searches):
      started = time.perf_counter()
      jax.block_until_ready(way.search(prompt))
      seconds[turn, i] = time.perf_counter() - started
  return [
    {
      'drafter': way.name,
      'gamma': way.gamma,
      'width': way.width,
      'seconds': float(np.median(seconds[:, i])),
      'runs': int(output.statistics.num_target_runs[0]),
    }
    for i, (way, output) in enumerate(zip(searches, outputs, strict=True))
  ]


def _key(
  table: str, args: argparse.Namespace, *, rows: Sequence[Row], **more: Any
) -> dict[str, Any]:
  """What a line of progress is of."""
  more |= {'rows': examples.digest(rows)}
  shared = {'alpha': args.alpha, 'copied': args.copied}
  shared |= {'code': provenance.code(_CODE)}
  if table == 'equality':
    shared |= {'gamma': args.gamma, 'batch_size': args.batch_size}
  else:
    shared |= {'gammas': list(args.gammas), 'repeats': args.repeats}
    shared |= {'device': platforms.device_name()}
  return {'table': table, 'pair': args.pair, **shared, **more}


TABLES = {
  'equality': ('Speculative beam search: the same beams', equality),
  'speed': ('Speculative beam search: time of one sentence', speed),
}


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  pair = pairs.load(args.pair, Path(args.corpus), 0)
  folder = Path(args.output)
  folder.mkdir(parents=True, exist_ok=True)
  progress = Progress(folder / 'progress.jsonl')
  for name in args.tables:
    title, make = TABLES[name]
    report.measure(
      (MODULE, argv),
      folder,
      name,
      title,
      functools.partial(make, pair, args, progress),
      {
        'models': pair.names,
        'dtypes': str(pairs.Dtypes()),
        'code': provenance.code(_CODE),
      },
    )


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  parser.add_argument('--pair', default='ende')
  parser.add_argument('--corpus', default='corpora/debian', metavar='DIR')
  parser.add_argument('--output', default='experiments/beams/results')
  parser.add_argument('--beams', type=common.numbers, default=[4, 5])
  parser.add_argument('--gammas', type=common.numbers, default=[1, 2, 3, 4])
  parser.add_argument('--alpha', type=float, default=0.6)
  common.add_tables(parser, TABLES)
  common.add_counts(
    parser,
    num_examples=10**9,
    batch_size=32,
    gamma=3,
    copied=3,
    num_timed=24,
    repeats=3,
  )
  args = parser.parse_args(argv)
  return common.finish('beams', lambda: _run(args, argv))


if __name__ == '__main__':
  sys.exit(main())
