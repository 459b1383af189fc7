"""The lines that docs/results.md opens with, from the files of its tables."""

import json
from pathlib import Path
from typing import Any

from experiments.leviathan2023 import paper
from experiments.report import Cells

_SUITE = 'suite/suite.json'
_AUTO = 'auto_gamma/results/results.json'
_AUTO_TEXT = """\
- **A gamma that chooses itself** reaches {of_best} of the best gamma that a
  search finds in
  [six settings](../experiments/auto_gamma/results/auto_gamma.md). It is at most
  {measuring} slower than plain decoding, measuring included.
"""
_BEAMS = 'beams/results'
_BEAMS_TEXT = """\
- **Speculative beam search is exact, and drafts slow it down here:**
  {num_different} of {num_examples} searches with {beams} beams, drafted and
  not, end otherwise than plain beam search. One cache row per example, without
  drafts, has {row} times beam search's speed; with drafts it is at most
  {drafted:.2f}, though they save {saved} of the target's calls.
"""
_EAGLE = 'eagle/suite/suite.json'
_EAGLE_TEXT = """\
- **An EAGLE-3 drafter, trained here on two cores:** with `{drafter}` at gamma
  {gamma}, SmolLM2-135M gives {tokens} tokens per target run, at {speeds} times
  plain decoding's speed, on {categories} ({on}, {dtype}). Prompt lookup has
  {copied} tokens and speeds of {copied_speeds}; both in turns, {both} and
  {both_speeds}. The [suite](../experiments/eagle/suite/suite.md) has more.
"""
_TREES = 'trees/results/speed.json'
_TREES_TEXT = """\
- **Trees of drafts lose on CPUs:** `ende-nano` gives {tree:.2f} tokens per
  target run with 16 nodes and {chain:.2f} with a chain of 4, at
  {tree_speed:.2f} and {chain_speed:.2f} times plain decoding's speed. Several
  continuations of prompt lookup give at most {copies:.2f} tokens more than one.
"""
_TEXT = """\
Speed is against the fastest plain decoding on the same machine: batch 1, greedy
and after the prefill unless stated otherwise.

- **Best: {best:.2f}.** SmolLM2-135M with prompt lookup, on prompts that ask for
  a copy ({best_on}, float32).
- **Typical: {ende:.2f} and {synopsis:.2f}.** `ende-mini` with `ende-nano`,
  translating and summarising at the planned gamma ({here}, target in bfloat16);
  {ende_warm:.2f} and {synopsis_warm:.2f} at temperature 1.
- **By kind of prompt:** SmolLM2-135M with prompt lookup at gamma {suite_gamma}
  ({suite_on}, {suite_dtype}, {suite_tokens} tokens per prompt): {gains}. The
  [suite](../experiments/suite/suite.md) has more. {prediction}
{eagle}{auto}- **A loss: {lm:.2f}.** `lm-mini` with `lm-nano` on the same
  machine. With everything in float32 ({elsewhere}), all three pairs lose:
  {losses}.
- **Worst: {worst:.2f}.** The Spec-Drafter at batch {worst_batch} ({worst_way},
  float32, {elsewhere}).
{trees}{beams}- **Theory is reproduced.** Leviathan's Table 1 to the printed
  digits, the expected speeds of Table 4 within {table_4:.2f}.
- **Leviathan's speeds are not reproduced:** {ende:.2f} where the paper has
  {ende_theirs}, and {synopsis:.2f} where it has {synopsis_theirs}. Acceptance
  is similar: alpha is {ende_alpha:.2f} (paper: {ende_alphas}) and
  {synopsis_alpha:.2f} (paper: {synopsis_alphas}).
- **Why not:** T5-XXL and LaMDA were not run. With models of 10 million
  parameters on two CPU cores, a drafted token costs {c:.2f} plain steps
  (paper: {c_theirs} with T5-small), and scoring a draft costs more than scoring
  a token.
- **Sun's example is reproduced exactly.** Block verification gives {least_gain}
  to {most_gain} more tokens per target run at gamma {sun_gamma} and temperature
  1; for {num_unclear} of the {num_gains} pairs the interval includes 0.
- **Xia's figures are not reproduced:** {strict:.2f} tokens per iteration where
  the paper has {strict_theirs}, and {relaxed:.2f} times the speed of beam
  search where it has {relaxed_theirs}; that is {over_greedy:.2f} times the
  speed of greedy decoding. Our Spec-Drafter was trained for 3.3 hours on two
  cores, the paper's for 300,000 steps on WMT14.
- **Not measured:** any GPU or TPU, and the papers' own texts (WMT, CNN/DM,
  LM1B); texts from Debian's archive stand in for them.
"""


def lines(root: Path) -> str:
  """The lines as Markdown; empty where a table that they need is missing.

  Args:
    root: the folder of the experiments.
  """
  names = (
    *('prompts/copy', 'leviathan2023/table_2', 'leviathan2023/table_4'),
    *('leviathan2023/float32/table_2', 'sun2024/tokens_per_run'),
    *('xia2023/main', 'xia2023/float32/batch'),
  )
  paths = {name: root / _file(name) for name in names}
  if not all(path.exists() for path in (*paths.values(), root / _SUITE)):
    return ''
  tables = {name: json.loads(path.read_text()) for name, path in paths.items()}
  rows = {name: table['rows'] for name, table in tables.items()}
  where = {name: _device(table) for name, table in tables.items()}
  speed = _by_task(rows['leviathan2023/table_2'])
  slower = _by_task(rows['leviathan2023/float32/table_2'])
  worst = min(
    rows['xia2023/float32/batch'], key=lambda row: row['speed over greedy']
  )
  return _TEXT.replace('\n  ', ' ').format(
    best=rows['prompts/copy'][0]['speed'],
    best_on=where['prompts/copy'],
    here=where['leviathan2023/table_2'],
    elsewhere=where['leviathan2023/float32/table_2'],
    ende=speed['debian_ende', 0]['speed'],
    ende_warm=speed['debian_ende', 1]['speed'],
    synopsis=speed['debian_synopsis', 0]['speed'],
    synopsis_warm=speed['debian_synopsis', 1]['speed'],
    lm=speed['debian_lm', 0]['speed'],
    losses=_listed(
      f'{row["speed"]:.2f}' for (_, t), row in slower.items() if t == 0
    ),
    worst=worst['speed over greedy'],
    worst_batch=worst['batch'],
    worst_way=worst['way'],
    ende_theirs=_range(speed['debian_ende', 0], 2),
    synopsis_theirs=_range(speed['debian_synopsis', 0], 2),
    ende_alpha=speed['debian_ende', 0]['alpha'],
    synopsis_alpha=speed['debian_synopsis', 0]['alpha'],
    ende_alphas=_range(speed['debian_ende', 0], 1),
    synopsis_alphas=_range(speed['debian_synopsis', 0], 1),
    **_suite(json.loads((root / _SUITE).read_text())),
    eagle=_eagle(root / _EAGLE),
    auto=_auto(root / _AUTO),
    trees=_trees(root / _TREES),
    beams=_beams(root / _BEAMS),
    **_theory(rows['leviathan2023/table_4']),
    **_gains(rows['sun2024/tokens_per_run']),
    **_xia(rows['xia2023/main']),
  )


def _file(name: str) -> str:
  experiment, _, rest = name.partition('/')
  return f'{experiment}/results/{rest}.json'


def _device(table: Cells) -> str:
  return table['device'].rpartition(', jax')[0]


def _by_task(rows: list[Cells]) -> dict[tuple[str, int], Cells]:
  return {(row['task'].split()[0], row['T']): row for row in rows}


def _listed(parts: Any) -> str:
  *head, last = parts
  return f'{", ".join(head)} and {last}'


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
  return {
    'suite_gamma': gamma,
    'gains': _listed(f'{speeds[name]:.2f} on {name}' for name in ordered),
    'prediction': suite['notes'][-1],
    'suite_on': suite['device'],
    'suite_dtype': suite['dtype'],
    'suite_tokens': suite['flags']['suite_tokens'],
  }


def _eagle(path: Path) -> str:
  """The line on the EAGLE-3 drafter, if it was measured: alone, against copying
  and with it, on the categories that it was trained for."""
  if not path.exists():
    return ''
  suite = json.loads(path.read_text())
  categories = 'chat', 'coding', 'summarisation'
  by_drafter: dict[str, dict[str, Cells]] = {}
  for row in suite['rows']:
    by_drafter.setdefault(row['drafter'], {})[row['category']] = row
  drafter = next(name for name in by_drafter if name.endswith('-eagle'))
  shown = lambda name, column: _listed(
    f'{by_drafter[name][category][column]:.2f}' for category in categories
  )
  tokens, speed = 'tokens_per_target_run', 'speedup'
  return _EAGLE_TEXT.replace('\n  ', ' ').format(
    drafter=drafter,
    gamma=suite['rows'][0]['gamma'],
    categories=_listed(categories),
    on=suite['device'],
    dtype=suite['dtype'],
    tokens=shown(drafter, tokens),
    speeds=shown(drafter, speed),
    copied=shown('prompt_lookup', tokens),
    copied_speeds=shown('prompt_lookup', speed),
    both=shown(f'{drafter}+lookup', tokens),
    both_speeds=shown(f'{drafter}+lookup', speed),
  )


def _auto(path: Path) -> str:
  """The line on `gamma='auto'`, if that was measured."""
  if not path.exists():
    return ''
  found = json.loads(path.read_text())['settings'].values()
  ratios = [each['of_best'] for each in found]
  slowest = min(each['of_plain_with_measuring'] for each in found)
  return _AUTO_TEXT.replace('\n  ', ' ').format(
    of_best=f'{min(ratios):.2f} to {max(ratios):.2f}',
    measuring=f'{1 - slowest:.0%}',
  )


def _trees(path: Path) -> str:
  """The line on trees of drafts, if they were measured."""
  if not path.exists():
    return ''
  rows = json.loads(path.read_text())['rows']
  own = {r['draft']: r for r in rows if r['drafter'] == 'ende-nano'}
  copied = [row for row in rows if row['drafter'] == 'prompt_lookup']
  runs = {
    (row['category'], row['draft']): row['tokens per run'] for row in copied
  }
  chain, tree = own['chain of 4'], own['tree of 16']
  return _TREES_TEXT.replace('\n  ', ' ').format(
    tree=tree['tokens per run'],
    tree_speed=tree['speed'],
    chain=chain['tokens per run'],
    chain_speed=chain['speed'],
    copies=max(
      tokens - runs[category, 'chain of 4']
      for (category, _), tokens in runs.items()
    ),
  )


def _beams(folder: Path) -> str:
  """The line on speculative beam search, if it was measured."""
  paths = [folder / f'{name}.json' for name in ('equality', 'speed')]
  if not all(path.exists() for path in paths):
    return ''
  equal, timed = (json.loads(path.read_text())['rows'] for path in paths)
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
  return _BEAMS_TEXT.replace('\n  ', ' ').format(
    num_different=sum(row['examples with a difference'] for row in equal),
    num_examples=f'{sum(row["examples"] for row in equal):,}',
    beams=_listed(sorted({str(row['beams']) for row in equal})),
    row=_listed(f'{speed:.2f}' for speed in speeds(False)),
    drafted=max(speeds(True)),
    saved=f'{min(saved):.0%} to {max(saved):.0%}',
  )


def _theory(rows: list[Cells]) -> Cells:
  theirs = [row for row in rows if row['paper: expected']]
  ours = next(row for row in rows if row['task'].startswith('debian_ende'))
  return {
    'table_4': max(
      abs(row['expected'] - float(row['paper: expected'].split()[0]))
      for row in theirs
    ),
    'c': ours['c'],
    'c_theirs': paper.C['T5-small'],
  }


def _gains(rows: list[Cells]) -> Cells:
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


def _xia(rows: list[Cells]) -> Cells:
  ways = {row['way']: row for row in rows}
  strict, relaxed = ways['strict'], ways['top-3 tau 1']
  return {
    'strict': strict['tokens per iteration'],
    'strict_theirs': strict['paper: tokens'],
    'relaxed': relaxed['speed over beam 5'],
    'relaxed_theirs': relaxed['paper: speed'],
    'over_greedy': relaxed['speed over greedy'],
  }
