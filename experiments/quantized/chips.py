"""Compiled TPU programs: what steps read, and what drafts would gain."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.report import Cells, Table
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.planning import aot, parts, planner, workloads
from specdec_jax.sharding import mesh as mesh_lib

# Targets of the tables of TPUs.
_TARGETS = 'llama_3_1_8b', 't5_1_1_xxl'
CHIPS = 'v5e:1x1', 'v6e:1x1', 'v4:1x1x1'


def tpu_bytes(chip: str) -> Table:
  """What steps of compiled programs read, beside the packed weights."""
  rows = [
    *(('llama_3_1_8b', 'int8', c, 8, 4096 - 128) for c in (None, 'int8')),
    *(
      (name, w, None, 1, 64)
      for name in _TARGETS
      for w in (None, 'int8', 'int4')
    ),
    ('llama_3_1_8b', 'int4:128', None, 1, 64),
  ]
  return Table(
    rows=[steps_of(*row, chip) for row in rows],
    notes=[
      'PREDICTED: compiled for the chip, none of it ran. A plain step is of '
      'one position, a verify step of five. "Over" is what crosses between '
      'memory and chip over what a step has to read: packed weights with '
      'their scales, but for an encoder and embeddings that are not read as '
      'logits, and full caches.'
    ],
  )


def steps_of(
  target: str,
  weights: str | None,
  cache_dtype: str | None,
  batch_size: int,
  prompt: int,
  chip: str,
) -> Cells:
  """Compiles a plain and a verify step of a target on a chip."""
  decoder = workloads.decoder_of(
    *(target, 'none', None),
    dtype='bfloat16',
    weights=weights,
    cache_dtype=cache_dtype,
  )
  task = workloads.Workload(
    slice=aot.find_slice(chip),
    decoder=decoder,
    batch_size=batch_size,
    input_length=prompt,
    output_length=128,
    num_partitions=1,
  )
  shapes = parts.shapes_of(task, Fixed(0))
  cells: Cells = {
    'target': target,
    'weights': weights or 'bfloat16',
    'caches': cache_dtype or 'bfloat16',
    'rows': batch_size,
    'prompt': prompt,
  }
  wide = parts.shapes_of(dataclasses.replace(task, output_length=132), Fixed(0))
  jobs = [parts.target_step(shapes, 1), parts.target_step(wide, 5)]
  read, caches = read_bytes(decoder), shapes.program.state.target_cache
  cells['weights read, GB'] = f'{read / 1e9:.2f}'
  cells['caches, GB'] = f'{mesh_lib.tree_bytes(caches) / 1e9:.2f}'
  read += mesh_lib.tree_bytes(caches)
  names = 'plain', 'verify'
  columns = ('{} step, GB', '{} step, over', '{} step, ms')
  cells |= {c.format(name): '' for name in names for c in columns}
  cells |= {'arguments, GB': '', 'temporaries, GB': '', 'fits': ''}
  try:
    costs = aot.price(aot.compile_all(jobs), task.slice.chip)
  except ValueError as error:
    return cells | {'fits': f'no: {str(error).rpartition(": ")[2]}'}
  for name, cost in zip(names, costs, strict=True):
    values = (
      f'{cost.memory_bytes / 1e9:.2f}',
      f'{cost.memory_bytes / read:.3f}',
      f'{1e3 * cost.seconds:.2f}',
    )
    cells |= {c.format(name): x for c, x in zip(columns, values, strict=True)}
  temporary = max(cost.temporary_bytes for cost in costs)
  arguments = costs[0].argument_bytes
  total = mesh_lib.tree_bytes((shapes.program.params, shapes.program.state))
  is_fitting = total + temporary <= task.slice.chip.memory_bytes
  return cells | {
    'arguments, GB': f'{arguments / 1e9:.2f}',
    'temporaries, GB': f'{temporary / 1e9:.3f}',
    'fits': 'yes' if is_fitting else f'no: {total / 2**30:.1f} GiB of weights',
  }


def read_bytes(decoder: Decoder) -> int:
  """Bytes of the parameters that every step reads whole."""
  is_tied, total = decoder.config.is_tied, 0
  for path, leaf in jax.tree.leaves_with_path(decoder.params.target):
    names = [part.key for part in path]
    # Keys and values of the encoder's states are computed before the loop.
    is_before = 'encoder' in names or (
      'encoder_decoder_attention' in names and {'key', 'value'} & {*names}
    )
    if not is_before and (is_tied or 'embedding' not in names[-1]):
      total += mesh_lib.tree_bytes(leaf)
  return total


def gains(chip: str, results: Path) -> Table:
  """The best gamma of a target that drafts for itself, by compiled programs."""
  alphas = json.loads((results / 'acceptance.json').read_text())['rows']
  return Table(
    rows=[row for name in _TARGETS for row in _gains_of(name, chip, alphas)],
    notes=[
      'PREDICTED: programs compiled for the chip, none of which ran. Batch 1, '
      '64 tokens of input, 128 of output, activations in bfloat16, gamma at '
      f'most {_MAX_GAMMA}; targets in bfloat16 where they and the drafter fit, '
      'else in int8. Alpha is not of these targets: it is what the models in '
      'the column "alpha of" accept of drafts in as many bits, greedy. c is '
      'the time of a drafted token over a plain step of the target, and GiB '
      'those of both, with caches, before temporaries.'
    ],
  )


def _gains_of(
  target: str, chip: str, alphas: Sequence[dict[str, Any]]
) -> list[Cells]:
  # The most that is held is a drafter in 8 bits.
  make = functools.partial(_task, target, chip)
  weights = None if _fits(make(None, 8)) else 'int8'
  whole = parts.shapes_of(make(weights, 4), Fixed(_MAX_GAMMA))
  of_target = _compiled(make(weights, 4), whole, slice(0, 3))
  rows = []
  for bits in (4,) if weights else (8, 4):
    task = make(weights, bits)
    shapes = parts.shapes_of(task, Fixed(_MAX_GAMMA))
    programs = [*of_target, *_compiled(task, shapes, slice(3, 5))]
    priced = aot.price(programs, task.slice.chip)
    plain, _, verify, *_ = priced
    costs = parts.costs_of(_MAX_GAMMA, priced)
    # Those that leave layers out come later.
    found = {
      row['target']: float(row['alpha'])
      for row in reversed(alphas)
      if row['drafter'].startswith(f'{bits} bits,')
      and not int(row['temperature'])
    }
    for name, alpha in sorted(found.items()):
      best = planner.plan(alpha, costs, max_gamma=_MAX_GAMMA, length=128).best
      rows.append(
        {
          'target': target,
          'weights': weights or 'bfloat16',
          'drafter': f'{bits} bits',
          'T(1), ms': f'{1e3 * plain.seconds:.2f}',
          'T(9) / T(1)': f'{verify.seconds / plain.seconds:.2f}',
          'c': f'{costs.c(_MAX_GAMMA):.3f}',
          'alpha of': name,
          'alpha': f'{alpha:.3f}',
          'gamma': best.gamma,
          'times plain': f'{best.speedup:.2f}',
          'GiB': f'{_held(shapes) / 2**30:.1f}',
        }
      )
  return rows


def _held(shapes: parts.Shapes) -> int:
  """Bytes of a target, its drafter and their state."""
  program = shapes.program
  parameters = program.params.target, shapes.draft_params
  return mesh_lib.tree_bytes((parameters, program.state))


def _fits(task: workloads.Workload) -> bool:
  held = _held(parts.shapes_of(task, Fixed(_MAX_GAMMA)))
  return held < task.slice.chip.memory_bytes


def _task(
  target: str, chip: str, weights: str | None, bits: int
) -> workloads.Workload:
  return workloads.Workload(
    slice=aot.find_slice(chip),
    decoder=workloads.decoder_of(
      *(target, 'quantized', None),
      dtype='bfloat16',
      weights=weights,
      options={'bits': bits},
    ),
    batch_size=1,
    input_length=64,
    output_length=128,
    num_partitions=1,
  )


def _compiled(
  task: workloads.Workload, whole: parts.Shapes, which: slice
) -> list[tuple[Any, float]]:
  """Some of `parts.part_jobs`: of the target, then of the drafter."""
  jobs = parts.part_jobs(task, whole, _MAX_GAMMA, ()).values()
  return aot.compile_all([*jobs][which])


_MAX_GAMMA = 8
