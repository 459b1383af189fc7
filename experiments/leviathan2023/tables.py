"""The tables of Leviathan et al. (https://arxiv.org/abs/2211.17192).

The paper's values stand beside ours; a cell is empty where it has none.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.leviathan2023 import (
  adaptive,
  figures,
  measured,
  pairs,
  paper,
  predictions,
)
from experiments.leviathan2023.measured import Settings
from experiments.leviathan2023.pairs import (
  BIGRAM,
  TRAINED,
  UNIGRAM,
  Pair,
  named,
)
from experiments.report import Cells, Table, interval
from specdec_jax import theory


def table_1(given: Sequence[Pair], settings: Settings, folder: Path) -> Table:
  """Arithmetic and speed for c = c_hat = 0; nothing is measured."""
  del given, settings, folder
  return Table(
    rows=[
      {
        'alpha': row.alpha,
        'gamma': row.gamma,
        'operations': float(
          theory.operations_factor(row.alpha, row.gamma, 0.0)
        ),
        'paper: operations': _paper(row.operations),
        'speed': float(theory.walltime_improvement(row.alpha, row.gamma, 0.0)),
        'paper: speed': _paper(row.speed),
      }
      for row in paper.TABLE_1
    ]
  )


def table_2(given: Sequence[Pair], settings: Settings, folder: Path) -> Table:
  """Speed at the planned gamma over plain decoding, at batch 1."""
  del folder
  rows = []
  for pair, temperature in _cells(given):
    gamma, found = measured.at_planned(pair, temperature, settings)
    acceptance = measured.acceptance(pair, TRAINED, temperature, settings)
    drafted = found.fixed[gamma]
    theirs = {
      row.drafter: f'gamma {row.gamma}, {row.alpha:.2f}, {row.empirical} '
      f'{paper.TAG}'
      for row in paper.rows_of(pair.kind.paper, int(temperature))
    }
    rows.append(
      named(pair)
      | {
        'T': int(temperature),
        'gamma': gamma,
        'alpha': acceptance['alpha'],
        '95% interval': interval(acceptance['alpha_interval']),
        'tokens per target run': drafted.tokens_per_run,
        'speed': drafted.speedup(found.plain),
        'with the prefill': drafted.whole_speedup(found.plain),
      }
      | {f'paper: {name}': theirs.get(name, '') for name in paper.C}
    )
  return Table(
    rows=rows,
    notes=[
      "The paper's cells are gamma, alpha and speed, with T5-XXL as the target."
    ],
  )


def table_3(given: Sequence[Pair], settings: Settings, folder: Path) -> Table:
  """Alpha of three drafters along the target's own text."""
  del folder
  rows = []
  for pair in given:
    theirs = paper.TABLE_3.get(pair.kind.paper, {})
    trained = {
      name: cells
      for name, cells in theirs.items()
      if name not in (UNIGRAM, BIGRAM)
    }
    for name in pairs.DRAFTERS:
      row = named(pair) | {'drafter': name}
      if name == TRAINED:
        row['drafter'] = pair.names.rpartition(' ')[2]
        beside = trained
      else:
        beside = {name: theirs[name]} if name in theirs else {}
      for i, temperature in enumerate((0.0, 1.0)):
        found = measured.acceptance(pair, name, temperature, settings)
        row[f'T = {i}'] = found['alpha']
        row[f'T = {i}, 95%'] = interval(found['alpha_interval'])
        row[f'paper: T = {i}'] = ', '.join(
          f'{other} {cells[i]:.2f}' for other, cells in beside.items()
        )
        if beside:
          row[f'paper: T = {i}'] += f' {paper.TAG}'
      rows.append(row)
  lamda = ', '.join(
    f'{name} {cold:.2f} / {warm:.2f}'
    for name, (cold, warm) in paper.TABLE_3_LAMDA.items()
  )
  return Table(
    rows=rows,
    notes=[
      'Alpha is the mean of sum min(p, q) over prefixes of text that the '
      'target generated; examples are the sampling unit of intervals.',
      f'The paper also has LaMDA 137B with top-40 sampling, T = 0 / 1: {lamda} '
      f'{paper.TAG}, which has no counterpart here.',
    ],
  )


def table_4(given: Sequence[Pair], settings: Settings, folder: Path) -> Table:
  """Theorem 3.8 against what was measured: the paper's pairs, and ours."""
  del folder
  rows = []
  for row in paper.TABLE_4:
    c = paper.C[row.drafter]
    expected = theory.walltime_improvement(row.alpha, row.gamma, c)
    rows.append(
      {
        'task': row.task,
        'models': f'T5-XXL with {row.drafter}',
        'T': row.temperature,
        'gamma': row.gamma,
        'alpha': f'{row.alpha:.2f} {paper.TAG}',
        'c': f'{c:.2f} {paper.TAG}',
        'expected': float(expected),
        'paper: expected': _paper(row.expected, 1),
        'with T(gamma+1)': '',
        'empirical': '',
        'paper: empirical': _paper(row.empirical, 1),
      }
    )
  for pair, temperature in _cells(given):
    gamma, found = measured.at_planned(pair, temperature, settings)
    alpha = measured.acceptance(pair, TRAINED, temperature, settings)['alpha']
    parts = measured.costs(pair, temperature, settings)
    c = parts.c(gamma)
    rows.append(
      {
        **named(pair),
        'T': int(temperature),
        'gamma': gamma,
        'alpha': alpha,
        'c': c,
        'expected': float(theory.walltime_improvement(alpha, gamma, c)),
        'paper: expected': '',
        'with T(gamma+1)': measured.predicted_speed(
          pair, temperature, settings, gamma
        ),
        'empirical': found.fixed[gamma].speedup(found.plain),
        'paper: empirical': '',
      }
    )
  return Table(
    rows=rows,
    notes=[
      '`expected` is Theorem 3.8, which assumes that scoring gamma + 1 tokens '
      'costs as much as scoring one. `with T(gamma+1)` uses the measured costs '
      'and the measured acceptance of every token of the texts.'
    ],
  )


def table_5(given: Sequence[Pair], settings: Settings, folder: Path) -> Table:
  """Alpha under lenience, and what the argmax's would give."""
  del folder
  rows = []
  for pair in given:
    is_theirs = pair.kind.paper == paper.ENDE
    for name in pairs.DRAFTERS:
      found = measured.lenient_alphas(pair, 1.0, settings)[name]
      beside = 'T5-small' if name == TRAINED else name
      theirs = paper.TABLE_5[beside] if is_theirs else None
      label = pair.names.rpartition(' ')[2] if name == TRAINED else name
      rows.append(
        _lenient(pair, f'{label}, T = 1', [f['alpha'] for f in found], theirs)
      )
    found = measured.argmax_alphas(pair, settings)
    alphas = [f['alpha'] for f in found]
    theirs = paper.ARGMAX_ALPHA if is_theirs else None
    rows.append(_lenient(pair, 'argmax, T = 0', alphas, theirs))
    gamma, c = paper.ARGMAX_GAMMA, paper.ARGMAX_C
    speeds = [float(theory.walltime_improvement(a, gamma, c)) for a in alphas]
    theirs = paper.ARGMAX_SPEED if is_theirs else None
    rows.append(
      _lenient(pair, f'speed at c {c}, gamma {gamma}', speeds, theirs, 1)
    )
    own = measured.costs(pair, 0.0, settings).c(gamma)
    speeds = [float(theory.walltime_improvement(a, gamma, own)) for a in alphas]
    rows.append(
      _lenient(pair, f'speed at our c {own:.2f}, gamma {gamma}', speeds, None)
    )
  return Table(
    rows=rows,
    notes=[
      "The paper's trained drafter in these cells is T5-small. Speeds follow "
      'from Theorem 3.8 at the alpha above them.'
    ],
  )


def adaptive_gamma(
  given: Sequence[Pair], settings: Settings, folder: Path
) -> Table:
  """Gamma that varies against the best that does not, and the oracle."""
  del folder
  rows, notes = [], []
  for pair in given:
    found = measured.whole_sweep(pair, 0.0, settings)
    more, note = adaptive.compare(pair, settings, found)
    rows += [named(pair) | row for row in more]
    notes.append(note)
  return Table(rows=rows, notes=[*notes, adaptive.NOTE])


def all_figures(
  given: Sequence[Pair], settings: Settings, folder: Path
) -> Table:
  """Figures 1 to 5."""
  return Table(**figures.draw(given, settings, folder))


Make = Callable[[Sequence[Pair], Settings, Path], Table]
TABLES: dict[str, tuple[str, Make]] = {
  '1': ('Table 1: arithmetic and speed', table_1),
  '2': ('Table 2: speed', table_2),
  '3': ('Table 3: alpha', table_3),
  '4': ('Table 4: expected and empirical speed', table_4),
  '5': ('Table 5: lenience', table_5),
  'figures': ('Figures 1 to 5', all_figures),
  'predictions': ('Predicted against measured', predictions.table),
  'adaptive': ('Gamma that varies', adaptive_gamma),
}


def _cells(given: Sequence[Pair]) -> list[tuple[Pair, float]]:
  return [(pair, temperature) for pair in given for temperature in (0.0, 1.0)]


def _lenient(
  pair: Pair,
  label: str,
  ours: Sequence[float],
  theirs: Sequence[float] | None,
  digits: int = 2,
) -> Cells:
  row: Cells = named(pair) | {'drafter': label}
  for i, lenience in enumerate(paper.LENIENCES):
    row[f'l = {lenience:g}'] = ours[i]
    row[f'paper: {lenience:g}'] = _paper(theirs[i], digits) if theirs else ''
  return row


def _paper(value: float, digits: int = 2) -> str:
  return f'{value:.{digits}f} {paper.TAG}'
