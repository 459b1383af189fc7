"""Trees of arrays on disk, read through tensorstore only as far as needed.

A *stored array* is an open `tensorstore.TensorStore` or a numpy array. Both
have a shape and are sliced alike; the first reads from disk on request.
"""

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array
from specdec_jax.files.require import require

import_tensorstore = functools.partial(
  require,
  'tensorstore',
  extra='models',
  purpose='a T5X or Orbax checkpoint',
)
Stored = Any
_SHOWN = 4


def open_all(
  specs: Mapping[str, dict[str, Any]], *, source: str
) -> dict[str, Stored]:
  """Opens arrays, all at once; reads their shapes, but none of their values.

  Args:
    specs: tensorstore specs by name.
    source: what the errors call the checkpoint.

  Raises:
    ValueError: if an array is not there or is not what its spec says.
    ImportError: if the tensorstore package is not installed.
  """
  tensorstore = import_tensorstore()
  futures, arrays = {}, {}
  for name, spec in specs.items():
    with _damage(source, name, 'opened'):
      # By default a chunk that is not there reads as zeros.
      futures[name] = tensorstore.open(
        {**spec, 'fill_missing_data_reads': False}, open=True, read=True
      )
  for name, future in futures.items():
    with _damage(source, name, 'opened'):
      arrays[name] = future.result()
      _check_chunks(arrays[name])
  return arrays


def _check_chunks(store: Stored) -> None:
  """Raises ValueError if a chunk is larger than its array.

  Memory is allocated for a whole chunk, however little of it is stored: 4 MB
  of gzip could take 4 GB, and a chunk larger than memory ends the process.
  """
  shape, chunk = store.shape, store.chunk_layout.read_chunk.shape or ()
  if any(c > max(1, s) for c, s in zip(chunk, shape, strict=True)):
    sizes = ('x'.join(map(str, each)) for each in (chunk, shape))
    raise ValueError('its chunks are {}, it is {}'.format(*sizes))


@contextlib.contextmanager
def _damage(source: str, name: str, action: str) -> Iterator[None]:
  """Adds the array and the checkpoint to what tensorstore raises."""
  try:
    yield
  except ValueError as error:
    raise ValueError(
      f'{source} is incomplete or damaged: array {name} cannot be {action} '
      f'({_reason(error)})'
    ) from error


def describe(stored: Stored) -> jax.ShapeDtypeStruct:
  """Shape and dtype of a stored array."""
  dtype = stored.dtype
  return jax.ShapeDtypeStruct(
    tuple(stored.shape), getattr(dtype, 'numpy_dtype', dtype)
  )


def read_tree(
  arrays: Mapping[str, Stored],
  expected: Any,
  *,
  source: str,
  dtype: jnp.dtype | None = None,
) -> Any:
  """Reads the arrays that a tree expects.

  Where a leaf of `expected` has a sharding, this process reads the slices of
  its own devices, each once, and no others. Values are cast slice by slice.

  Args:
    arrays: stored arrays by name, keys joined by '/'.
    expected: a tree of dicts of `jax.ShapeDtypeStruct`, with or without
      shardings. Floats are read of any width, integers of their own.
    source: what the errors call the checkpoint.
    dtype: of the results; None takes that of each expected leaf.

  Returns:
    A tree like `expected`, of arrays.

  Raises:
    ValueError: if arrays are missing, unexpected, of other shapes or types, or
      unreadable.
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(expected)
  wanted = {name_of(path): leaf for path, leaf in leaves}
  check_names(set(arrays), set(wanted), source=source)
  check_arrays(arrays, wanted, source=source)

  def read(name: str) -> Array:
    leaf = wanted[name]
    with _damage(source, name, 'read'):
      return _read(
        arrays[name],
        leaf.dtype if dtype is None else dtype,
        getattr(leaf, 'sharding', None),
      )

  num_threads = min(8, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    return jax.tree.unflatten(structure, list(pool.map(read, wanted)))


def _read(stored: Stored, dtype: jnp.dtype, sharding: Any) -> Array:
  """One array, or this process's slices of it."""

  def values_at(index: tuple[slice, ...]) -> np.ndarray:
    part = _values(stored, index)
    return np.ascontiguousarray(part, dtype).reshape(part.shape)

  if sharding is None:
    return jax.device_put(values_at((slice(None),) * len(stored.shape)))
  return jax.make_array_from_callback(
    tuple(stored.shape), sharding, once_per_slice(values_at, stored.shape)
  )


def _values(stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
  """The values of a stored array in a slice of every axis."""
  part = stored[index]
  if isinstance(part, np.ndarray | np.generic):
    return np.asarray(part)
  return part.read().result()


def whole_number(stored: Stored, *, source: str, name: str) -> int:
  """The value of a stored scalar.

  Args:
    stored: an array without axes.
    source: what the errors call the checkpoint.
    name: what they call the array.

  Raises:
    ValueError: if it is no whole number, or cannot be read.
  """
  shape, dtype = stored.shape, describe(stored).dtype
  if tuple(shape) or not np.issubdtype(dtype, np.integer):
    raise ValueError(
      f'{source}: {name} is an array {list(shape)} of {dtype}, expected a '
      'whole number'
    )
  with _damage(source, name, 'read'):
    return int(_values(stored, ()))


def once_per_slice(
  read: Callable[[tuple[slice, ...]], np.ndarray], shape: tuple[int, ...]
) -> Callable[[Any], np.ndarray]:
  """A reader that reads a slice once, however many devices hold it."""
  read_before: dict[tuple, np.ndarray] = {}

  def read_once(index: Any) -> np.ndarray:
    # Slices are unhashable before Python 3.12.
    key = tuple(
      part.indices(size) for part, size in zip(index, shape, strict=True)
    )
    if key not in read_before:
      read_before[key] = read(index)
    return read_before[key]

  return read_once


def check_names(
  present: Collection[str], wanted: Collection[str], *, source: str
) -> None:
  """Raises ValueError, with counts and examples, unless the names agree."""
  missing = sorted(set(wanted) - set(present))
  unexpected = sorted(set(present) - set(wanted))
  parts = []
  if missing:
    parts.append(f'lacks {len(missing)} arrays ({some(missing)})')
  if unexpected:
    parts.append(
      f'has {len(unexpected)} that this network has not ({some(unexpected)})'
    )
  if parts:
    raise ValueError(f'{source} {" and ".join(parts)}{_hint(present)}')


def _hint(present: Collection[str]) -> str:
  """What the names of another layout look like."""
  if any(
    name.startswith(('encoder/encoder/', 'decoder/decoder/'))
    for name in present
  ):
    return (
      '; its layers are stacked (scan_layers of scalable_t5) and have relative '
      'positions of their own, which this network has not'
    )
  return ''


def check_arrays(
  arrays: Mapping[str, Stored], wanted: Mapping[str, Any], *, source: str
) -> None:
  """Raises ValueError, naming the first few, unless the shapes agree."""
  wrong = []
  for name, leaf in wanted.items():
    stored = describe(arrays[name])
    if stored.shape != tuple(leaf.shape):
      wrong.append(
        f'{name} is {list(stored.shape)}, expected {list(leaf.shape)}'
      )
    elif not jnp.issubdtype(leaf.dtype, jnp.floating):
      if stored.dtype != leaf.dtype:
        wrong.append(f'{name} is stored as {stored.dtype}, not {leaf.dtype}')
    elif not jnp.issubdtype(stored.dtype, jnp.floating):
      wrong.append(f'{name} is stored as {stored.dtype}, expected floats')
  if wrong:
    raise ValueError(f'{source} does not fit: {some(wrong, "; ")}')


def some(items: list[str], separator: str = ', ') -> str:
  """The first few, and how many more there are."""
  shown = separator.join(items[:_SHOWN])
  more = len(items) - _SHOWN
  return f'{shown} and {more} more' if more > 0 else shown


def name_of(path: tuple) -> str:
  """A jax key path as keys joined by '/'."""
  return '/'.join(str(getattr(key, 'key', key)) for key in path)


def flatten(tree: Any) -> dict[str, Any]:
  """The leaves of a tree of dicts by name."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {name_of(path): leaf for path, leaf in leaves}


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """A tree of dicts from leaves by name."""
  tree: dict[str, Any] = {}
  for name, leaf in leaves.items():
    *branches, last = name.split('/')
    branch = tree
    for key in branches:
      branch = branch.setdefault(key, {})
    branch[last] = leaf
  return tree


def on_host(tree: Any) -> Any:
  """The arrays of a tree as numpy arrays.

  Raises:
    ValueError: if one lies partly on devices of other processes.
  """
  for name, leaf in flatten(tree).items():
    if not getattr(leaf, 'is_fully_addressable', True):
      raise ValueError(
        f'{name} is spread over several processes; gather it first'
      )
  return jax.tree.map(np.asarray, tree)


def _reason(error: Exception) -> str:
  """The first sentence of a tensorstore error, which may go on for pages."""
  return str(error).split(' [')[0].split('; reading')[0]
