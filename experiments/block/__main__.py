"""Compares drafters that were trained for equally long, for two targets.

    python -m experiments.block --corpora=corpora --runs=runs/block \
      --tokens=tokens/ende_distilled --texts=texts/smollm2 --minutes=6

`comparison` trains a draft model, an EAGLE-3 drafter, a Spec-Drafter and block
drafters, each for `--minutes` of processor time on the same texts, and counts
what is accepted; `shipped` counts the same of the models that come with the
package, with their hours of training. These do not depend on other work on the
machine. `speed` times all of them, which takes an idle machine. `predicted`
compiles their iterations for TPUs. What is in `--runs` is not done again.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments import common, plots, report, results
from experiments.block import measuring, training
from experiments.block.measuring import Drafter, Figures
from experiments.block.recipes import GAMMA, TARGETS, Recipe
from experiments.predicted import __main__ as predicted
from experiments.report import Cells, Table
from specdec_jax.checkpoints import loading, pretrained
from specdec_jax.planning import planner

MODULE = 'experiments.block'
FOLDER = results.ROOT / 'block' / 'results'
_ALL_TEXTS = (
  f'Drafts of {GAMMA} tokens, greedy, float32. Accuracy by position: how often '
  'token 1 to 6 of a draft is accepted once those before it are. ende-mini: '
  "256 sentences of debian_ende's test split; SmolLM2: the suite's 40 prompts "
  'of chat and coding, 64 new tokens.'
)


class Row(NamedTuple):
  """A drafter of a table, with its title and where its figures are kept."""

  title: str
  drafter: Drafter
  figures: Path
  trained: training.Trained | None = None


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('block', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  for name in args.tables:
    title, make = TABLES[name]
    made = functools.partial(make, args)
    report.measure((MODULE, argv), args.output, name, title, made)


def _trained(args: argparse.Namespace) -> Iterator[Row]:
  """Trains the recipes of all targets, one by one."""
  texts = {
    'ende-mini': {'TOKENS': [args.tokens]},
    'smollm2-135m': {'TEXTS': args.texts},
  }
  for name in args.targets:
    target = TARGETS[name]
    runs: dict[str, training.Trained] = {}
    for key, recipe in target.recipes.items():
      if args.drafters and key not in args.drafters:
        continue
      folder = args.runs / name / key
      source = recipe.weights_of or key
      if source not in runs:
        runs[source] = training.train(
          *(name, recipe, args.runs / name / source),
          *(args.minutes, texts[name]),
        )
      trained = runs[source]
      yield Row(
        title=recipe.title,
        drafter=_drafter(name, recipe, str(trained.folder)),
        figures=folder,
        trained=trained,
      )


def _drafter(target: str, recipe: Recipe, weights: str) -> Drafter:
  options = (*TARGETS[target].options, *recipe.options)
  return Drafter(target, options, recipe.drafter, weights)


def _shipped(args: argparse.Namespace) -> Iterator[Row]:
  """The models that come with the package."""
  for name in args.targets:
    target = TARGETS[name]
    for weights, (title, drafter) in target.shipped.items():
      yield Row(
        title=f'{weights}: {title}',
        drafter=Drafter(name, target.options, drafter, weights),
        figures=args.runs / name / weights,
      )


def comparison(args: argparse.Namespace) -> Table:
  """What is accepted after equally long training."""
  prompts = measuring.test_prompts(args.corpora, args.runs / 'prompts')
  rows, curves = [], {}
  for row in _trained(args):
    assert row.trained is not None
    figures = _counted(row, prompts)
    rows.append(
      {
        'target': row.drafter.target,
        'drafter': row.title,
        'parameters': _millions(row.trained.parameters),
        'steps': row.trained.steps,
        'processor minutes': f'{row.trained.minutes:.1f}',
        **_counts(figures),
      }
    )
    curves[row.drafter.target, row.title] = figures
  figure = 'positions.svg'
  args.output.mkdir(parents=True, exist_ok=True)
  _draw(curves, args.output / figure)
  absent = [f'{name}: {TARGETS[name].absent}' for name in args.targets]
  return Table(rows=rows, figures=[figure], notes=[_ALL_TEXTS, *absent])


def shipped(args: argparse.Namespace) -> Table:
  """What is accepted of the drafters that come with the package."""
  prompts = measuring.test_prompts(args.corpora, args.runs / 'prompts')
  rows = []
  for row in _shipped(args):
    weights = row.drafter.weights
    card = json.loads((pretrained.FOLDER / weights / 'card.json').read_text())
    hours = sum(run['hours'] for run in card['training'])
    rows.append(
      {
        'target': row.drafter.target,
        'drafter': row.title,
        'parameters': _millions(
          training.num_parameters(loading.locate(weights))
        ),
        'hours of two cores': f'{hours:.2f}',
        **_counts(_counted(row, prompts)),
      }
    )
  return Table(rows=rows, notes=[_ALL_TEXTS])


def _counted(row: Row, prompts: measuring.Mapping[str, Path]) -> Figures:
  file = prompts[row.drafter.target]
  return measuring.count(row.drafter, row.figures / 'counts.json', file, GAMMA)


def _counts(figures: Figures) -> Cells:
  shares = (f'{100 * rate:.0f}' for rate in measuring.by_position(figures))
  return {
    'accuracy by position, %': ', '.join(shares),
    'tokens per target run (95%)': f'{figures["block_efficiency"]:.2f} '
    f'({report.interval(figures["interval"], "{:.2f} to {:.2f}")})',
    'texts that differ from plain decoding': figures['different_texts'],
  }


def speed(args: argparse.Namespace) -> Table:
  """Speeds on this processor, beside the fastest plain decoding."""
  drafters = [*_trained(args), *_shipped(args)]
  if args.isa:
    # For the benches, which inherit it, and for the header of the table.
    flags = os.environ.get('XLA_FLAGS', '')
    flags = f'{flags} --xla_cpu_max_isa={args.isa}'.strip()
    os.environ['XLA_FLAGS'] = flags
  rows = []
  for row in drafters:
    target = row.drafter.target
    for gamma in TARGETS[target].gammas:
      name = f'speed_{gamma}{args.isa and "_" + args.isa}.json'
      figures = measuring.time(
        row.drafter,
        row.figures / name,
        TARGETS[target].timed_texts,
        gamma,
      )
      least, greatest = figures['speedup_range']
      rows.append(
        {
          'target': target,
          'drafter': row.title,
          'gamma': gamma,
          'tokens per target run': figures['block_efficiency'],
          'c': figures['c'],
          'T(gamma+1) / T(1)': figures['verify_cost_ratio'],
          'speed': figures['speedup'],
          'turns': f'{least:.2f} to {greatest:.2f}',
          'dtypes': f'{figures["dtype"]}; {figures["baseline"]}',
        }
      )
  isa = args.isa or 'all that this processor has'
  return Table(
    rows=rows,
    notes=[
      'Batch 1, greedy; speeds are relative to the fastest plain decoding. '
      f'Instructions: {isa}. c: time of a drafted token over a plain step.'
    ],
  )


def predictions(args: argparse.Namespace) -> Table:
  """Speeds on TPUs, from the measured acceptance and compiled programs."""
  rows = []
  for row in [*_trained(args), *_shipped(args)]:
    target, _, drafter, weights = row.drafter
    if '--min_confidence' in row.drafter.options:
      continue  # Compiled programs are of whole drafts.
    figures = json.loads((row.figures / 'counts.json').read_text('utf-8'))
    rates = measuring.by_position(figures)
    cells: Cells = {'target': target, 'drafter': row.title}
    for topology in args.topologies:
      sizes = GAMMA, args.input_length, args.output_length
      costs = predicted.compiled(target, drafter, weights, topology, *sizes)
      best = planner.plan(rates, costs, max_gamma=GAMMA).best
      chip = topology.partition(':')[0]
      cells[f'{chip}: c'] = f'{costs.c(GAMMA):.2f}'
      cells[f'{chip}: T({GAMMA + 1}) / T(1)'] = costs.verify_cost_ratio(GAMMA)
      speedup = f'gamma {best.gamma}, {best.speedup:.2f} times'
      cells[f'{chip}: predicted'] = speedup if best.gamma else 'plain is faster'
    rows.append(cells)
  return Table(
    rows=rows,
    notes=[
      'PREDICTIONS: no TPU has run any of it. Batch 1, bfloat16, '
      f'{args.input_length} tokens of input; the rates by position are those '
      'of the tables of acceptance.'
    ],
  )


def _draw(curves: dict[tuple[str, str], Figures], path: Path) -> None:
  """Draws accuracy by position, a panel for each target."""
  targets = list(dict.fromkeys(target for target, _ in curves))
  figure, axes = plots.new_figure(len(targets))
  panels = [axes] if len(targets) == 1 else axes
  for panel, target in zip(panels, targets, strict=True):
    for (owner, title), figures in curves.items():
      if owner == target:
        rates = measuring.by_position(figures)
        panel.plot(range(1, GAMMA + 1), rates, marker='o', label=title)
    panel.set(
      title=target, xlabel='position of a draft', ylabel='share accepted'
    )
    panel.set_ylim(0, 1)
    panel.legend(fontsize='small')
  plots.save(figure, path)


def _millions(count: int) -> str:
  return f'{count / 1e6:.1f}M'


TABLES: dict[str, tuple[str, Callable[[argparse.Namespace], Table]]] = {
  'comparison': ('Drafters after equally long training', comparison),
  'shipped': ('Drafters that come with the package', shipped),
  'speed': ('Speeds of these drafters', speed),
  'predicted': ('Speeds of these drafters on TPUs, predicted', predictions),
}


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  common.add_tables(parser, TABLES)
  add = parser.add_argument
  add('--targets', type=common.listed(), default=list(TARGETS))
  add('--drafters', type=common.listed(), help='names of recipes; or all')
  add('--corpora', type=Path, default=Path('corpora'))
  add('--tokens', default='tokens/ende_distilled', help='that ende-mini wrote')
  add('--texts', default='texts/smollm2', help='that SmolLM2 wrote')
  add('--runs', type=Path, default=Path('runs/block'))
  add('--minutes', type=float, default=6.0, help='of the processor, for each')
  add('--isa', default='', help='for speeds: as of XLA, such as AVX2')
  add('--topologies', type=common.listed(), default=['v5e:1x1', 'v6e:1x1'])
  add('--output', type=Path, default=FOLDER)
  common.add_counts(parser, input_length=128, output_length=64)
  return parser


if __name__ == '__main__':
  sys.exit(main())
