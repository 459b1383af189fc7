"""Chooses gamma, predicts the speedup, and says where speculation loses.

Costs come from `specdec calibrate` (--costs), or from compiling the parts of an
iteration for a TPU slice that need not be there (--topology).
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import theory
from specdec_jax.checkpoints import loading
from specdec_jax.cli import options, outputs
from specdec_jax.cli.commands import calibrate
from specdec_jax.files.paths import user_path
from specdec_jax.launch import progress
from specdec_jax.models import families, presets
from specdec_jax.theory import fleet, planner
from specdec_jax.theory.fleet import Prediction
from specdec_jax.theory.planner import Choice, Costs, Plan
from specdec_jax.tpu_costs import aot, parts
from specdec_jax.tpu_costs.chips import CHIPS

# What a file of costs must have.
_NEEDED = {
  **dict.fromkeys(('widths', 'target_seconds'), 'numbers'),
  **dict.fromkeys(('first_draft_seconds', 'draft_seconds'), 'a number'),
  **dict.fromkeys(('loop_seconds', 'c_hat', 'batch_size'), 'a number'),
  **dict.fromkeys(('source', 'model', 'drafter', 'dtype', 'device'), 'a text'),
}
_WORKLOAD = ('batch_size', 'input_length', 'output_length', 'num_partitions')
# Shown where alpha is not known.
_ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
_FIGURES = ('tokens per target run', 'speedup', 'operations')


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument_group('costs').add_argument
  number = functools.partial(add, type=options.positive_int)
  add('--costs', metavar='FILE', help='what `specdec calibrate --json` wrote')
  add('--target', metavar='PRESET', help='such as t5_1_1_xxl or t5gemma_9b')
  add('--draft', metavar='PRESET', help='such as t5_1_1_small, or eagle3_8k')
  add(
    '--topology',
    help=f'the slice to compile for, such as v4:2x2x1; {", ".join(CHIPS)}',
  )
  number('--batch_size', help='rows (default: 1)')
  number(
    '--input_length',
    default=512,
    help='tokens of the encoder, or of the prompt',
  )
  number('--output_length', default=128, help='new tokens per row')
  number(
    '--num_partitions',
    help='chips that share a copy of the target (default: as the batch allows)',
  )
  add(
    '--dtype', choices=presets.DTYPES, default='bfloat16', help='of the weights'
  )
  add = parser.add_argument_group('planning').add_argument
  add(
    '--alpha',
    type=options.share,
    help='the acceptance rate (default: that of --costs, or several)',
  )
  add(
    '--max_gamma',
    type=options.positive_int,
    help='the largest gamma considered (default: 12, or as measured)',
  )
  add(
    '--tokens',
    type=options.number(float, lambda n: 1 <= n < 1e18, 'a number from 1 on'),
    help='output tokens in all, such as 1e9: predicts their chip-hours',
  )
  add(
    '--price',
    type=options.cost,
    help='of one chip-hour: predicts the cost per million output tokens',
  )
  options.add_report(parser, 'write the plan', shown='tables')


def run(args: argparse.Namespace) -> int:
  _check(args)
  outputs.check({'--json': args.json}, {'--costs': args.costs})
  found = _read(args) if args.costs else _compile(args)
  costs = calibrate.costs_of(found)
  max_gamma = args.max_gamma or costs.max_gamma
  alphas, interval = _alphas(args, found, max_gamma)
  plans = [
    planner.plan(
      alpha,
      costs,
      max_gamma=max_gamma,
      batch_size=found['batch_size'],
      length=args.output_length,
      interval=interval,
    )
    for alpha in alphas
  ]
  record = found | {
    'kind': 'specdec plan',
    'c': costs.c(costs.max_gamma),
    'oracle_speedups': [_oracle(alpha, costs) for alpha in alphas],
    'plans': [
      {'alpha': alpha, **dataclasses.asdict(plan)}
      for alpha, plan in zip(alphas, plans, strict=True)
    ],
  }
  shown = _shown(record, costs, alphas, plans)
  if args.tokens:
    predicted = fleet.predict(
      costs,
      plans,
      num_tokens=args.tokens,
      num_chips=found.get('num_devices') or 1,
      batch_size=found['batch_size'],
      length=args.output_length,
      price=args.price,
    )
    record['fleet'] = [each._asdict() for each in predicted]
    shown.append(_fleet(args.tokens, alphas, predicted))
  return outputs.report(args, record, *shown)


def _check(args: argparse.Namespace) -> None:
  named = [args.target, args.draft, args.topology]
  if args.costs and any(named):
    raise ValueError(
      '--costs has its costs measured; --target, --draft and --topology are to '
      'compile for others: give one or the other'
    )
  if not args.costs and not all(named):
    raise ValueError(
      'give --costs FILE of `specdec calibrate`, or --target, --draft and '
      '--topology to compile for'
    )
  if args.price is not None and not args.tokens:
    raise ValueError(
      f'--price {args.price:g} needs --tokens, such as --tokens 1e9'
    )
  if args.costs and args.batch_size:
    raise ValueError('--costs was measured for a batch size of its own')


def _read(args: argparse.Namespace) -> dict[str, Any]:
  """The figures of a file that `specdec calibrate` wrote, checked."""
  try:
    found = json.loads(user_path(args.costs).read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    reason = getattr(error, 'strerror', None) or 'it is not JSON'
    raise ValueError(f'cannot read --costs {args.costs}: {reason}') from error
  if not isinstance(found, dict) or found.get('kind') != calibrate.KIND:
    raise ValueError(
      f'--costs {args.costs} is not what `specdec calibrate --json` writes'
    )
  # Files of compiled costs know of no acceptance, and of one row no interval.
  others = {'num_devices': 'a number'}
  others |= dict.fromkeys(('profile', 'alpha_interval'), 'numbers')
  for name, kind in (_NEEDED | others).items():
    is_needed = name in _NEEDED or found.get(name)
    if is_needed and not _is(kind, found.get(name)):
      shown = repr(found[name]) if name in found else 'missing'
      raise ValueError(
        f'--costs {args.costs}: {name} must be {kind}, and is {shown}'
      )
  costs = calibrate.costs_of(found)
  costs.check_gamma(1)
  if args.max_gamma and args.max_gamma > costs.max_gamma:
    raise ValueError(
      f'--max_gamma {args.max_gamma} is beyond gamma {costs.max_gamma}, up to '
      f'which {args.costs} was measured: calibrate with '
      f'--gamma {args.max_gamma}'
    )
  return found


def _is(kind: str, value: Any) -> bool:
  if kind == 'a text':
    return isinstance(value, str)
  if kind == 'numbers':
    return isinstance(value, list) and all(_is('a number', v) for v in value)
  # JSON's true is an int to Python.
  return isinstance(value, int | float) and not isinstance(value, bool)


def _compile(args: argparse.Namespace) -> dict[str, Any]:
  dtype = jnp.dtype(args.dtype)
  batch_size, max_gamma = args.batch_size or 1, args.max_gamma or 12
  target = presets.preset(args.target, dtype=dtype)
  draft: Any
  if args.draft in presets.EAGLES:
    draft = presets.eagle(args.draft, target, dtype=dtype)
  else:
    draft = presets.preset(args.draft, dtype=dtype)
  if not loading.is_padding(target.vocab_size - draft.vocab_size):
    raise ValueError(
      f'{args.target} has {target.vocab_size} token ids, {args.draft} '
      f'{draft.vocab_size}'
    )
  if families.has_encoder(target) != families.has_encoder(draft):
    raise ValueError(f'just one of {args.target}, {args.draft} has an encoder')
  slice_ = aot.find_slice(args.topology)
  task = parts.Workload(
    slice=slice_,
    target=target,
    draft=draft,
    batch_size=batch_size,
    input_length=args.input_length,
    output_length=args.output_length,
    num_partitions=args.num_partitions
    or parts.default_num_partitions(slice_, batch_size),
  )
  with progress.bar('compiling', parts.num_parts(max_gamma)) as bar:
    pair = parts.pair_costs(task, max_gamma=max_gamma, advance=bar.advance)
  return {
    'kind': calibrate.KIND,
    'source': 'compiled',
    **dataclasses.asdict(pair.costs()),
    'model': args.target,
    'drafter': args.draft,
    'dtype': args.dtype,
    'device': args.topology,
    'num_devices': len(slice_.devices),
    **{name: getattr(task, name) for name in _WORKLOAD},
    'memory': pair.memory,
    'notes': list(pair.notes),
    'programs': {
      **{
        f'target, {width} positions': dataclasses.asdict(cost)
        for width, cost in zip(pair.widths, pair.target, strict=True)
      },
      'drafter, first token': dataclasses.asdict(pair.first_draft),
      'drafter, further token': dataclasses.asdict(pair.further_draft),
    },
  }


def _alphas(
  args: argparse.Namespace, found: dict[str, Any], max_gamma: int
) -> tuple[list[Any], tuple[float, float] | None]:
  """The acceptance rates to plan for, and an interval if one was measured."""
  if args.alpha is not None:
    return [args.alpha], None
  if not found.get('profile'):
    return list(_ALPHAS), None
  interval = found.get('alpha_interval')
  # A profile says more than alpha: it knows in which runs acceptances come.
  return [found['profile'][:max_gamma]], interval and tuple(interval)


def _shown(
  found: dict[str, Any], costs: Costs, alphas: list[Any], plans: list[Plan]
) -> list[Any]:
  names = ', '.join(found[x] for x in ('model', 'drafter', 'dtype', 'device'))
  shown = [f'{names}, batch {found["batch_size"]} ({found["source"]})']
  if 'programs' in found:
    shown += [*_compiled(found), *found['notes']]
  shown.append(
    f'c {found["c"]:.4f}, T({costs.widths[-1]}) / T(1) '
    f'{costs.verify_cost_ratio(costs.max_gamma):.3f}'
  )
  if len(plans) == 1:
    shown += [_choices(plans[0]), *plans[0].sentences]
    if (bound := found['oracle_speedups'][0]) is not None:
      shown.append(
        f'No schedule that varies gamma gains more than {bound:.2f} times: '
        'that is an oracle, which drafts just what is accepted.'
      )
    return shown
  rates = list(zip(alphas, plans, strict=True))
  rows = [
    (f'{alpha:.2f}', str(plan.best.gamma), *_figures(plan.best))
    for alpha, plan in rates
  ]
  shown.append(outputs.table(('alpha', 'gamma', *_FIGURES), rows))
  # What is to be said for the greatest of the rates that lose.
  for alpha, plan in [each for each in rates if not each[1].best.gamma][-1:]:
    shown += [f'At alpha {alpha:.2f}: {text}' for text in plan.sentences]
  return shown


def _fleet(
  num_tokens: float, alphas: Sequence[Any], found: Sequence[Prediction]
) -> Any:
  columns = ('alpha', 'gamma', 'tokens/s per chip', 'chip-hours', 'per million')
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


def _oracle(alpha: Any, costs: Costs) -> float | None:
  """What a gamma chosen with hindsight would gain, scoring being free of width;
  None for no bound: a drafter that is always right and takes no time."""
  c = min(costs.first_draft_seconds, costs.draft_seconds) / costs.plain_seconds
  # Of a profile the first rate is that of all prefixes, and alpha itself.
  rate = np.ravel(alpha)[0]
  bound = float(theory.oracle_walltime_improvement(rate, c))
  return bound if np.isfinite(bound) else None


def _compiled(found: dict[str, Any]) -> tuple[Any, str]:
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
  total, available = gib.pop('total'), gib.pop('available')
  parts = ', '.join(f'{k.replace("_", " ")} {v}' for k, v in gib.items())
  memory = f'GiB per chip: {parts}; {total} of {available}'
  return outputs.table(columns, rows), memory


def _choices(plan: Plan) -> Any:
  rows = [
    (
      str(choice.gamma) + (' *' if choice is plan.best else ''),
      *_figures(choice),
      '-' if (even := choice.break_even_alpha) is None else f'{even:.2f}',
    )
    for choice in plan.choices
  ]
  return outputs.table(('gamma', *_FIGURES, 'break-even alpha'), rows)


def _figures(choice: Choice) -> list[str]:
  found = (choice.expected_tokens, choice.speedup, choice.operations_factor)
  return [f'{figure:.2f}' for figure in found]
