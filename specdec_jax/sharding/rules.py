"""Logical axes of arrays and the mesh axes that they are split over.

Models name what an axis *is* (`batch`, `heads`, `mlp`); this table maps it to a
mesh axis. It is T5X's standard one-dimensional partitioning: the batch over
`data`, and heads, feed-forward and vocabulary over `model`. `constrain` and
`map_shards` do nothing unless a mesh of several devices is set
(`jax.set_mesh`), so that the same program runs on one device.
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
  # Kernels of experts are split by this or by `mlp`: see `expert_axis`.
  'experts': MODEL,
}

# The logical axes of parameters, by the last two names of their paths. All
# families name their parameters as T5X does.
_PARAMETER_AXES: dict[tuple[str, ...], tuple[str | None, ...]] = {
  ('token_embedder', 'embedding'): ('vocab', 'embed'),
  **{(x, 'kernel'): ('embed', 'joined_kv') for x in ('query', 'key', 'value')},
  **{(x, 'bias'): ('joined_kv',) for x in ('query', 'key', 'value')},
  ('out', 'kernel'): ('joined_kv', 'embed'),
  ('features_dense', 'kernel'): ('features', 'embed'),
  **{(x, 'kernel'): ('embed', 'mlp') for x in ('wi', 'wi_0', 'wi_1')},
  ('wo', 'kernel'): ('mlp', 'embed'),
  ('expert_wi', 'kernel'): ('experts', None, 'embed', 'mlp'),
  ('expert_wo', 'kernel'): ('experts', 'mlp', 'embed'),
  ('per_layer_embedder', 'embedding'): ('vocab', 'embed'),
  ('per_layer_projection', 'kernel'): ('embed', 'mlp'),
  ('relpos_bias', 'rel_embedding'): ('heads', 'relpos_buckets'),
  ('logits_dense', 'kernel'): ('embed', 'vocab'),
}


def parameter_axes(mesh: Any, params: Any) -> dict[Any, tuple[str | None, ...]]:
  """Looks up the logical axes of each parameter of a pytree by its path. Those
  that the table does not name, such as norms, are replicated: all None."""
  shapes = {}
  axes_by_path = {}
  leaves = jax.tree_util.tree_leaves_with_path(params)
  for path, leaf in leaves:
    shapes[_names(path)] = leaf.shape
  for path, leaf in leaves:
    *layer, module, _ = '', *_names(path)
    unsplit = (None,) * len(leaf.shape)
    axes = _PARAMETER_AXES.get(_names(path)[-2:], unsplit)
    if 'experts' in axes:
      of_layer = (*layer[1:], 'expert_wo')
      axis = expert_axis(
        mesh,
        shapes[*of_layer, 'kernel'],
        shapes.get((*of_layer, 'kernel_scale')),
      )
      axes = expert_axes(module, axis)
    axes_by_path[path] = axes
  return axes_by_path


def _names(path: Any) -> tuple[str, ...]:
  names = jax.tree_util.keystr(path, simple=True, separator='/')
  return tuple(names.split('/'))


def expert_axis(
  mesh: Any, kernel: tuple[int, ...], scale: tuple[int, ...] | None = None
) -> str:
  """Returns the logical axis by which the devices of `model` split a layer's
  experts: their width, `mlp`, of which all devices read the same share, or
  `experts` if they divide these alone.

  Args:
    mesh: of the devices.
    kernel: shape of the second kernels, `[E, width, embed]`.
    scale: shape of their scales if they are packed, `[E, groups, embed]`; the
      groups lie along the width, and are not cut.
  """
  num_devices = dict(mesh.shape).get(MODEL, 1)
  num_experts, *parts = kernel[:2]
  if scale is not None and scale[1] > 1:
    parts.append(scale[1])
  divides_width = all(part % num_devices == 0 for part in parts)
  if not divides_width and num_experts % num_devices == 0:
    return 'experts'
  return 'mlp'


def expert_axes(module: str, split: str) -> tuple[str | None, ...]:
  """Returns the logical axes of the kernel `expert_wi` or `expert_wo`, of which
  `expert_axis` returned the one that is split."""
  axes = _PARAMETER_AXES[module, 'kernel']
  unsplit_axis = 'mlp' if split == 'experts' else 'experts'
  return tuple(None if axis == unsplit_axis else axis for axis in axes)


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
  """Maps logical axes to mesh axes: ('embed', 'mlp') to (None, 'model')."""
  return PartitionSpec(*(axis and MESH_AXIS[axis] for axis in axes))


def constrain(x: Array, *axes: str | None) -> Array:
  """Constrains `x` by its logical axes, if a mesh of several devices is set.
  Axes that do not divide, such as few key-value heads, are not split; see
  `fitting_spec`."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, fitting_spec(mesh, x.shape, axes))


def map_shards(
  fn: Callable[..., Array],
  arrays: tuple[Array, ...],
  axes: tuple[tuple[str | None, ...], ...],
) -> Array:
  """Calls `fn(*arrays)` on every device's shards of the arrays.

  For operations that index a split axis without using other shards, which the
  compiler cannot know. `axes` are the logical axes of each array; the result
  has the shape and the axes of the first. Without a mesh, a plain call.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return fn(*arrays)
  # All arrays of a call are split in the same manner.
  specs = [
    fitting_spec(mesh, array.shape, names)
    for array, names in zip(arrays, axes, strict=True)
  ]
  return jax.shard_map(fn, in_specs=tuple(specs), out_specs=specs[0])(*arrays)


def fitting_spec(
  mesh: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> PartitionSpec:
  """Makes a `partition_spec` that does not split axes that do not divide."""
  # Shape (8, 6) and axes ('batch', 'heads') on a 2 x 4 mesh: ('data', None).
  spec = partition_spec(axes)
  sizes = dict(mesh.shape)
  return PartitionSpec(
    *(
      name if name in sizes and size % sizes[name] == 0 else None
      for name, size in zip(spec, shape, strict=True)
    )
  )
