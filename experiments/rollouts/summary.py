"""What trainings with several seeds show: rewards, KLs and times by step."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from experiments import plots, report
from experiments.report import Cells, Table

NAME = 'rollouts'
_NOTES = (
  'Intervals are 95% intervals over seeds, by the t distribution; one seed has '
  "none. Seconds and tokens are of a step's rollouts, means over seeds. The "
  'first step compiles.',
)
_KL = (
  'KL is the estimate that Tunix reports: of the policy that wrote the samples '
  'of a step, from the model that it began from, in nats per token.'
)


def mean(values: Sequence[float]) -> tuple[float, list[float] | None]:
  """Returns a mean and its 95% interval, None for a single value."""
  centre, count = float(np.mean(values)), len(values)
  if count < 2:
    return centre, None
  error = float(np.std(values, ddof=1)) / np.sqrt(count)
  half = float(stats.t.ppf(0.975, count - 1)) * error
  return centre, [centre - half, centre + half]


def table(rows: Sequence[Cells], folder: Path) -> Table:
  """Sums up the rows of all trainings, and draws them in the folder.

  `rows` have an engine, a seed and a step, with its reward, seconds and tokens,
  perhaps `kl`, and with `--pairs` what Tunix's engine took for the same.
  """
  notes, figures = [*_NOTES], [f'{NAME}.svg']
  if 'kl' in rows[0]:
    notes.append(_KL)
  try:
    _draw(rows, folder / figures[0])
  except ImportError as error:
    figures = []
    notes.append(f'There is no plot: {error}.')
  by_seed = _by_seed(rows)
  if len(by_seed) == 2:
    notes.append(_difference(by_seed))
    # The first step compiles.
    if later := [row for row in rows if row['step'] > 1]:
      notes.append(_speed(_by_seed(later)))
  return Table(rows=_cells(rows), figures=figures, notes=notes)


def _by_step(rows: Sequence[Cells]) -> dict[tuple[str, int], list[Cells]]:
  """Returns the rows of all seeds by engine and step, engine by engine."""
  found: dict[tuple[str, int], list[Cells]] = {}
  for row in sorted(rows, key=lambda row: (row['engine'], row['step'])):
    found.setdefault((row['engine'], row['step']), []).append(row)
  return found


def _cells(rows: Sequence[Cells]) -> list[Cells]:
  found = []
  for (engine, step), own in _by_step(rows).items():
    of: Callable[[str], list[float]] = lambda name, own=own: [
      row[name] for row in own
    ]
    cells: Cells = {'engine': engine, 'step': step, 'seeds': len(own)}
    for name, shown, form in (
      ('reward', 'reward', '{:.3f}'),
      ('kl', 'KL', '{:.3g}'),
    ):
      if name in own[0]:
        centre, interval = mean(of(name))
        cells[shown] = form.format(centre)
        cells[f'{shown}, 95%'] = report.interval(interval, f'{form} to {form}')
    cells |= {name: mean(of(name))[0] for name in ('seconds', 'tokens')}
    # Tunix's own engine does not say that it draws one per run.
    per_run = [row.get('tokens_per_target_run', 1.0) for row in own]
    cells['tokens per target run'] = mean(per_run)[0]
    if 'vanilla_seconds' in own[0]:
      cells["Tunix's seconds"] = mean(of('vanilla_seconds'))[0]
      cells["Tunix's tokens"] = mean(of('vanilla_tokens'))[0]
    found.append(cells)
  return found


def _by_seed(rows: Sequence[Cells]) -> dict[str, list[list[Cells]]]:
  """Returns the rows of each training, in the order of seeds, by engine."""
  found: dict[str, dict[int, list[Cells]]] = {}
  for row in sorted(rows, key=lambda row: (row['engine'], row['seed'])):
    found.setdefault(row['engine'], {}).setdefault(row['seed'], []).append(row)
  return {engine: [*own.values()] for engine, own in found.items()}


def _difference(by_seed: Mapping[str, Sequence[Sequence[Cells]]]) -> str:
  """Compares the rewards of two engines, seed by seed."""
  first, second = (
    np.array([np.mean([row['reward'] for row in own]) for own in trainings])
    for trainings in by_seed.values()
  )
  engine, other = by_seed
  return (
    f'Reward of {engine} less that of {other}, mean of all steps: '
    f'{_shown(first - second, "{:+.3f}")}, over {len(first)} seeds, which '
    'have the same prompts.'
  )


def _speed(by_seed: Mapping[str, Sequence[Sequence[Cells]]]) -> str:
  """Compares the tokens per second of two engines, seed by seed."""
  total = lambda own, name: sum(row[name] for row in own)
  first, second = (
    np.array([total(own, 'tokens') / total(own, 'seconds') for own in each])
    for each in by_seed.values()
  )
  engine, other = by_seed
  return (
    f'Tokens per second of {engine} over those of {other}, all steps but the '
    f'first: {_shown(first / second, "{:.2f}")}.'
  )


def _shown(values: np.ndarray, form: str) -> str:
  """Shows the mean of values, and its interval if there is one."""
  centre, interval = mean(values.tolist())
  ends = f' ({report.interval(interval, f"{form} to {form}")})'
  return form.format(centre) + (ends if interval else '')


def _draw(rows: Sequence[Cells], path: Path) -> None:
  names = ['reward', *(['kl'] if 'kl' in rows[0] else []), 'seconds']
  labels = {'reward': 'mean reward', 'kl': 'KL from the reference, nats'}
  figure, panels = plots.new_figure(len(names))
  engines = sorted({row['engine'] for row in rows})
  found = _by_step(rows)
  for name, axes in zip(names, panels, strict=True):
    for engine, color in zip(engines, plots.COLORS, strict=False):
      steps = [step for other, step in found if other == engine]
      # The first one compiles.
      steps = steps[name == 'seconds' and len(steps) > 1 :]
      made = [mean([r[name] for r in found[engine, step]]) for step in steps]
      centres = [centre for centre, _ in made]
      axes.plot(steps, centres, 'o-', color=color, markersize=3, label=engine)
      ends = np.array([ends or [centre] * 2 for centre, ends in made]).T
      axes.fill_between(steps, *ends, color=color, alpha=0.15, linewidth=0)
    label = labels.get(name, "seconds of a step's rollouts")
    axes.set(xlabel='step', ylabel=label)
    axes.legend()
  path.parent.mkdir(parents=True, exist_ok=True)
  plots.save(figure, path)
