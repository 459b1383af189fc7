"""What README.md and the first lines of experiments/RESULTS.md quote from the
files of the tables: only measurements of the current code.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import report
from experiments.leviathan2023 import paper
from experiments.report import Cells

QUOTED = 'quoted/results/speed.json'
_SUITE = 'suite/suite.json'
_AUTO = 'auto_gamma/results/results.json'
_EAGLE = 'eagle/suite/suite.json'
_TREES = 'trees/results/speed.json'
_BEAMS = 'beams/results/equality.json', 'beams/results/speed.json'
_SPEEDS = (
  'leviathan2023/results/table_2.json',
  'leviathan2023/results/table_4.json',
)
_GAINS = 'sun2024/results/tokens_per_run.json'
_MAIN = 'xia2023/results/main.json'
# A speed within so much of plain decoding's is neither a gain nor a loss.
_EVEN = 0.03
_VERDICTS = {'gain': 'gains', 'even': 'neither', 'loss': 'loses'}
_HEAD = """\
Speeds are relative to the fastest plain decoding on the same machine: batch 1,
greedy and after the prefill unless stated otherwise. These lines quote only
measurements of the current code; tables of earlier code are marked below.
"""
_SUITE_TEXT = """\
- **By kind of prompt:** SmolLM2-135M with prompt lookup at gamma {suite_gamma}
  ({suite_on}, {suite_dtype}, {suite_tokens} tokens per prompt): {gains}. The
  [suite](suite/suite.md) has more. {prediction}
"""
_EAGLE_TEXT = """\
- **An EAGLE-3 drafter, trained here on two cores:** with `{drafter}` at gamma
  {gamma} ({on}, {dtype}), SmolLM2-135M gives {tokens} tokens per target run, at
  {speeds} times plain decoding's speed. With prompt lookup where it finds a
  match it gives {both}, at {both_speeds}. The
  [suite](eagle/suite/suite.md) has all {count} categories.
"""
_AUTO_TEXT = """\
- **The gamma that `gamma='auto'` chooses** reaches {of_best} of the speed of
  the best gamma of a search, in
  [six settings](auto_gamma/results/auto_gamma.md). Including the
  trials, it is at most {measuring} slower than plain decoding.
"""
_TREES_TEXT = """\
- **Trees of drafts on this CPU:** `ende-nano` gives {tree:.2f} tokens per
  target run with 16 nodes and {chain:.2f} with a chain of 4, at
  {tree_speed:.2f} and {chain_speed:.2f} times plain decoding's speed. Several
  continuations of prompt lookup give at most {copies:.2f} more tokens per
  target run than one.
"""
_BEAMS_TEXT = """\
- **Speculative beam search:** {num_different} of {num_examples} searches with
  {beams} beams, with and without drafts, find other sequences than plain beam
  search. One cache row per example gives {row} times beam search's speed
  without drafts and at most {drafted:.2f} with drafts, although drafts save
  {saved} of the target's calls.
"""
_SPEEDS_TEXT = """\
- **Leviathan's speeds:** {ende:.2f} for translation (paper: {ende_theirs}) and
  {synopsis:.2f} for summaries (paper: {synopsis_theirs}), on {here}. Alpha is
  {ende_alpha:.2f} (paper: {ende_alphas}) and {synopsis_alpha:.2f} (paper:
  {synopsis_alphas}). T5-XXL and LaMDA were not run: with models of 10 million
  parameters on two CPU cores, a drafted token costs {c:.2f} plain steps (paper:
  {c_theirs} with T5-small), and scoring a draft costs more than scoring a
  token.
"""
_GAINS_TEXT = """\
- **Sun's block verification** gives {least_gain} to {most_gain} more tokens per
  target run at gamma {sun_gamma} and temperature 1; for {num_unclear} of the
  {num_gains} pairs the interval includes 0.
"""
_MAIN_TEXT = """\
- **Xia's figures are not reproduced:** strict verification gives {strict:.2f}
  tokens per iteration (paper: {strict_theirs}). Top-3 tau 1 has {relaxed:.2f}
  times the speed of beam search (paper: {relaxed_theirs}), and
  {over_greedy:.2f} times that of greedy decoding. Our Spec-Drafter was trained
  for 3.3 hours on two cores, the paper's for 300,000 steps on WMT14.
"""
_THEORY = """\
- **Theory is reproduced:** Leviathan's Table 1 to the printed digits, the
  expected speeds of Table 4 within 0.07, Sun's example exactly.
- **Not measured:** any GPU or TPU, and the papers' own texts (WMT, CNN/DM,
  LM1B); texts from Debian's archive stand in for them.
"""


def lines(root: Path) -> str:
  """The lines as Markdown: what gains, what does not, and other measurements of
  this code; empty if nothing that is quoted was measured.

  Args:
    root: the folder of the experiments.
  """
  quoted = fresh(root, QUOTED)
  if not quoted:
    return ''
  parts = [_HEAD, '\n', _verdicts(quoted[0])]
  for text, names, values in _PARTS:
    if tables := fresh(root, *names):
      parts.append(text.replace('\n  ', ' ').format(**values(*tables)))
  return ''.join([*parts, _THEORY.replace('\n  ', ' ')])


def fresh(root: Path, *names: str) -> list[Cells]:
  """Contents of files of results; nothing if one is missing, or its code has
  changed since."""
  paths = [root / name for name in names]
  if not all(path.exists() for path in paths):
    return []
  found = [json.loads(path.read_text(encoding='utf-8')) for path in paths]
  return [] if any(map(report.age, found)) else found


def front(root: Path) -> str:
  """The speeds of README.md as Markdown, best first, each with its command."""
  quoted = fresh(root, QUOTED)
  if not quoted:
    return (
      'No speed was measured with the current code: run `python -m '
      'experiments.quoted`.\n'
    )
  [table] = quoted
  rows = _by_speed(table)
  commands = [f'{i + 1}  {row["command"]}' for i, row in enumerate(rows)]
  grid = [
    '| target and drafter | text | dtype | speed | verdict | range | '
    'predicted | command |',
    '|---|---|---|---|---|---|---|---|',
    *(
      f'| {row["target and drafter"]} | {row["text"]} | {row["dtype"]} | '
      f'**{row["speed"]:.2f}** | {_VERDICTS[_kind(row)]} | {row["turns"]} | '
      f'{row["predicted"]:.2f} | {i + 1} |'
      for i, row in enumerate(rows)
    ),
  ]
  return '\n'.join(
    [
      'Speeds are relative to the fastest plain decoding on the same device: '
      'batch 1, greedy, after the prefill, compilation excluded',
      f'({_device(table)}, {table["date"]}, commit {table["commit"][:10]}'
      f'{_doubts(table)}). Predicted from the costs of the parts.',
      '',
      *grid,
      '',
      '```',
      *commands,
      '```',
      '',
    ]
  )


def _verdicts(table: Cells) -> str:
  """Lines on what gains, what does neither, and what loses."""
  kinds: dict[str, list[str]] = {'gain': [], 'even': [], 'loss': []}
  for row in _by_speed(table):
    kinds[_kind(row)].append(
      f'**{row["speed"]:.2f}** {row["target and drafter"]}, {row["text"]} '
      f'({row["dtype"]})'
    )
  names = {'gain': 'Gains', 'even': 'Neither gains nor loses', 'loss': 'Loses'}
  where = f'{_device(table)}, {table["date"]}'
  return ''.join(
    f'- **{name}** ({where}): {"; ".join(kinds[kind]) or "nothing"}.\n'
    for kind, name in names.items()
  )


def _by_speed(table: Cells) -> list[Cells]:
  return sorted(table['rows'], key=lambda row: -row['speed'])


def _kind(row: Cells) -> str:
  if abs(row['speed'] - 1) <= _EVEN:
    return 'even'
  return 'gain' if row['speed'] > 1 else 'loss'


def _doubts(table: Cells) -> str:
  # Each note is on one row.
  count = len(table['notes'])
  where = '[in doubt](experiments/RESULTS.md#speeds)'
  return f'; times of {count} rows are {where}' if count else ''


def _device(table: Cells) -> str:
  return table['device'].partition(', jax')[0]


def _by_task(rows: list[Cells]) -> dict[tuple[str, int], Cells]:
  return {(row['task'].split()[0], row['T']): row for row in rows}


def _listed(parts: Any) -> str:
  *head, last = parts
  return f'{", ".join(head)} and {last}' if head else last


def _range(row: Cells, place: int) -> str:
  """The paper's least and greatest of gamma, alpha and speed in a row."""
  values = [
    float(cell.removesuffix(f' {paper.TAG}').split(', ')[place])
    for name, cell in row.items()
    if name.startswith('paper: ')
  ]
  return f'{min(values):g} to {max(values):g}'


def _suite(suite: dict[str, Any]) -> Cells:
  rows = suite['rows']
  gamma = max(row['gamma'] for row in rows)
  speeds = {
    row['category']: row['speedup']
    for row in rows
    if (row['target'], row['drafter'], row['gamma'])
    == ('smollm2-135m', 'prompt_lookup', gamma)
  }
  ordered = sorted(speeds, key=lambda name: -speeds[name])
  # As `specdec bench --suite` wrote it, before it was an experiment.
  tokens = suite.get('flags', {}).get('suite_tokens')
  return {
    'suite_gamma': gamma,
    'gains': _listed(f'{speeds[name]:.2f} on {name}' for name in ordered),
    'prediction': suite['notes'][-1],
    'suite_on': _device(suite),
    'suite_dtype': suite['dtype'],
    'suite_tokens': tokens or suite['settings']['max_new_tokens'],
  }


def _eagle(suite: Cells) -> Cells:
  """The EAGLE-3 drafter alone, and with copying, at the smallest gamma: the
  categories with the least and the most."""
  by_drafter: dict[str, list[Cells]] = {}
  # Not of those that were chosen for a category.
  rows = [row for row in suite['rows'] if not row['drafter'].endswith('+auto')]
  gamma = min(row['gamma'] for row in rows)
  for row in rows:
    if row['gamma'] == gamma:
      by_drafter.setdefault(row['drafter'], []).append(row)
  drafter = next(name for name in by_drafter if name.endswith('-eagle'))

  def shown(name: str, column: str) -> str:
    ordered = sorted(by_drafter[name], key=lambda row: row[column])
    ends = ordered[0], ordered[-1]
    return ' to '.join(f'{x[column]:.2f} ({x["category"]})' for x in ends)

  tokens, speed = 'tokens_per_target_run', 'speedup'
  return {
    'drafter': drafter,
    'gamma': gamma,
    'count': len(by_drafter[drafter]),
    'on': _device(suite),
    'dtype': suite['dtype'],
    'tokens': shown(drafter, tokens),
    'speeds': shown(drafter, speed),
    'both': shown(f'{drafter}+lookup', tokens),
    'both_speeds': shown(f'{drafter}+lookup', speed),
  }


def _auto(table: Cells) -> Cells:
  found = table['settings'].values()
  ratios = [each['of_best'] for each in found]
  slowest = min(each['of_plain_with_measuring'] for each in found)
  return {
    'of_best': f'{min(ratios):.2f} to {max(ratios):.2f}',
    'measuring': f'{1 - slowest:.0%}',
  }


def _trees(table: Cells) -> Cells:
  rows = table['rows']
  own = {r['draft']: r for r in rows if r['drafter'] == 'ende-nano'}
  copied = [row for row in rows if row['drafter'] == 'prompt_lookup']
  runs = {
    (row['category'], row['draft']): row['tokens per run'] for row in copied
  }
  chain, tree = own['chain of 4'], own['tree of 16']
  return {
    'tree': tree['tokens per run'],
    'tree_speed': tree['speed'],
    'chain': chain['tokens per run'],
    'chain_speed': chain['speed'],
    'copies': max(
      tokens - runs[category, 'chain of 4']
      for (category, _), tokens in runs.items()
    ),
  }


def _beams(equality: Cells, speed: Cells) -> Cells:
  equal, timed = equality['rows'], speed['rows']
  speeds = lambda is_drafted: [
    row['speed over beam search']
    for row in timed
    if row['drafter'] != 'plain' and (row['gamma'] > 0) == is_drafted
  ]
  saved = [
    1 - row['target calls'] / row['target calls of beam search']
    for row in equal
    if row['drafter'] == 'ende-nano'
  ]
  return {
    'num_different': sum(row['examples with a difference'] for row in equal),
    'num_examples': f'{sum(row["examples"] for row in equal):,}',
    'beams': _listed(sorted({str(row['beams']) for row in equal})),
    'row': _listed(f'{speed:.2f}' for speed in speeds(False)),
    'drafted': max(speeds(True)),
    'saved': f'{min(saved):.0%} to {max(saved):.0%}',
  }


def _speeds(table_2: Cells, table_4: Cells) -> Cells:
  by_task = _by_task(table_2['rows'])
  ende, synopsis = by_task['debian_ende', 0], by_task['debian_synopsis', 0]
  ours = next(
    row for row in table_4['rows'] if row['task'].startswith('debian_ende')
  )
  return {
    'here': _device(table_2),
    'ende': ende['speed'],
    'synopsis': synopsis['speed'],
    'ende_theirs': _range(ende, 2),
    'synopsis_theirs': _range(synopsis, 2),
    'ende_alpha': ende['alpha'],
    'synopsis_alpha': synopsis['alpha'],
    'ende_alphas': _range(ende, 1),
    'synopsis_alphas': _range(synopsis, 1),
    'c': ours['c'],
    'c_theirs': paper.C['T5-small'],
  }


def _gains(table: Cells) -> Cells:
  rows = table['rows']
  gamma = max(row['gamma'] for row in rows)
  rows = [row for row in rows if row['gamma'] == gamma]
  gains = [float(row['gain'].rstrip('%')) for row in rows]
  return {
    'sun_gamma': gamma,
    'num_gains': len(rows),
    'num_unclear': sum(row['gain, 95%'].startswith('-') for row in rows),
    'least_gain': f'{min(gains):.1f}%',
    'most_gain': f'{max(gains):.1f}%',
  }


def _xia(table: Cells) -> Cells:
  ways = {row['way']: row for row in table['rows']}
  strict, relaxed = ways['strict'], ways['top-3 tau 1']
  return {
    'strict': strict['tokens per iteration'],
    'strict_theirs': strict['paper: tokens'],
    'relaxed': relaxed['speed over beam 5'],
    'relaxed_theirs': relaxed['paper: speed'],
    'over_greedy': relaxed['speed over greedy'],
  }


# Lines by their templates: which files they are of, and what makes their
# figures of these files' contents.
_PARTS: tuple[tuple[str, tuple[str, ...], Callable[..., Cells]], ...] = (
  (_SUITE_TEXT, (_SUITE,), _suite),
  (_EAGLE_TEXT, (_EAGLE,), _eagle),
  (_AUTO_TEXT, (_AUTO,), _auto),
  (_TREES_TEXT, (_TREES,), _trees),
  (_BEAMS_TEXT, _BEAMS, _beams),
  (_SPEEDS_TEXT, _SPEEDS, _speeds),
  (_GAINS_TEXT, (_GAINS,), _gains),
  (_MAIN_TEXT, (_MAIN,), _xia),
)
