"""What `specdec plan` shows."""

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
  """A rate, the best chain for it, and the best tree, if any is drafted."""

  alpha: Alpha
  plan: GammaPlan
  tree: TreePlan | None


def tables(
  found: Figures, costs: Costs, planned: Sequence[Planned]
) -> list[object]:
  """Makes tables and sentences of what is written as JSON, and of its parts."""
  names = ', '.join(found[x] for x in ('model', 'drafter', 'dtype', 'device'))
  shown: list[object] = [
    f'{names}, batch {found["batch_size"]} ({found["source"]})'
  ]
  if 'programs' in found:
    shown += [*_compiled(found), *found['notes']]
  shown.append(
    f'c {found["c"]:.4f}, T({costs.widths[-1]}) / T(1) '
    f'{costs.verify_cost_ratio(costs.max_gamma):.3f}'
  )
  # One rate has a row for each gamma, and each of several one for its best.
  if len(planned) == 1:
    [(_, plan, tree)] = planned
    shown += [_choices(plan, tree), *plan.sentences]
    if tree:
      shown.append(tree.sentence)
    if (bound := found['oracle_speedups'][0]) is not None:
      shown.append(
        f'No schedule that varies gamma gains more than {bound:.2f} times: '
        'that is an oracle, which drafts just what is accepted.'
      )
    return shown
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
  # Explains why drafting loses, at the greatest rate at which it does.
  losing = [each for each in planned if not each.plan.best.gamma]
  for alpha, plan, _ in losing[-1:]:
    shown += [f'At alpha {alpha:.2f}: {text}' for text in plan.sentences]
  # Without a rate at which a tree wins, what is to be said of the greatest.
  trees = [(alpha, tree) for alpha, _, tree in planned if tree]
  if faster := [f'{alpha:.2f}' for alpha, tree in trees if tree.is_faster]:
    faster_at = ', '.join(faster)
    shown.append(f'A tree is faster than the best chain at alpha {faster_at}.')
  elif trees:
    alpha, tree = trees[-1]
    shown.append(f'At alpha {alpha:.2f}: {tree.sentence}')
  return shown


def fleet(
  num_tokens: float, alphas: Sequence[Alpha], found: Sequence[Prediction]
) -> object:
  """Makes the table of chip-hours, of plain decoding and of each alpha."""
  columns = ('alpha', 'gamma', 'tokens/s per chip', 'chip-hours', 'per million')
  # The first is plain decoding. A profile is named by its first rate.
  names = ['plain', *(f'{np.ravel(alpha)[0]:.2f}' for alpha in alphas)]
  rows = [
    (
      name,
      str(each.gamma),
      f'{each.tokens_per_second_per_chip:,.1f}',
      f'{each.chip_hours:,.1f}',
      '-' if (cost := each.cost_per_million_tokens) is None else f'{cost:,.3f}',
    )
    for name, each in zip(names, found, strict=True)
  ]
  title = f'{num_tokens:g} output tokens, predicted'
  return outputs.table(columns, rows, title=title)


def _compiled(found: Figures) -> tuple[object, str]:
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
    for name, cost in found['programs'].items()
  ]
  gib = {name: f'{size / 2**30:.2f}' for name, size in found['memory'].items()}
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
  found = (choice.expected_tokens, choice.speedup, choice.operations_factor)
  return [f'{figure:.2f}' for figure in found]
