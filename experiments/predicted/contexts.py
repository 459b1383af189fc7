"""Predicts what an iteration reads and takes on a TPU, by length of its rows.

    python -m experiments.predicted.contexts

The TPU compiler (libtpu, without a TPU) compiles a plain step and one that
verifies seven drafted tokens, with caches that are read in blocks, as they are,
and whole, as they were. README.md has the table.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from experiments import common, report
from experiments.report import Cells, Table
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.models import attention
from specdec_jax.planning import aot, parts, workloads
from specdec_jax.sharding import mesh as mesh_lib

MODULE = 'experiments.predicted.contexts'
# Positions of a plain step and of one that verifies.
_WIDTHS = {'plain': 1, 'verify': 8}
_NUM_NEW = 128


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('contexts', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  made = functools.partial(table, args)
  title = f'{args.target}: iterations on TPUs by context, predicted'
  report.measure((MODULE, argv), args.output, 'contexts', title, made)


def table(args: argparse.Namespace) -> Table:
  """Rows for each batch size, on the first slice that holds it."""
  rows: list[Cells] = []
  refused = []
  for batch_size in args.batch_sizes:
    for name in args.slices:
      try:
        rows += _rows(args, name, batch_size)
        break
      except ValueError as error:
        refused.append(f'{name} does not hold {batch_size} rows: {error}.')
  return Table(
    rows=rows,
    notes=[
      'PREDICTED: compiled for the slice, in bfloat16, and priced by a '
      'roofline; no TPU has run any of it. Bytes are of one chip, in GB. Each '
      f'row has room for {args.room} tokens, of which the longest has as many '
      f'as the column says; a verify step scores {_WIDTHS["verify"]} '
      'positions. "Whole" reads all of the room, as it was before attention '
      'read blocks. "Least" are the weights, without embeddings that are only '
      'looked up, and the keys and values of these tokens, once.',
      *refused,
    ],
  )


def _rows(
  args: argparse.Namespace, name: str, batch_size: int
) -> Iterator[Cells]:
  """A row per context; ValueError if the slice does not hold them."""
  shapes = _shapes(args, name, batch_size)
  made = {}
  for is_whole in (False, True):
    with _whole() if is_whole else contextlib.nullcontext():
      jobs = [parts.target_step(shapes, width) for width in _WIDTHS.values()]
      made[is_whole] = aot.compile_all(jobs)
  programs = [*made[False], *made[True]]
  state, target = shapes.program.state, shapes.program.params.target
  weights = mesh_lib.tree_bytes(target)
  if not shapes.workload.decoder.config.is_tied:
    weights -= mesh_lib.tree_bytes(target['token_embedder'])
  entry = mesh_lib.tree_bytes(state.target_cache) / args.room
  chip = shapes.workload.slice.chip
  for context in args.contexts:
    costs = aot.price(programs, chip, context)
    cells: Cells = {'slice': name, 'rows': batch_size, 'tokens': context}
    cells['least, GB'] = f'{(weights + context * entry) / 1e9:.2f}'
    for i, step in enumerate(_WIDTHS):
      for way, cost in (('whole', costs[i + 2]), ('blocks', costs[i])):
        cells[f'{step}, {way}: GB'] = f'{cost.memory_bytes / 1e9:.2f}'
        cells[f'{step}, {way}: ms'] = f'{1e3 * cost.seconds:.2f}'
    yield cells


def _shapes(
  args: argparse.Namespace, name: str, batch_size: int
) -> parts.Shapes:
  """A decoder whose caches have `args.room` entries."""
  slice_ = aot.find_slice(name)
  longest = max(_WIDTHS.values())
  decoder = workloads.decoder_of(
    *(args.target, 'prompt_lookup', None), dtype='bfloat16'
  )
  task = workloads.Workload(
    slice=slice_,
    decoder=decoder,
    batch_size=batch_size,
    # An iteration that begins at the end has room for its positions.
    input_length=args.room - longest - _NUM_NEW,
    output_length=_NUM_NEW,
    num_partitions=len(slice_.devices),
  )
  shapes = parts.shapes_of(task, Fixed(longest - 1))
  held = mesh_lib.tree_bytes((shapes.program.params, shapes.program.state))
  if held > slice_.chip.memory_bytes:
    room = slice_.chip.memory_bytes / 2**30
    raise ValueError(f'{held / 2**30:.1f} of {room:.0f} GiB per chip')
  return shapes


@contextlib.contextmanager
def _whole() -> Iterator[None]:
  """Attention reads caches whole."""
  whole = lambda capacity, least: capacity
  with mock.patch.object(attention, 'block_size', whole):
    jax.clear_caches()
    yield
  jax.clear_caches()


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  add: Any = parser.add_argument
  add('--target', default='llama_3_1_8b')
  add(
    '--slices',
    type=common.listed(),
    default=['v5e:1x1', 'v5p:1x1x1', 'v5p:2x2x1'],
    help='the first that holds them is taken',
  )
  add('--batch_sizes', type=common.numbers, default=[1, 8, 64])
  add('--contexts', type=common.numbers, default=[512, 4096, 32768])
  add('--output', type=Path, default=Path('experiments/predicted/results'))
  common.add_counts(parser, room=32768)
  return parser


if __name__ == '__main__':
  sys.exit(main())
