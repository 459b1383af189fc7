"""What an inference would take of every chip, from shapes alone."""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from specdec_jax.infer import ways
from specdec_jax.infer.decoding import Plan
from specdec_jax.launch import memory
from specdec_jax.models import families
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text import prompts


def figures(
  plan: Plan, lengths: Mapping[str, int], mesh: Mesh
) -> dict[str, Any]:
  """Sizes of a decode; nothing is computed and no weight is read.

  Returns:
    By name: `devices`, `kind`, `mesh`, and, of `target`, `drafter` and `state`
    (caches, mostly): `values` and `bytes` in all, and `bytes_per_chip`; also
    `chip_bytes`, None if the device does not tell its memory. Raises ValueError
    if the model or the batch does not divide over the mesh.
  """
  batch_size = plan.decoding.batch_size
  shapes = plan.decoder.params
  mesh_lib.check_divides(mesh, shapes.target, batch_size=batch_size)
  prompt = jax.tree.map(
    lambda row: jax.ShapeDtypeStruct((batch_size, *row.shape[1:]), row.dtype),
    prompts.pack(
      [None],
      config=plan.decoder.config,
      width=lengths['inputs'],
      max_new_tokens=lengths['targets'],
    ),
  )
  init = functools.partial(ways.of(plan).init, plan=plan)
  state = jax.eval_shape(init, shapes, prompt)
  device = mesh.devices.flat[0]
  stats = device.memory_stats() if device.platform != 'cpu' else None
  result = {
    'devices': mesh.size,
    'kind': device.device_kind,
    'mesh': dict(mesh.shape),
    'batch_size': batch_size,
    'state': _sizes(state, mesh_lib.state_shardings(mesh, state)),
    'chip_bytes': (stats or {}).get('bytes_limit'),
  }
  # Heads read the target's own arrays.
  config = plan.decoder.drafting.config
  own = () if config is None else families.param_shapes(config)
  for name, tree, place in (
    ('target', shapes.target, mesh_lib.parameter_shardings),
    ('drafter', own, mesh_lib.drafter_shardings),
  ):
    result[name] = _sizes(tree, place(mesh, tree))
  return result


def _sizes(tree: Any, shardings: Any) -> dict[str, int]:
  """Values and bytes of a tree of shapes."""
  sizes = {'values': 0, 'bytes': 0, 'bytes_per_chip': 0}
  pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
  for leaf, sharding in pairs:
    sizes['values'] += leaf.size
    sizes['bytes'] += leaf.size * leaf.dtype.itemsize
    on_chip = math.prod(sharding.shard_shape(leaf.shape))
    sizes['bytes_per_chip'] += on_chip * leaf.dtype.itemsize
  return sizes


def table(found: dict[str, Any]) -> Any:
  """The figures as a `rich` table."""
  from rich.table import Table

  mesh = ' x '.join(f'{axis} {size}' for axis, size in found['mesh'].items())
  result = Table(
    title=f'{found["devices"]} x {found["kind"]}, {mesh}, '
    f'batch {found["batch_size"]}'
  )
  for name in ('', 'values', 'bytes', 'bytes per chip'):
    result.add_column(name, justify='right' if name else 'left')
  labels = {
    'target': 'target parameters',
    'drafter': 'drafter parameters',
    'state': 'caches and state',
  }
  total = dict.fromkeys(found['target'], 0)
  for name, label in labels.items():
    result.add_row(label, *(f'{size:,}' for size in found[name].values()))
    total = {key: total[key] + found[name][key] for key in total}
  result.add_row('together', *(f'{size:,}' for size in total.values()))
  if found['chip_bytes']:
    result.add_row('memory of a chip', '', '', f'{found["chip_bytes"]:,}')
  return result


@contextlib.contextmanager
def running_out_explained(
  plan: Plan, lengths: Mapping[str, int], mesh: Mesh
) -> Iterator[None]:
  """Raises ValueError, when memory runs out in the block, with what takes how
  much of it."""
  try:
    yield
  except Exception as error:
    if not memory.has_run_out(error):
      raise
    found = figures(plan, lengths, mesh)
    weights = sum(found[of]['bytes_per_chip'] for of in ('target', 'drafter'))
    has = f' of {found["chip_bytes"]:,}' if found['chip_bytes'] else ''
    raise ValueError(
      f'out of memory: of the bytes{has} that a device has, the weights take '
      f'{weights:,} and the caches of Decoding.batch_size '
      f'{found["batch_size"]:,} take {found["state"]["bytes_per_chip"]:,}, '
      'before what is computed: lower Decoding.batch_size or '
      'TASK_FEATURE_LENGTHS, or raise device_mesh.num_partitions'
    ) from error
