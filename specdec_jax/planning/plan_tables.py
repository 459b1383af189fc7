"""Tables and sentences of `specdec plan`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.cli import outputs
from specdec_jax.planning.planner import Forecast, GammaPlan, Prediction
from specdec_jax.planning.tree_planner import TreePlan
from specdec_jax.theory.costs import Costs

_FIGURES = ('tokens per target run', 'speedup', 'operations')


# Figures of a plan by name, as `specdec plan --json` writes them.
Figures = dict[str, Any]
# An acceptance rate, or a profile of them by position.
Alpha = float | Sequence[float]


class Planned(NamedTuple):
  """An acceptance rate, the plan of chains for it, and that of trees, if
  any."""

  alpha: Alpha
  plan: GammaPlan
  tree: TreePlan | None


def tables(
  record: Figures, costs: Costs, planned: Sequence[Planned]
) -> list[object]:
  """Makes tables and sentences.

  Args:
    record: the figures that --json writes.
    costs: of an iteration's parts.
    planned: the plans, by acceptance rate.
  """
  setup = ', '.join(record[x] for x in ('model', 'drafter', 'dtype', 'device'))
  shown: list[object] = [
    f'{setup}, batch {record["batch_size"]} ({record["source"]})'
  ]
  if 'programs' in record:
    shown += [*_compiled(record), *record['notes']]
  shown.append(
    f'c {record["c"]:.4f}, T({costs.widths[-1]}) / T(1) '
    f'{costs.verify_cost_ratio(costs.max_gamma):.3f}'
  )
  # A single rate has a table with a row per gamma.
  if len(planned) == 1:
    [(_, plan, tree)] = planned
    shown += [_choices(plan, tree), *plan.sentences]
    if tree:
      shown.append(tree.sentence)
    if (bound := record['oracle_speedups'][0]) is not None:
      shown.append(
        f'No schedule that varies gamma gains more than {bound:.2f} times: '
        'that is an oracle, which drafts only what is accepted.'
      )
    return shown
  # Several rates have a table with a row per rate.
  rows = [
    (
      f'{alpha:.2f}',
      str(plan.best.gamma),
      *_figures(plan.best),
      *((_shape(tree), f'{tree.choice.speedup:.2f}') if tree else ('-', '-')),
    )
    for alpha, plan, tree in planned
  ]
  columns = ('alpha', 'gamma', *_FIGURES, 'best tree', 'its speedup')
  shown.append(outputs.table(columns, rows))
  # Why drafting loses, at the highest rate at which it does.
  losing = [item for item in planned if not item.plan.best.gamma]
  for alpha, plan, _ in losing[-1:]:
    shown += [f'At alpha {alpha:.2f}: {text}' for text in plan.sentences]
  # Rates at which a tree is faster; if there are none, why not at the highest.
  trees = [(alpha, tree) for alpha, _, tree in planned if tree]
  if faster := [f'{alpha:.2f}' for alpha, tree in trees if tree.is_faster]:
    faster_at = ', '.join(faster)
    shown.append(f'A tree is faster than the best chain at alpha {faster_at}.')
  elif trees:
    alpha, tree = trees[-1]
    shown.append(f'At alpha {alpha:.2f}: {tree.sentence}')
  return shown


def fleet(
  num_tokens: float, alphas: Sequence[Alpha], predictions: Sequence[Prediction]
) -> object:
  """Makes the table of chip-hours, for plain decoding and for each alpha."""
  columns = ('alpha', 'gamma', 'tokens/s per chip', 'chip-hours', 'per million')
  # The first prediction is plain decoding. A profile is named by its first
  # rate.
  names = ['plain', *(f'{np.ravel(alpha)[0]:.2f}' for alpha in alphas)]
  rows = []
  for name, prediction in zip(names, predictions, strict=True):
    cost = prediction.cost_per_million_tokens
    speed = prediction.tokens_per_second_per_chip
    rows.append(
      (
        name,
        str(prediction.gamma),
        f'{speed:,.1f}',
        f'{prediction.chip_hours:,.1f}',
        '-' if cost is None else f'{cost:,.3f}',
      )
    )
  title = f'{num_tokens:g} output tokens, predicted'
  return outputs.table(columns, rows, title=title)


def _compiled(record: Figures) -> tuple[object, str]:
  columns = (
    *('', 'ms', 'bytes', 'flops', 'collectives'),
    *("compiler's ms", 'compiled in s'),
  )
  rows = [
    (
      name,
      f'{1e3 * cost["seconds"]:.3f}',
      f'{cost["memory_bytes"]:.3g}',
      f'{cost["flops"]:.3g}',
      str(cost['num_collectives']),
      f'{1e3 * cost["compiler_seconds"]:.3f}',
      f'{cost["compile_seconds"]:.0f}',
    )
    for name, cost in record['programs'].items()
  ]
  gib = {name: f'{size / 2**30:.2f}' for name, size in record['memory'].items()}
  # The sum comes last: 'target params 3.10, ...; 4.20 of 32.00'.
  total, available = gib.pop('total'), gib.pop('available')
  parts = ', '.join(f'{k.replace("_", " ")} {v}' for k, v in gib.items())
  memory = f'GiB per chip: {parts}; {total} of {available}'
  return outputs.table(columns, rows), memory


def _shape(tree: TreePlan) -> str:
  return f'{tree.choice.gamma} nodes, {tree.depth} deep'


def _choices(plan: GammaPlan, tree: TreePlan | None) -> object:
  rows = [
    (
      str(choice.gamma) + (' *' if choice is plan.best else ''),
      *_figures(choice),
      '-' if (even := choice.break_even_alpha) is None else f'{even:.2f}',
    )
    for choice in plan.choices
  ]
  if tree:
    rows.append((_shape(tree), *_figures(tree.choice), '-'))
  return outputs.table(('gamma', *_FIGURES, 'break-even alpha'), rows)


def _figures(choice: Forecast) -> list[str]:
  figures = (choice.expected_tokens, choice.speedup, choice.operations_factor)
  return [f'{figure:.2f}' for figure in figures]
