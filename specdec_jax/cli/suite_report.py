"""The suite's table: on the terminal, as Markdown, JSON and a plot."""

import argparse
import contextlib
import importlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specdec_jax
from specdec_jax.files import replacing
from specdec_jax.measure import plots, stopwatch

Row = dict[str, Any]

_TITLE = 'Benchmark suite'
# A terminal with fewer columns of characters shows `_SHORT` alone.
_WIDE = 200
# Names of columns by the keys of rows, and the form of their values.
_COLUMNS = {
  'target': ('target', '{}'),
  'category': ('category', '{}'),
  'drafter': ('drafter', '{}'),
  'gamma': ('gamma', '{}'),
  'temperature': ('T', '{:g}'),
  'batch_size': ('batch', '{}'),
  'tokens_per_target_run': ('tokens/run (with bonus)', '{:.2f}'),
  'alpha_1': ('alpha_1', '{:.2f}'),
  'alpha_2': ('alpha_2', '{:.2f}'),
  'alpha_3': ('alpha_3', '{:.2f}'),
  'alpha': ('alpha', '{:.2f}'),
  'c': ('c', '{:.3f}'),
  'verify_cost_ratio': ('T(gamma+1)/T(1)', '{:.2f}'),
  'plain': ('plain', '{}'),
  'plain_tokens_per_second': ('plain tokens/s', '{:.1f}'),
  'speculative_tokens_per_second': ('speculative tokens/s', '{:.1f}'),
  'speedup': ('speedup', '{:.2f}'),
  'speedup_interval': ('95%', '{0[0]:.2f} to {0[1]:.2f}'),
  'predicted_speedup': ('predicted', '{:.2f}'),
  'rows': ('rows', '{}'),
  'identical_rows': ('identical', '{}'),
  'near_ties': ('near ties', '{}'),
}
_SHORT = (
  *('category', 'drafter', 'gamma', 'tokens_per_target_run', 'speedup'),
  *('speedup_interval', 'predicted_speedup'),
)
_NOTES = (
  'Tokens per target run count the bonus token, or the correction. alpha_i is '
  'the acceptance of the i-th drafted token, given that those before it were '
  'accepted; alpha is accepted over tested tokens of all positions.',
  'Speed is of decoding, after the prefill, compilation excluded, against the '
  'fastest plain loop, in turns with it. The interval is over prompts, or over '
  'batches of them; the prediction is from measured tokens, c and T.',
  'Identical rows have the tokens of plain decoding in the same dtype. A near '
  'tie is another row, whose first difference is between two tokens with the '
  'same logit up to rounding. Sampled rows are not compared.',
)


def header(args: argparse.Namespace) -> dict[str, Any]:
  """What stands above the table, and what a run must share with one that it
  continues; flags are those that change what is measured."""
  apart = ('out', 'color', 'command', 'run_command', 'own', 'replaced')
  unset = lambda name: (None, False, args.replaced.get(name))
  packages = ('specdec_jax', 'jax', 'jaxlib', 'flax')
  return {
    'device': stopwatch.device_name(),
    'bfloat16 in hardware': 'yes' if has_bfloat16() else 'no',
    'dtype': args.dtype,
    'flags': {
      name: value
      for name, value in sorted(vars(args).items())
      if name not in apart and value not in unset(name)
    },
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
    'versions': {'python': platform.python_version()}
    | {name: importlib.import_module(name).__version__ for name in packages},
    'commit': _commit(),
  }


def has_bfloat16() -> bool:
  """Whether the device multiplies bfloat16 by itself, as far as it says so."""
  device = jax.devices()[0]
  if device.platform != 'cpu':  # Of GPUs, NVIDIA's from 8.0 on.
    return float(getattr(device, 'compute_capability', 8)) >= 8
  cpuinfo = Path('/proc/cpuinfo')
  words = cpuinfo.read_text().split() if cpuinfo.is_file() else ()
  return not {'avx512_bf16', 'amx_bf16', 'bf16'}.isdisjoint(words)


def _commit() -> str | None:
  """The last commit of the package, and whether it was changed since; None if
  it is in no repository."""

  def git(*command: str) -> str:
    return subprocess.run(
      ['git', *command, '--', '.'],
      cwd=Path(specdec_jax.__file__).parent,
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  with contextlib.suppress(OSError, subprocess.CalledProcessError):
    commit = git('log', '-1', '--format=%H')
    return f'{commit} with changes' if git('diff', 'HEAD') else commit or None
  return None


def prediction(rows: Sequence[Row]) -> str:
  """A sentence on how far predicted speedups are from measured ones."""
  drafting = [row for row in rows if row['gamma']]
  if not drafting:
    return 'Nothing was drafted, and so nothing predicted.'
  ratios = [row['predicted_speedup'] / row['speedup'] for row in drafting]
  errors = np.abs(np.array(ratios) - 1)
  return (
    f'Predicted speedups are within {np.median(errors):.1%} of the measured '
    f'ones (median of {errors.size} rows; the farthest, {errors.max():.0%}).'
  )


def write(
  folder: Path, header: Mapping[str, Any], rows: Sequence[Row], notes: list[str]
) -> None:
  """Writes suite.json, suite.md and, if matplotlib is there, suite.svg."""
  notes = [*notes, prediction(rows)]
  contents = {'title': _TITLE, **header, 'rows': rows, 'notes': notes}
  columns = [name for name, _ in _COLUMNS.values()]
  cells = [columns, ['---'] * len(columns), *_cells(rows, _COLUMNS)]
  lines = [f'# {_TITLE}', '', *(f'- {line}' for line in _above(header)), '']
  lines += [f'| {" | ".join(row)} |' for row in cells]
  with contextlib.suppress(ImportError):
    figure = plots.speedup_by_category(rows)
    with replacing.file(folder / 'suite.svg') as begun:
      plots.save(figure, begun)
    lines += ['', f'![{_TITLE}](suite.svg)']
  lines += [f'\n{note}' for note in (*notes, *_NOTES)]
  for name, text in (
    ('suite.json', json.dumps(contents, indent=1)),
    ('suite.md', '\n'.join(lines)),
  ):
    with replacing.file(folder / name) as begun:
      begun.write_text(text + '\n', encoding='utf-8')


def table(
  header: Mapping[str, Any], rows: Sequence[Row], notes: list[str], width: int
) -> Any:
  """What a terminal of a width shows, for `rich`."""
  from rich.console import Group
  from rich.table import Table

  columns = _COLUMNS
  if width < _WIDE:
    columns = {name: _COLUMNS[name] for name in _SHORT}
  tables = []
  for target in dict.fromkeys(row['target'] for row in rows):
    tables.append(Table(title=target, box=None, padding=(0, 1, 0, 0)))
    for name, form in columns.values():
      is_text = form == '{}'
      tables[-1].add_column(
        name.replace(' (', '\n('),
        justify='left' if is_text else 'right',
        no_wrap=not is_text,
      )
    for cells in _cells([r for r in rows if r['target'] == target], columns):
      tables[-1].add_row(*cells)
  return Group(*_above(header), *tables, *notes, prediction(rows), *_NOTES)


def _above(header: Mapping[str, Any]) -> list[str]:
  """The header as lines of text."""
  listed = lambda value: (
    ','.join(map(str, value)) if isinstance(value, list) else str(value)
  )
  return [
    f'{name}: '
    + ', '.join(f'{key} {listed(each)}' for key, each in value.items())
    if isinstance(value, dict)
    else f'{name}: {listed(value)}'
    for name, value in header.items()
    if value
  ]


def _cells(
  rows: Sequence[Row], columns: Mapping[str, tuple[str, str]]
) -> list[list[str]]:
  return [
    [
      '-' if row[key] is None else form.format(row[key])
      for key, (_, form) in columns.items()
    ]
    for row in rows
  ]
