"""Logical axes of arrays and the mesh axes that they are split over.

Models name what an axis *is* (`batch`, `heads`, `mlp`); this table says where
it lies. It is T5X's standard one-dimensional partitioning: the batch over
`data`, and heads, feed-forward and vocabulary over `model`. Every function here
does nothing unless a mesh is set (`jax.set_mesh`), so that the same program
runs on one device.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from specdec_jax.base import Array

DATA, MODEL = 'data', 'model'

MESH_AXIS = {
  'batch': DATA,
  **dict.fromkeys(('vocab', 'mlp', 'heads', 'joined_kv', 'features'), MODEL),
  **dict.fromkeys(('embed', 'kv', 'length', 'relpos_buckets'), None),
}

# The logical axes of a parameter, by the end of its path. Networks of all
# families name their parameters as T5X does.
_PARAMETER_AXES: dict[tuple[str, ...], tuple[str | None, ...]] = {
  ('token_embedder', 'embedding'): ('vocab', 'embed'),
  **{(x, 'kernel'): ('embed', 'joined_kv') for x in ('query', 'key', 'value')},
  **{(x, 'bias'): ('joined_kv',) for x in ('query', 'key', 'value')},
  ('out', 'kernel'): ('joined_kv', 'embed'),
  ('features_dense', 'kernel'): ('features', 'embed'),
  **{(x, 'kernel'): ('embed', 'mlp') for x in ('wi', 'wi_0', 'wi_1')},
  ('wo', 'kernel'): ('mlp', 'embed'),
  ('relpos_bias', 'rel_embedding'): ('heads', 'relpos_buckets'),
  ('logits_dense', 'kernel'): ('embed', 'vocab'),
}


def parameter_axes(path: Any, leaf: Any) -> tuple[str | None, ...]:
  """The logical axes of a parameter at a path of `tree_map_with_path`; None for
  those that the table does not name, such as norms, which are kept whole."""
  names = jax.tree_util.keystr(path, simple=True, separator='/').split('/')
  return _PARAMETER_AXES.get(tuple(names[-2:]), (None,) * len(leaf.shape))


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
  """The mesh axes of an array with these logical axes."""
  return PartitionSpec(*(axis and MESH_AXIS[axis] for axis in axes))


def constrain(x: Array, *axes: str | None) -> Array:
  """Asks the compiler to lay `x` out by its logical axes; see `fitting_spec`:
  key-value heads that are fewer than the devices stay whole, for instance."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  return jax.lax.with_sharding_constraint(x, fitting_spec(mesh, x.shape, axes))


def map_shards(
  fn: Callable[..., Array],
  arrays: tuple[Array, ...],
  axes: tuple[tuple[str | None, ...], ...],
) -> Array:
  """`fn(*arrays)` on every device's own part of the arrays.

  For operations that index a split axis and need nothing from other devices,
  which the compiler cannot know. `axes` are the logical axes of each array; the
  result has shape and axes of the first. Without a mesh it is a plain call.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return fn(*arrays)
  # All arrays of a call are split alike or not at all.
  specs = [
    fitting_spec(mesh, array.shape, names)
    for array, names in zip(arrays, axes, strict=True)
  ]
  return jax.shard_map(fn, in_specs=tuple(specs), out_specs=specs[0])(*arrays)


def fitting_spec(
  mesh: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> PartitionSpec:
  """`partition_spec`, with axes whole that their mesh axis does not divide."""
  spec = partition_spec(axes)
  sizes = dict(mesh.shape)
  return PartitionSpec(
    *(
      name if name in sizes and size % sizes[name] == 0 else None
      for name, size in zip(spec, shape, strict=True)
    )
  )
