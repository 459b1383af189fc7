"""The suite's table: on the terminal, as Markdown, JSON and a plot."""

import importlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specdec_jax.files import replacing
from specdec_jax.measure import plots, provenance, stopwatch

Row = dict[str, Any]

_TITLE = 'Benchmark suite'
# Names of columns by the keys of rows, and the form of their values.
COLUMNS = {
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
# What a narrow terminal shows.
SHORT = (
  *('category', 'drafter', 'gamma', 'tokens_per_target_run', 'speedup'),
  *('speedup_interval', 'predicted_speedup'),
)
NOTES = (
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


def header(dtype: str, flags: Mapping[str, Any]) -> dict[str, Any]:
  """What stands above the table, and what a run must share with one that it
  continues; flags are those that change what is measured."""
  packages = ('specdec_jax', 'jax', 'jaxlib', 'flax')
  return {
    'device': stopwatch.device_name(),
    'bfloat16 in hardware': 'yes' if _has_bfloat16() else 'no',
    'dtype': dtype,
    'flags': flags,
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
    'versions': {'python': platform.python_version()}
    | {name: importlib.import_module(name).__version__ for name in packages},
    'commit': provenance.commit(),
    'code': provenance.code(),
  }


def begin(folder: Path, header: Mapping[str, Any]) -> None:
  """Makes the folder, or finds one that was begun in the same way.

  Raises:
    ValueError: if it was begun in another.
  """
  (folder / 'cells').mkdir(parents=True, exist_ok=True)
  path = folder / 'settings.json'
  if path.exists():
    flat = lambda settings: {**settings, **settings['flags'], 'flags': None}
    before = flat(json.loads(path.read_text(encoding='utf-8')))
    now = flat(header)
    for name in {**before, **now}:
      old, new = before.get(name), now.get(name)
      if old == new:
        continue
      reason = f'{folder} was begun with {name} {old}, not {new}'
      if name != 'commit':
        raise ValueError(f'{reason}: give another --out')
      # What was never committed cannot be had again.
      is_there = old and provenance.CHANGED not in old
      again = f'check out {old} to go on, or ' if is_there else ''
      raise ValueError(
        f'{reason}, and figures of two versions do not mix: {again}give '
        'another --out'
      )
  write_text(path, json.dumps(header, indent=2))


def write_text(path: Path, text: str) -> None:
  """Writes a file that is whole or not there."""
  with replacing.file(path) as begun:
    begun.write_text(text + '\n', encoding='utf-8')


def _has_bfloat16() -> bool:
  """Whether the device multiplies bfloat16 by itself, as far as it says so."""
  device = jax.devices()[0]
  if device.platform != 'cpu':  # Of GPUs, NVIDIA's from 8.0 on.
    return float(getattr(device, 'compute_capability', 8)) >= 8
  cpuinfo = Path('/proc/cpuinfo')
  words = cpuinfo.read_text().split() if cpuinfo.is_file() else ()
  return not {'avx512_bf16', 'amx_bf16', 'bf16'}.isdisjoint(words)


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
) -> str:
  """Writes suite.json, suite.md and, if matplotlib is there, suite.svg; returns
  the plot's name, or why there is none."""
  notes = [*notes, prediction(rows)]
  contents = {'title': _TITLE, **header, 'rows': rows, 'notes': notes}
  columns = [name for name, _ in COLUMNS.values()]
  grid = [columns, ['---'] * len(columns), *cells(rows, COLUMNS)]
  lines = [f'# {_TITLE}', '', *(f'- {line}' for line in above(header)), '']
  lines += [f'| {" | ".join(row)} |' for row in grid]
  plot = 'suite.svg'
  try:
    figure = plots.speedup_by_category(rows)
    with replacing.file(folder / plot) as begun:
      plots.save(figure, begun)
    lines += ['', f'![{_TITLE}]({plot})']
  except ImportError as error:
    plot = f'none, since {error}'
  lines += [f'\n{note}' for note in (*notes, *NOTES)]
  write_text(folder / 'suite.json', json.dumps(contents, indent=1))
  write_text(folder / 'suite.md', '\n'.join(lines))
  return plot


def above(header: Mapping[str, Any]) -> list[str]:
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
    if value and name != 'code'
  ]


def cells(
  rows: Sequence[Row], columns: Mapping[str, tuple[str, str]]
) -> list[list[str]]:
  """Rows as text."""
  return [
    [
      '-' if row[key] is None else form.format(row[key])
      for key, (_, form) in columns.items()
    ]
    for row in rows
  ]
