"""Trees of arrays on disk, read through tensorstore only as far as needed.

A *stored array* is an open `tensorstore.TensorStore` or a numpy array. Both
have a shape and are sliced alike; the first reads from disk on request.
"""

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array
from specdec_jax.files.paths import is_in_bucket
from specdec_jax.files.require import require
from specdec_jax.models.products import Weights

import_tensorstore = functools.partial(
  require, 'tensorstore', extra='models', purpose='a T5X or Orbax checkpoint'
)
Stored = Any
_SHOWN = 4
_Item = TypeVar('_Item')
_Result = TypeVar('_Result')


def kvstore(folder: Path) -> dict[str, str]:
  """Returns tensorstore's spec of a folder, on a disk or in a bucket."""
  if is_in_bucket(folder):
    # `gs://name/a/b` is the key `a/b` in the bucket `name`.
    bucket, _, key = str(folder).removeprefix('gs://').partition('/')
    return {'driver': 'gcs', 'bucket': bucket, 'path': f'{key}/'}
  return {'driver': 'file', 'path': f'{folder.absolute()}/'}


def open_all(
  specs: Mapping[str, Mapping[str, object]], *, source: str
) -> dict[str, Stored]:
  """Opens arrays, all at once, by name; reads none of their values.

  `source` is what errors call the checkpoint, here and below. ValueError if an
  array is missing or not what its spec says; ImportError without tensorstore.
  """
  # All reads are started before the first is awaited.
  tensorstore = import_tensorstore()
  futures, arrays = {}, {}
  for name, spec in specs.items():
    with _damage(source, name, 'opened'):
      # By default a missing chunk reads as zeros.
      futures[name] = tensorstore.open(
        {**spec, 'fill_missing_data_reads': False}, open=True, read=True
      )
  for name, future in futures.items():
    with _damage(source, name, 'opened'):
      arrays[name] = future.result()
      _check_chunks(arrays[name])
  return arrays


def _check_chunks(store: Stored) -> None:
  """Raises ValueError if a chunk is larger than its array."""
  # A chunk is allocated whole: 4 MB of gzip could take 4 GB.
  shape, chunk = store.shape, store.chunk_layout.read_chunk.shape or ()
  if any(c > max(1, s) for c, s in zip(chunk, shape, strict=True)):
    sizes = ('x'.join(map(str, each)) for each in (chunk, shape))
    raise ValueError('its chunks are {}, it is {}'.format(*sizes))


@contextlib.contextmanager
def _damage(source: str, name: str, action: str) -> Iterator[None]:
  """Adds the array and the checkpoint to what tensorstore raises: OSError if
  a bucket did not answer or refused, which says nothing of the checkpoint."""
  try:
    yield
  except Exception as error:
    # The first sentence, without sources in brackets, of what can be pages.
    reason = str(error).split(' [')[0].split('; reading')[0]
    if is_in_bucket(source):
      from specdec_jax.files import buckets

      if found := buckets.refusal(error, source):
        raise found from error
    if not isinstance(error, ValueError):
      raise
    raise ValueError(
      f'{source} is incomplete or damaged: array {name} cannot be {action} '
      f'({reason})'
    ) from error


def describe(stored: Stored) -> jax.ShapeDtypeStruct:
  """Returns shape and dtype of a stored array."""
  dtype = getattr(stored.dtype, 'numpy_dtype', stored.dtype)
  return jax.ShapeDtypeStruct(stored.shape, dtype)


def read_tree(
  arrays: Mapping[str, Stored], expected: Weights, *, source: str
) -> Weights:
  """Reads the arrays that a tree expects, and casts them slice by slice.

  Args:
    arrays: stored arrays by name, keys joined by '/'.
    expected: a tree of dicts of `jax.ShapeDtypeStruct`. Where a leaf has a
      sharding, this process reads the slices of its own devices, each once, and
      no others. Floats are read of any width, integers of their own.
    source: see `open_all`.

  Raises:
    ValueError: if arrays are not those expected, or cannot be read.
  """
  # Before anything is read.
  wanted = flatten(expected)
  check(arrays, wanted, source)

  def read(name: str) -> Array:
    with _damage(source, name, 'read'):
      return _read(arrays[name], wanted[name])

  found = in_threads(read, wanted)
  return jax.tree.unflatten(jax.tree.structure(expected), found)


def in_threads(
  function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> list[_Result]:
  """Calls the function for all items, by a few threads; keeps their order."""
  # A thread does not inherit the caller's default device.
  device = getattr(jax.config, 'jax_default_device', None)

  def call(item: _Item) -> _Result:
    with jax.default_device(device):
      return function(item)

  # Reading waits for disks, and casting leaves Python's lock.
  num_threads = min(8, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    return list(pool.map(call, items))


def _read(stored: Stored, leaf: jax.ShapeDtypeStruct) -> Array:
  """Reads one array, or this process's slices of it, each once."""
  # Devices with copies of a slice ask for it one after the other.
  shape = tuple(stored.shape)
  read_before: dict[tuple, np.ndarray] = {}

  def read_once(index: Any) -> np.ndarray:
    # Slices are unhashable before Python 3.12.
    key = tuple(s.indices(n) for s, n in zip(index, shape, strict=True))
    if key not in read_before:
      part = _values(stored[index])
      values = np.ascontiguousarray(part, leaf.dtype)
      read_before[key] = values.reshape(part.shape)
    return read_before[key]

  sharding = getattr(leaf, 'sharding', None)
  if sharding is None:
    return jax.device_put(read_once((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, sharding, read_once)


def _values(stored: Stored) -> np.ndarray:
  is_numpy = isinstance(stored, np.ndarray | np.generic)
  return np.asarray(stored) if is_numpy else stored.read().result()


def whole_number(stored: Stored, *, source: str, name: str) -> int:
  """Returns the value of a stored scalar, which the errors call `name`; raises
  ValueError if it is no whole number, or cannot be read."""
  found = describe(stored)
  if found.shape or not np.issubdtype(found.dtype, np.integer):
    raise ValueError(f'{source}: {name} is {found}, expected a whole number')
  with _damage(source, name, 'read'):
    return int(_values(stored))


def check_names(
  present: set[str],
  wanted: set[str],
  source: str | Path,
  *,
  is_all: bool = True,
) -> None:
  """Raises ValueError, with counts and examples, unless all names that are
  wanted are present, and with `is_all` no others."""
  # `lacks 2 arrays (a, b) and has 1 that this network has not (c)`.
  missing, unexpected = sorted(wanted - present), sorted(present - wanted)
  parts = []
  if missing:
    parts.append(f'lacks {len(missing)} arrays ({some(missing)})')
  if unexpected and is_all:
    parts.append(
      f'has {len(unexpected)} that this network has not ({some(unexpected)})'
    )
  if parts:
    raise ValueError(f'{source} {" and ".join(parts)}')


def check(
  found: Mapping[str, Any], wanted: Mapping[str, Any], source: str | Path
) -> None:
  """Raises ValueError, naming the first few, unless arrays, which need only
  have a shape and a dtype, are those wanted: by name, then shape and type."""
  check_names(set(found), set(wanted), source)
  # Integers must have the stored type; floats of any width are cast.
  wrong = []
  for name, leaf in wanted.items():
    stored = describe(found[name])
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
  """Returns the first few, and how many more there are."""
  shown = separator.join(items[:_SHOWN])
  more = len(items) - _SHOWN
  return f'{shown} and {more} more' if more > 0 else shown


def flatten(tree: Weights) -> Weights:
  """Returns the leaves of a tree by name, their keys joined by '/'."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree.leaves_with_path(tree)
  }
