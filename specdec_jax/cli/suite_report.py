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
# Flags that change nothing that is measured.
_APART = ('out', 'color', 'command', 'run_command', 'own', 'replaced')


def _shown(value: Any) -> str:
  return ','.join(map(str, value)) if isinstance(value, list) else str(value)


def _or_dash(form: str) -> Any:
  return lambda value: '-' if value is None else form.format(value)


def _interval(found: Sequence[float] | None) -> str:
  return '-' if found is None else '{:.2f} to {:.2f}'.format(*found)


_TWO, _COUNT = _or_dash('{:.2f}'), _or_dash('{}')
# Key of a row, the column's name, and how a value is shown.
_COLUMNS: tuple[tuple[str, str, Any], ...] = (
  ('target', 'target', str),
  ('category', 'category', str),
  ('drafter', 'drafter', str),
  ('gamma', 'gamma', str),
  ('temperature', 'T', '{:g}'.format),
  ('batch_size', 'batch', str),
  ('tokens_per_target_run', 'tokens/run (with bonus)', _TWO),
  ('alpha_1', 'alpha_1', _TWO),
  ('alpha_2', 'alpha_2', _TWO),
  ('alpha_3', 'alpha_3', _TWO),
  ('alpha', 'alpha', _TWO),
  ('c', 'c', _or_dash('{:.3f}')),
  ('verify_cost_ratio', 'T(gamma+1)/T(1)', _TWO),
  ('plain_tokens_per_second', 'plain tokens/s', '{:.1f}'.format),
  ('speculative_tokens_per_second', 'spec. tokens/s', '{:.1f}'.format),
  ('speedup', 'speedup', _TWO),
  ('speedup_interval', '95%', _interval),
  ('predicted_speedup', 'predicted', _TWO),
  ('rows', 'rows', str),
  ('identical_rows', 'identical', _COUNT),
  ('near_ties', 'near ties', _COUNT),
)
# What a terminal shows that has fewer columns of characters.
_WIDE = 200
_SHORT = (
  *('target', 'category', 'drafter', 'gamma', 'tokens_per_target_run', 'alpha'),
  *('speedup', 'speedup_interval', 'predicted_speedup'),
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
  continues."""
  flags = {
    name: value
    for name, value in sorted(vars(args).items())
    if name not in _APART
    and value not in (None, False, args.replaced.get(name))
  }
  packages = ('specdec_jax', 'jax', 'jaxlib', 'flax')
  return {
    'device': stopwatch.device_name(),
    'bfloat16 in hardware': has_bfloat16(),
    'dtype': args.dtype,
    'flags': flags,
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
    'versions': {
      'python': platform.python_version(),
      **{name: importlib.import_module(name).__version__ for name in packages},
    },
    'commit': _commit(),
  }


def has_bfloat16() -> str:
  """Whether the device multiplies bfloat16 by itself: yes, no or unknown."""
  device = jax.devices()[0]
  if device.platform == 'tpu':
    return 'yes'
  if device.platform == 'gpu':
    # NVIDIA's, from 8.0 on; others' have no such number.
    capability = getattr(device, 'compute_capability', '')
    numbers = [int(part) for part in str(capability).split('.') if part]
    return ('yes' if numbers[0] >= 8 else 'no') if numbers else 'unknown'
  cpuinfo = Path('/proc/cpuinfo')
  if not cpuinfo.is_file():
    return 'unknown'
  known = {'avx512_bf16', 'amx_bf16', 'bf16'}
  return 'yes' if known & set(cpuinfo.read_text().split()) else 'no'


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

  try:
    commit = git('log', '-1', '--format=%H')
    return f'{commit} with changes' if git('diff', 'HEAD') else commit or None
  except (OSError, subprocess.CalledProcessError):
    return None


def prediction(rows: Sequence[Row]) -> str:
  """A sentence on how far predicted speedups are from measured ones."""
  errors = [
    abs(row['predicted_speedup'] / row['speedup'] - 1)
    for row in rows
    if row['gamma']
  ]
  if not errors:
    return 'Nothing was drafted, and so nothing predicted.'
  return (
    f'Predicted speedups are within {np.median(errors):.1%} of the measured '
    f'ones (median of {len(errors)} rows; the farthest, {max(errors):.0%}).'
  )


def write(
  folder: Path,
  header: Mapping[str, Any],
  rows: Sequence[Row],
  notes: Sequence[str],
) -> None:
  """Writes suite.json, suite.md and, if matplotlib is there, suite.svg."""
  notes = [*notes, prediction(rows)]
  contents = {'title': _TITLE, **header, 'rows': rows, 'notes': notes}
  figures = []
  with (
    contextlib.suppress(ImportError),
    replacing.file(folder / 'suite.svg') as begun,
  ):
    plots.save(plots.speedup_by_category(rows), begun)
    figures = ['suite.svg']
  for name, text in (
    ('suite.json', json.dumps(contents, indent=1) + '\n'),
    ('suite.md', markdown(header, rows, notes, figures)),
  ):
    with replacing.file(folder / name) as begun:
      begun.write_text(text, encoding='utf-8')


def markdown(
  header: Mapping[str, Any],
  rows: Sequence[Row],
  notes: Sequence[str],
  figures: Sequence[str] = (),
) -> str:
  """The table as Markdown."""
  lines = [f'# {_TITLE}', '']
  lines += [f'- {name}: {text}' for name, text in _above(header).items()]
  lines += ['', f'| {" | ".join(name for _, name, _ in _COLUMNS)} |']
  lines += ['|---' * len(_COLUMNS) + '|']
  for row in rows:
    cells = (show(row[key]) for key, _, show in _COLUMNS)
    lines.append(f'| {" | ".join(cells)} |')
  lines += [f'\n![{_TITLE}]({name})' for name in figures]
  lines += [f'\n{note}' for note in (*notes, *_NOTES)]
  return '\n'.join(lines) + '\n'


def _above(header: Mapping[str, Any]) -> dict[str, str]:
  """The header as lines of text."""
  return {
    name: ', '.join(f'{key} {_shown(each)}' for key, each in value.items())
    if isinstance(value, dict)
    else _shown(value)
    for name, value in header.items()
    if value not in ('', None)
  }


def table(
  header: Mapping[str, Any],
  rows: Sequence[Row],
  notes: Sequence[str],
  width: int,
) -> Any:
  """The table for a terminal of a width, as `rich` draws it: of a narrow one
  without the columns that can be left out."""
  from rich.console import Group
  from rich.table import Table

  above = [f'{name}: {text}' for name, text in _above(header).items()]
  drawn = Table(title=_TITLE, box=None)
  columns = [each for each in _COLUMNS if width >= _WIDE or each[0] in _SHORT]
  for _, name, show in columns:
    drawn.add_column(name, justify='left' if show is str else 'right')
  for row in rows:
    drawn.add_row(*(show(row[key]) for key, _, show in columns))
  return Group(*above, drawn, *notes, prediction(rows), *_NOTES)
