"""The learning curve of an EAGLE-3 drafter, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import plots

NAME = 'curve.svg'
_TRAINED, _VALIDATED = 'alpha_', 'validation_alpha_'


def alphas(line: Mapping[str, Any], prefix: str = _VALIDATED) -> list[float]:
  """Reads a line's mean alpha of each unrolled step, in their order."""
  found = {name: line[name] for name in line if name.startswith(prefix)}
  return [found[name] for name in sorted(found, key=lambda x: (len(x), x))]


def joined(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
  """Joins the lines of runs that each began from the one before; steps count
  on."""
  found: list[dict[str, Any]] = []
  for lines in runs:
    before = found[-1]['step'] if found else 0
    found += [{**line, 'step': before + line['step']} for line in lines]
  return found


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
  """Writes it, from the lines of metrics.jsonl: training as lines, validation
  as points. Lines may have fewer alphas than others."""
  figure, (left, right) = plots.new_figure(2)
  trained = [line for line in lines if alphas(line, _TRAINED)]
  validated = [line for line in lines if alphas(line)]
  for points, prefix, style in (
    (trained, _TRAINED, '-'),
    (validated, _VALIDATED, 'o'),
  ):
    left.set_prop_cycle(None)
    left.set_prop_cycle(color=plots.COLORS)
    for i in range(
      max((len(alphas(line, prefix)) for line in points), default=0)
    ):
      name = f'{prefix}{i + 1}'
      steps = [line['step'] for line in points if name in line]
      values = [line[name] for line in points if name in line]
      label = f'alpha_{i + 1}' if prefix == _TRAINED else None
      left.plot(steps, values, style, markersize=4, label=label)
  left.set(xlabel='step', ylabel='mean alpha; points: validation')
  left.set_ylim(bottom=0)
  left.legend()
  for points, name, style in (
    (trained, 'nats', '-'),
    (validated, 'validation_nats', 'o'),
  ):
    steps = [line['step'] for line in points]
    values = [line[name] for line in points]
    right.plot(steps, values, style, markersize=4, label=name)
  right.set(xlabel='step', ylabel='KL(p | q) of the first step, nats')
  right.set_ylim(bottom=0)
  right.legend()
  plots.save(figure, path)
