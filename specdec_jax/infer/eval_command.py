"""Evaluates the output of `infer`: BLEU, ROUGE, and the rates of its drafts.

Targets are read from the predictions, or from --targets. A SeqIO task (--task)
has its own metrics.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_jax.assembly.option_fields import by_name
from specdec_jax.cli import options, outputs
from specdec_jax.files import text_lines
from specdec_jax.files.paths import user_path
from specdec_jax.infer import output, quality
from specdec_jax.infer.records import Record
from specdec_jax.launch import progress
from specdec_jax.text import tasks
from specdec_jax.theory import estimates

_TARGET = 'targets_pretokenized'
_COUNTERS = ('tokens', 'target_runs', 'drafted', 'tested', 'accepted')


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add('predictions', nargs='+', help='JSONL files of `infer` or of t5x.infer')
  metrics = parser.add_mutually_exclusive_group()
  metrics.add_argument(
    '--metrics',
    default='bleu,rouge',
    metavar='NAME,...',
    help=f'comma-separated, of {", ".join(quality.METRICS)}',
  )
  metrics.add_argument('--task', help='a SeqIO task, for its metrics')
  add(
    '--targets',
    metavar='FILE',
    help='a text per line, or .jsonl with "targets" (default: those beside the '
    'predictions)',
  )
  options.add_report(parser)


def run(args: argparse.Namespace) -> int:
  # Read predictions and targets.
  metric_fns = _metric_fns(args.task, args.metrics.split(','))
  inputs = {f'predictions {path}': path for path in args.predictions}
  outputs.check({'--json': args.json}, {**inputs, '--targets': args.targets})
  paths = map(user_path, args.predictions)
  records = list(itertools.chain.from_iterable(map(_read, paths)))
  if args.targets and args.targets.endswith('.tsv'):
    raise ValueError(
      f'--targets {args.targets} also has inputs: give a .txt of the targets, '
      'or a .jsonl'
    )
  if args.targets:
    _check_whole(args.predictions)
    field = 'targets' if args.targets.endswith('.jsonl') else 'inputs'
    task = tasks.find(args.targets, inputs_field=field)
    targets = [example.inputs for example in task.read()]
  else:
    targets = _targets_of(records)
  num_targets = len(targets)
  if num_targets != len(records):
    raise ValueError(
      f'{args.targets} has {num_targets} targets for {len(records)} predictions'
    )
  predictions = [record['prediction'] for record in records]
  # Figures in the order of the table: counts, metrics, rates.
  figures: Record = {'examples': len(records)}
  with progress.waiting('computing metrics'):
    for metric_fn in metric_fns:
      # SeqIO wraps some figures in objects with a `value`.
      figures |= {
        name: float(getattr(value, 'value', value))
        for name, value in metric_fn(targets, predictions).items()
      }
  figures |= _rates([record.get('aux') for record in records])
  # Figures are counts and rates; None is a rate without a count.
  show = lambda x: f'{x:,}' if isinstance(x, int) else f'{x:.2f}'
  rows = [(k, '-' if x is None else show(x)) for k, x in figures.items()]
  table = outputs.table(('', ''), rows, title=', '.join(args.predictions))
  return outputs.report(args, figures, table)


def _metric_fns(
  task_name: str | None, names: Sequence[str]
) -> list[tasks.MetricFn]:
  if not task_name:
    return [by_name('--metrics', quality.METRICS, name) for name in names]
  task = tasks.find(task_name, split=None, metric_fns=quality.METRICS)
  if not task.metric_fns:
    raise ValueError(f'task {task_name} has no metrics: give --metrics instead')
  return list(task.metric_fns)


def _read(path: Path) -> list[Record]:
  records = []
  for place, record in text_lines.read_objects(path):
    decodes = record.get('prediction')
    if isinstance(decodes, list) and decodes:
      record['prediction'] = decodes[-1]  # The best is last.
    text_lines.text_under(record, 'prediction', place)
    records.append(record)
  if not records:
    raise ValueError(f'{path} holds no prediction')
  return records


def _check_whole(paths: Sequence[str]) -> None:
  """Raises ValueError for one of several shards, whose lines would be compared
  with the wrong targets."""
  for path in paths:
    match = output.SHARD.fullmatch(Path(path).name)
    if match and int(match['count']) > 1:
      raise ValueError(
        f'{path} is a shard, which has other lines than --targets: join all of '
        'them with `specdec merge`'
      )


def _targets_of(records: Sequence[Record]) -> list[str]:
  """Returns the targets that the lines of predictions have."""
  inputs: list[Any] = [record.get('inputs') for record in records]
  is_there = lambda x: isinstance(x, dict) and isinstance(x.get(_TARGET), str)
  if missing := [x for x in inputs if not is_there(x)]:
    shown = 'the first has no object under "inputs"'
    if isinstance(missing[0], dict):
      shown = f'the first has "inputs"; {text_lines.keys_of(missing[0])}'
    raise ValueError(
      f'{len(missing)} of {len(inputs)} predictions have no text "{_TARGET}" '
      f'under "inputs", {shown}: give --targets'
    )
  return [x[_TARGET] for x in inputs]


def _rates(records: Sequence[Any]) -> Record:
  """Computes rates over all examples; none unless all have counters."""
  is_counted = lambda counters: (
    isinstance(counters, dict)
    and all(isinstance(counters.get(name), int) for name in _COUNTERS)
  )
  if not all(map(is_counted, records)):
    return {}
  # Rates of sums, not means of rates: long texts weigh more than short ones.
  total = {
    name: sum(counters[name] for counters in records) for name in _COUNTERS
  }
  tokens, runs, _, tested, accepted = total.values()
  return total | {
    'block_efficiency': estimates.quotient(tokens, runs),
    'alpha': estimates.quotient(accepted, tested),
  }
