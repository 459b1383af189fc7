"""Chooses gamma, predicts the speedup, and explains where speculation loses.

Costs come from `specdec calibrate` (--costs), or from compiling the parts of an
iteration for a TPU slice, without the hardware (--topology).
"""

import argparse
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.cli import options, outputs
from specdec_jax.files import settings
from specdec_jax.files.paths import user_path
from specdec_jax.launch import numbers
from specdec_jax.models import presets
from specdec_jax.planning import (
  aot,
  parts,
  plan_tables,
  planner,
  tree_planner,
  workloads,
)
from specdec_jax.planning.chips import CHIPS
from specdec_jax.planning.plan_tables import Figures
from specdec_jax.theory import doubts, trees
from specdec_jax.theory.costs import KIND, Costs

# Required fields of a file of costs, and lists that may be missing: compiled
# costs have no acceptance, and those of one row no interval.
_TEXTS = ('source', 'model', 'drafter', 'dtype', 'device')
_NUMBERS = (
  *('first_draft_seconds', 'draft_seconds', 'loop_seconds', 'c_hat'),
  'batch_size',
)
_IF_ANY = (
  *('profile', 'alpha_interval', 'rank_rates'),
  *('tree_nodes', 'tree_seconds', 'level_seconds'),
)
# Flags that are only for compiled costs.
_COMPILED = (
  *('target', 'draft', 'drafter', 'topology', 'batch_size', 'input_length'),
  *('num_partitions', 'dtype', 'weights', 'cache_dtype', 'no_trees'),
  *('bits', 'group', 'layers'),
)
_WORKLOAD = ('batch_size', 'input_length', 'output_length', 'num_partitions')
# Drafters that cannot be priced: ngram reads a file; the others have no cost or
# no acceptance rate.
_UNPRICED = ('ngram', 'grammar', 'none')
# Planned for if alpha is unknown.
_ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('costs')
  add = group.add_argument
  number = functools.partial(add, type=numbers.positive_int)
  add(
    '--costs', metavar='FILE', help='the output of `specdec calibrate --json`'
  )
  add('--target', metavar='PRESET', help='such as t5_1_1_xxl or t5gemma_9b')
  add(
    '--draft',
    metavar='PRESET',
    help='the network of the drafter: sizes such as t5_1_1_small, eagle3_8k, '
    'dflash_b16 or gemma4_e4b_assistant, or its folder',
  )
  add(
    '--drafter',
    choices=[name for name in DRAFTERS if name not in _UNPRICED],
    help='(default: model; eagle, block or assistant for their sizes)',
  )
  add(
    '--topology',
    help=f'the slice to compile for, such as v4:2x2x1; {", ".join(CHIPS)}',
  )
  number('--batch_size', help='rows (default: 1)')
  number('--input_length', help='tokens of an input or prompt (default: 512)')
  number('--output_length', default=128, help='new tokens per row')
  number(
    '--num_partitions',
    help='chips per copy of the target, for model parallelism (default: as few '
    'as the batch allows)',
  )
  add('--dtype', choices=presets.DTYPES, help='(default: bfloat16)')
  options.add_shared(group, 'weights', 'cache_dtype')
  # Options of other drafters do not change costs, or name a file.
  options.add_flags(
    group, [DRAFTERS['quantized']], but=('gamma', 'tree', 'min_prob')
  )
  add = parser.add_argument_group('planning').add_argument
  add(
    '--alpha',
    type=numbers.share,
    help='the acceptance rate (default: the one of --costs, else a range)',
  )
  add(
    '--max_gamma',
    type=numbers.positive_int,
    help='the largest gamma considered, and the most nodes of a tree (default: '
    'as measured, or 12)',
  )
  add(
    '--no_trees',
    action='store_true',
    help='compile no trees, which take most of the time of large models',
  )
  add(
    '--tokens',
    type=numbers.number(float, lambda n: 1 <= n < 1e18, 'a number from 1 on'),
    help='total output tokens, such as 1e9: predicts their chip-hours',
  )
  add(
    '--price',
    type=numbers.cost,
    help='price of a chip-hour: predicts the cost per million output tokens',
  )
  options.add_report(parser, 'write the plan', shown='tables')


def run(args: argparse.Namespace) -> int:
  _check(args)
  outputs.check({'--json': args.json}, {'--costs': args.costs})
  # Costs and acceptance, measured or compiled.
  measured = _read(args.costs, args.max_gamma) if args.costs else _compile(args)
  costs = Costs.among(measured)
  max_gamma = args.max_gamma or costs.max_gamma
  alphas, interval = _alphas(args, measured, max_gamma)
  batch_size, length = measured['batch_size'], args.output_length
  if args.alpha is None and measured.get('profile'):
    # Rows are assumed to be independent.
    undrafted = measured.get('abstained', 0) ** batch_size
    costs = dataclasses.replace(costs, undrafted=undrafted)
  # A plan for every acceptance rate.
  planned: list[plan_tables.Planned] = []
  for alpha in alphas:
    plan = planner.plan(
      alpha,
      costs,
      max_gamma=max_gamma,
      batch_size=batch_size,
      length=length,
      interval=interval,
      mean=measured.get('alpha'),
    )
    tree = _tree(measured, costs, alpha, plan, max_gamma, length)
    planned.append(plan_tables.Planned(alpha, plan, tree))
  # The record; JSON has no infinite numbers.
  oracles = [planner.oracle_speedup(alpha, costs, length) for alpha in alphas]
  record = measured | {
    'kind': 'specdec plan',
    'c': costs.c(costs.max_gamma),
    'oracle_speedups': [*map(outputs.finite, oracles)],
    'plans': [
      {
        'alpha': alpha,
        **dataclasses.asdict(plan),
        'tree': tree and dataclasses.asdict(tree),
      }
      for alpha, plan, tree in planned
    ],
  }
  # Tables.
  shown = plan_tables.tables(record, costs, planned)
  if args.tokens:
    predicted = planner.predict_fleet(
      costs,
      [item.plan for item in planned],
      num_tokens=args.tokens,
      num_chips=measured.get('num_devices') or 1,
      batch_size=batch_size,
      length=length,
      price=args.price,
    )
    record['fleet'] = [item._asdict() for item in predicted]
    shown.append(plan_tables.fleet(args.tokens, alphas, predicted))
  return outputs.report(args, record, *shown)


def _check(args: argparse.Namespace) -> None:
  named = [args.target, args.draft or args.drafter, args.topology]
  if not args.costs and not all(named):
    raise ValueError(
      'give --costs FILE of calibrate, or --target, --draft and --topology'
    )
  for name in _COMPILED:
    if args.costs and getattr(args, name):
      raise ValueError(f'--{name} is for --topology, not for --costs')
  if args.price is not None and not args.tokens:
    raise ValueError(f'--price {args.price:g} needs --tokens, such as 1e9')


def _read(path: str, max_gamma: int | None) -> Figures:
  """Reads the figures of a file that `specdec calibrate` wrote."""
  file = settings.read(user_path(path))
  if file.values.get('kind') != KIND:
    raise ValueError(
      f'--costs {path} is not what `specdec calibrate --json` writes'
    )
  for name in _TEXTS:
    file.text(name)
  for name in _NUMBERS:
    file.number(name)
  for name in ('widths', 'target_seconds'):
    file.numbers(name)
  for name in _IF_ANY:
    file.numbers(name, [])
  file.number('num_devices', 1)
  for name in ('alpha', 'abstained'):
    if not 0 <= file.number(name, 0) <= 1:
      file.refuse(name, 'a share from 0 to 1')
  if len(file.numbers('alpha_interval', [0, 1])) != 2:
    file.refuse('alpha_interval', 'two numbers')
  file.number('extend_seconds', 0)
  # --json repeats all figures of the file.
  record = dict(file.values)
  costs = Costs.among(record)
  costs.check_gamma(1)
  # A file of an earlier version lists no doubts.
  record['doubts'] = file.texts('doubts', []) or doubts.of_costs(record)
  if max_gamma and max_gamma > costs.max_gamma:
    raise ValueError(
      f'--max_gamma {max_gamma} exceeds gamma {costs.max_gamma}, the largest '
      f'one that {path} has: calibrate with --gamma {max_gamma}'
    )
  return record


def _compile(args: argparse.Namespace) -> Figures:
  """Compiles the parts of an iteration, and returns figures like `_read`."""
  dtype = jnp.dtype(args.dtype or 'bfloat16')
  batch_size = args.batch_size or 1
  max_gamma = args.max_gamma or 12
  by_sizes = 'model'
  if args.draft in presets.EAGLES:
    by_sizes = 'eagle'
  if args.draft in presets.BLOCKS:
    by_sizes = 'block'
    # The anchor's slot drafts nothing.
    max_gamma = args.max_gamma or presets.BLOCKS[args.draft] - 1
  if args.draft in presets.ASSISTANTS:
    by_sizes = 'assistant'
  decoder = workloads.decoder_of(
    *(args.target, args.drafter or by_sizes, args.draft),
    dtype=dtype.name,
    weights=args.weights,
    cache_dtype=args.cache_dtype,
    options=vars(args),
  )
  slice_ = aot.find_slice(args.topology)
  task = workloads.Workload(
    slice=slice_,
    decoder=decoder,
    batch_size=batch_size,
    input_length=args.input_length or 512,
    output_length=args.output_length,
    num_partitions=args.num_partitions
    or workloads.default_num_partitions(slice_, batch_size),
  )
  pair_costs = parts.pair_costs(
    task, max_gamma=max_gamma, has_trees=not args.no_trees
  )
  pair = dataclasses.asdict(pair_costs)
  return {
    'kind': KIND,
    'source': 'compiled',
    **pair.pop('costs'),
    'model': args.target,
    'drafter': args.draft or args.drafter,
    'dtype': dtype.name,
    'weights': args.weights,
    'cache_dtype': args.cache_dtype,
    'device': args.topology,
    'num_devices': len(slice_.devices),
    **{name: getattr(task, name) for name in _WORKLOAD},
    **pair,
  }


def _alphas(
  args: argparse.Namespace, measured: Figures, max_gamma: int
) -> tuple[list[plan_tables.Alpha], tuple[float, float] | None]:
  """Returns the acceptance rates to plan for, and their measured interval."""
  if args.alpha is not None:
    return [args.alpha], None
  if not measured.get('profile'):
    return list(_ALPHAS), None
  interval = measured.get('alpha_interval')
  # A profile, of rates by position, is more precise than alpha alone.
  return [measured['profile'][:max_gamma]], interval and tuple(interval)


def _tree(
  measured: Figures,
  costs: Costs,
  alpha: plan_tables.Alpha,
  plan: planner.GammaPlan,
  max_nodes: int,
  length: int,
) -> tree_planner.TreePlan | None:
  """Returns the best tree; None for drafters of chains or a single node."""
  ranks = measured.get('rank_rates')
  # Drafters of chains have neither rank rates nor compiled trees.
  if max_nodes < 2 or not (ranks or costs.tree_nodes):
    return None
  if ranks:
    # Measured on few prefixes, rates may increase from one rank to the next.
    ranks = np.minimum.accumulate(ranks)
  return tree_planner.plan(
    trees.assumed_rates(alpha, ranks),
    costs,
    plan.best,
    max_nodes=max_nodes,
    batch_size=measured['batch_size'],
    length=length,
  )
