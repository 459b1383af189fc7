"""The suite's table as JSON, Markdown and a plot."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import plots, report
from experiments.report import Cells
from experiments.suite import auto
from specdec_jax.files import replacing

TITLE = 'Benchmark suite'
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
  'exact_rows': ('identical, exact_bits', '{}'),
  'near_ties': ('near ties', '{}'),
}
# What the terminal shows.
SHORT = (
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
  'same logit up to rounding. With exact_bits, both sides call the target at '
  'one width. Sampled rows are not compared.',
)


def write_text(path: Path, text: str) -> None:
  """Writes a file that is whole or not there."""
  with replacing.file(path) as begun:
    begun.write_text(text + '\n', encoding='utf-8')


def prediction(rows: Sequence[Cells]) -> str:
  """Says how far predicted speedups are from measured ones."""
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
  folder: Path, header: Cells, rows: Sequence[Cells], notes: Sequence[str]
) -> str:
  """Writes suite.json, suite.md and, if matplotlib is there, suite.svg; returns
  what the terminal shows."""
  notes, figures = [*notes], ['suite.svg']
  try:
    figure = speedup_by_category(rows)
    with replacing.file(folder / figures[0]) as begun:
      plots.save(figure, begun)
  except ImportError as error:
    figures = []
    notes.append(f'There is no plot: {error}.')
  notes.append(prediction(rows))
  contents = {'title': TITLE, **header, 'rows': rows, 'notes': notes}
  write_text(folder / 'suite.json', json.dumps(contents, indent=1))
  contents |= {'figures': figures, 'notes': [*notes, *_NOTES]}
  shown = contents | {'rows': cells(rows, COLUMNS)}
  write_text(folder / 'suite.md', report.markdown(shown, level=1).rstrip())
  short = contents | {'rows': cells(rows, SHORT), 'figures': []}
  return report.markdown(short)


def cells(rows: Sequence[Cells], keys: Sequence[str]) -> list[Cells]:
  """Returns rows as text, by the names of their columns."""
  named = [(key, *COLUMNS[key]) for key in keys]
  return [
    {
      name: '-' if row[key] is None else form.format(row[key])
      for key, name, form in named
    }
    for row in rows
  ]


def speedup_by_category(rows: Sequence[Mapping[str, Any]]) -> Any:
  """Draws measured speedups with their intervals, and bars for predicted ones:
  a group per category."""
  figure, axes = plots.new_figure()
  names = ('target', 'drafter', 'gamma', 'temperature', 'batch_size')
  # What `auto` chooses differs by category.
  rows = [
    {**row, 'gamma': ''} if row['drafter'].endswith(auto.SUFFIX) else row
    for row in rows
  ]
  ways = list(dict.fromkeys(tuple(row[n] for n in names) for row in rows))
  groups = list(dict.fromkeys(row['category'] for row in rows))
  figure.set_size_inches(9, 2 + 0.14 * len(rows))
  colors = itertools.cycle(plots.COLORS)
  for (i, way), color in zip(enumerate(ways), colors, strict=False):
    own = [row for row in rows if tuple(row[n] for n in names) == way]
    heights = [
      groups.index(row['category']) + 0.8 * (i + 0.5) / len(ways) for row in own
    ]
    target, drafter, gamma, temperature, batch = (
      str(part).rpartition('/')[2] for part in way
    )
    label = f'{target}, {drafter} {gamma}, T {temperature}, batch {batch}'
    shared = {'color': color, 'linestyle': '', 'markersize': 4}
    speedups = [row['speedup'] for row in own]
    axes.plot(speedups, heights, marker='o', label=label, **shared)
    predicted = [row['predicted_speedup'] for row in own]
    axes.plot(predicted, heights, **shared | {'marker': '|', 'markersize': 9})
    for row, height in zip(own, heights, strict=True):
      if row['speedup_interval']:
        axes.hlines(height, *row['speedup_interval'], color=color)
  axes.set_yticks([i + 0.4 for i in range(len(groups))], labels=groups)
  axes.invert_yaxis()
  axes.axvline(1, color='#5d6572', linewidth=0.8, linestyle='--')
  axes.set_xlabel('speedup over plain decoding, 95% interval; |: predicted')
  axes.legend(loc='upper left', bbox_to_anchor=(1, 1), frameon=False)
  return figure
