"""Device meshes of two axes, `data` and `model`.

Rows of the batch are split over `data`; heads, feed-forward and vocabulary over
`model`. Devices along `model` communicate in every layer, so they are placed
where the hardware's links are short.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specdec_jax.base import Array
from specdec_jax.launch import platforms
from specdec_jax.sharding import rules

_Tree = TypeVar('_Tree')


def make(
  *,
  num_partitions: int | None = None,
  model_parallel_submesh: Sequence[int] | None = None,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """Makes a mesh `(data, model)`.

  Args:
    num_partitions: devices that share one copy of the model. By default a 2x2
      tile on a TPU (or all devices, if fewer), 1 elsewhere.
    model_parallel_submesh: the same, under T5X's name, as a box `(x, y, z,
      cores)` of the slice.
    devices: devices of the mesh; by default all.

  Raises:
    ValueError: if both sizes are given, or do not divide the devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  if num_partitions is not None and model_parallel_submesh is not None:
    raise ValueError(
      f'give num_partitions ({num_partitions}) or model_parallel_submesh '
      f'({tuple(model_parallel_submesh)}), not both'
    )
  if model_parallel_submesh is not None:
    return _from_submesh(devices, tuple(model_parallel_submesh))
  if num_partitions is None:
    # The smallest tile of a TPU slice whose links are all direct, 2x2 chips, of
    # two cores each on v2 and v3. With tiles of 4: 4 of 8 devices, 2 of 6.
    is_of_cores = devices[0].device_kind in ('TPU v2', 'TPU v3')
    tile = 8 if is_of_cores else 4 if devices[0].platform == 'tpu' else 1
    num_partitions = math.gcd(len(devices), tile)
  if num_partitions < 1 or len(devices) % num_partitions:
    raise ValueError(
      f'{len(devices)} devices do not divide into replicas of {num_partitions}'
    )
  return jax.make_mesh(
    (len(devices) // num_partitions, num_partitions),
    (rules.DATA, rules.MODEL),
    axis_types=(AxisType.Auto,) * 2,
    devices=devices,
  )


def _from_submesh(devices: Sequence[Any], submesh: tuple[int, ...]) -> Mesh:
  """Makes a mesh by dividing the slice's box of devices into `submesh`
  boxes."""
  if len(submesh) != 4 or min(submesh) < 1:
    raise ValueError(
      f'model_parallel_submesh has four sizes (x, y, z, cores), got {submesh}'
    )
  grid = _grid(devices)
  if np.any(np.mod(grid.shape, submesh)):
    raise ValueError(
      f'the devices form a box of {grid.shape}, which does not divide into '
      f'boxes of {submesh}'
    )
  counts = np.array(grid.shape) // submesh
  # Splits each axis in two, then moves the outer indices of all four before the
  # inner ones: 4 x 2 chips of one core, [4, 2, 1, 1], in boxes of 2 x 2 become
  # [2, 2, 1, 2, 1, 1, 1, 1] and then [2, 1, 1, 1, 2, 2, 1, 1]: 2 boxes of 4.
  boxes = grid.reshape(np.stack([counts, submesh], axis=1).ravel())
  boxes = boxes.transpose(0, 2, 4, 6, 1, 3, 5, 7)
  return Mesh(
    boxes.reshape(-1, math.prod(submesh)),
    (rules.DATA, rules.MODEL),
    axis_types=(AxisType.Auto,) * 2,
  )


def _grid(devices: Sequence[Any]) -> np.ndarray:
  """Arranges devices by their coordinates in an array `[x, y, z, core]`."""
  if not all(hasattr(device, 'coords') for device in devices):
    raise ValueError(
      'model_parallel_submesh needs devices with coordinates, as TPUs have; '
      f'these are {devices[0].device_kind}: give num_partitions'
    )
  core = lambda device: getattr(device, 'core_on_chip', 0)
  places = np.array([(*device.coords, core(device)) for device in devices])
  # The coordinates of a part of a larger slice need not start at 0.
  places -= places.min(axis=0)
  shape = places.max(axis=0) + 1
  if math.prod(shape) != len(devices):
    raise ValueError(
      f'{len(devices)} devices do not fill a box of {tuple(shape.tolist())}'
    )
  # A device with coordinates (1, 0, 0) and core 0 is at grid[1, 0, 0, 0].
  grid = np.empty(shape, dtype=object)
  grid[tuple(places.T)] = devices
  return grid


def check_divides(mesh: Mesh, params: Any, *, batch_size: int) -> None:
  """Raises ValueError, with the sizes, unless the mesh divides a batch's rows
  and all axes of `params`, a pytree of arrays or shapes under T5X's names."""
  sizes = dict(mesh.shape)
  if batch_size % sizes[rules.DATA]:
    raise ValueError(
      f'a batch of {batch_size} rows does not divide over the '
      f'{sizes[rules.DATA]} data-parallel devices'
    )
  axes = rules.parameter_axes(mesh, params)
  misfits = collections.Counter(
    f'{axis} of {size}'
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    for axis, size in zip(axes[path], leaf.shape, strict=True)
    if axis and size % sizes.get(rules.MESH_AXIS[axis], 1)
  )
  # The same axis of several layers is named once.
  if misfits:
    raise ValueError(
      f'a model axis of {sizes[rules.MODEL]} devices does not divide '
      f'{", ".join(misfits)} ({sum(misfits.values())} arrays)'
    )


def parameter_shardings(mesh: Mesh, params: Any) -> Any:
  """Makes a `NamedSharding` for every parameter, an array or a shape."""
  axes = rules.parameter_axes(mesh, params)
  return jax.tree_util.tree_map_with_path(
    lambda path, _: NamedSharding(mesh, rules.partition_spec(axes[path])),
    params,
  )


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Makes the sharding that splits rows over `data` and no other axis."""
  return NamedSharding(mesh, PartitionSpec(rules.DATA))


def place_batch(batch: Mapping[str, np.ndarray]) -> dict[str, Array]:
  """Makes global arrays of a batch, split over `data` if a mesh is set.

  Every process passes the features of all rows, `[B, ...]`, and each device
  takes the rows of its position on the mesh: devices that share a copy of the
  model take the same rows, even if they belong to different processes.
  ValueError if the data-parallel devices do not divide the rows.
  """
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return {name: jnp.asarray(x) for name, x in batch.items()}
  sharding = batch_sharding(mesh)

  def place(x: np.ndarray) -> Array:
    check_divides(mesh, {}, batch_size=len(x))
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

  return {name: place(x) for name, x in batch.items()}


def fetch(arrays: Any) -> Any:
  """Fetches a pytree of arrays as numpy; every process gets all of them."""

  def gathered(x: Array) -> np.ndarray:
    # With several processes, each has only the shards of its devices.
    if x.is_fully_addressable:
      return np.asarray(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(gathered, arrays)


def state_shardings(mesh: Mesh, state: Any, *, is_split: bool = True) -> Any:
  """Makes the shardings of a pytree with rows first: these over `data` and, if
  `is_split`, the heads of caches over `model`, where the mesh divides them."""

  def place(leaf: Any) -> NamedSharding:
    # Only caches have four axes: [rows, heads, positions, features].
    heads = 'heads' if leaf.ndim == 4 and is_split else None
    axes = ('batch', heads, *[None] * leaf.ndim)[: leaf.ndim]
    return NamedSharding(mesh, rules.fitting_spec(mesh, leaf.shape, axes))

  return jax.tree.map(place, state)


def with_shardings(tree: _Tree, shardings: Any) -> _Tree:
  """Returns the shapes of a tree with the shardings of another tree."""

  def put(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

  return jax.tree.map(put, tree, shardings)


def tree_bytes(tree: Any) -> int:
  """Counts the bytes of a tree of arrays or shapes on each device, by their
  shardings; a shape without one is replicated, and two int4 share a byte."""

  def num_bytes(leaf: Any) -> int:
    sharding = getattr(leaf, 'sharding', None)
    shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
    # The `itemsize` of random keys is the bytes of all their words.
    size = math.prod(shape) * int(leaf.dtype.itemsize)
    return size // 2 if leaf.dtype == jnp.int4 else size

  return sum(map(num_bytes, jax.tree.leaves(tree)))


def check_devices(num_devices: int) -> None:
  """Raises ValueError unless JAX has that many devices. Called before anything
  else uses devices: see `platforms.prepare_libtpu`."""
  platforms.prepare_libtpu()
  reason = platforms.missing()
  if reason:
    raise ValueError(reason)
  devices = jax.devices()
  if type(num_devices) is not int or not 1 <= num_devices <= len(devices):
    raise ValueError(
      f'num_devices {num_devices!r}: there are {len(devices)} '
      f'({devices[0].platform})'
    )


def drafter_shardings(mesh: Mesh, shapes: Any) -> Any:
  """Makes `parameter_shardings`, or replicates all parameters if an axis of one
  cannot be divided over the mesh."""
  try:
    check_divides(mesh, shapes, batch_size=mesh.size)
  except ValueError:
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda _: replicated, shapes)
  return parameter_shardings(mesh, shapes)


def device_mesh(
  *,
  num_partitions: int | None = 1,
  model_parallel_submesh: Sequence[int] | None = None,
  num_devices: int | None = None,
) -> Mesh:
  """Makes a mesh as `make`, of `num_devices` devices (None: all); ValueError if
  there are fewer."""
  check_devices(1 if num_devices is None else num_devices)
  has_submesh = model_parallel_submesh is not None
  return make(
    num_partitions=None if has_submesh else num_partitions,
    model_parallel_submesh=model_parallel_submesh,
    devices=jax.devices()[:num_devices],
  )
