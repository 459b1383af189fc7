"""Trees of arrays on disk, of which tensorstore reads only what is needed.

A *stored array* is an open `tensorstore.TensorStore` or a numpy array. Both
have a shape and can be sliced; the first reads from disk on request.
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
  """Returns tensorstore's kvstore spec of a folder, on disk or in a bucket."""
  if is_in_bucket(folder):
    # `gs://name/a/b` is the key `a/b` in the bucket `name`.
    bucket, _, key = str(folder).removeprefix('gs://').partition('/')
    return {'driver': 'gcs', 'bucket': bucket, 'path': f'{key}/'}
  return {'driver': 'file', 'path': f'{folder.absolute()}/'}


def open_all(
  specs: Mapping[str, Mapping[str, object]], *, source: str
) -> dict[str, Stored]:
  """Opens arrays by name, concurrently, without reading their values.

  `source` is the checkpoint's name in messages, here and below. Raises
  ValueError if an array is missing or does not fit its spec, and ImportError
  without tensorstore.
  """
  # Start to open all arrays before waiting for the first.
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
  shape = store.shape
  chunk = store.chunk_layout.read_chunk.shape or ()
  if any(c > max(1, s) for c, s in zip(chunk, shape, strict=True)):
    chunk_text = 'x'.join(map(str, chunk))
    shape_text = 'x'.join(map(str, shape))
    raise ValueError(f'its chunks are {chunk_text}, it is {shape_text}')


@contextlib.contextmanager
def _damage(source: str, name: str, action: str) -> Iterator[None]:
  """Adds the names of array and checkpoint to tensorstore's errors: OSError if
  a bucket did not answer or refused, as the checkpoint may then be complete."""
  try:
    yield
  except Exception as error:
    # tensorstore's messages can fill pages: the first sentence, without the
    # locations in its source code, which are in brackets.
    reason = str(error).split(' [')[0].split('; reading')[0]
    if is_in_bucket(source):
      from specdec_jax.files import buckets

      refusal = buckets.refusal(error, source)
      if refusal:
        raise refusal from error
    if not isinstance(error, ValueError):
      raise
    raise ValueError(
      f'{source} is incomplete or damaged: array {name} cannot be {action} '
      f'({reason})'
    ) from error


def describe(stored: Stored) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of a stored array."""
  dtype = getattr(stored.dtype, 'numpy_dtype', stored.dtype)
  return jax.ShapeDtypeStruct(stored.shape, dtype)


def read_tree(
  arrays: Mapping[str, Stored], expected: Weights, *, source: str
) -> Weights:
  """Reads the arrays of a tree, and casts them slice by slice.

  Args:
    arrays: stored arrays by name, keys joined by '/'.
    expected: nested dicts of `jax.ShapeDtypeStruct`. Of a leaf with a sharding,
      this process reads only the slices of its devices, once each. Floats of
      any width are cast; integers must have the stored dtype.
    source: see `open_all`.

  Raises:
    ValueError: if arrays are not those expected, or cannot be read.
  """
  # Check names and shapes before anything is read.
  wanted = flatten(expected)
  check(arrays, wanted, source)

  def read(name: str) -> Array:
    with _damage(source, name, 'read'):
      return _read(arrays[name], wanted[name])

  leaves = in_threads(read, wanted)
  return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def in_threads(
  function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> list[_Result]:
  """Returns the function's results for all items, in order, computed by a few
  threads."""
  # A thread does not inherit the caller's default device.
  device = getattr(jax.config, 'jax_default_device', None)

  def call(item: _Item) -> _Result:
    with jax.default_device(device):
      return function(item)

  # Threads help: reading waits for the disk, and casting releases the GIL.
  num_threads = min(8, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    return list(pool.map(call, items))


def _read(stored: Stored, leaf: jax.ShapeDtypeStruct) -> Array:
  """Reads one array, or this process's slices of it, once each."""
  # jax asks for a slice once per device; replicas of it are read once.
  shape = tuple(stored.shape)
  slices: dict[tuple, np.ndarray] = {}

  def read_once(index: Any) -> np.ndarray:
    # Slices are unhashable before Python 3.12.
    key = tuple(s.indices(n) for s, n in zip(index, shape, strict=True))
    if key not in slices:
      part = _values(stored[index])
      values = np.ascontiguousarray(part, leaf.dtype)
      slices[key] = values.reshape(part.shape)
    return slices[key]

  sharding = getattr(leaf, 'sharding', None)
  if sharding is None:
    return jax.device_put(read_once((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, sharding, read_once)


def _values(stored: Stored) -> np.ndarray:
  is_numpy = isinstance(stored, np.ndarray | np.generic)
  return np.asarray(stored) if is_numpy else stored.read().result()


def read_integer(stored: Stored, *, source: str, name: str) -> int:
  """Returns the value of a stored integer; `name` is for messages. Raises
  ValueError if it is not an integer scalar, or cannot be read."""
  description = describe(stored)
  if description.shape or not np.issubdtype(description.dtype, np.integer):
    raise ValueError(f'{source}: {name} is {description}, expected an integer')
  with _damage(source, name, 'read'):
    return int(_values(stored))


def check_names(
  present: set[str],
  wanted: set[str],
  source: str | Path,
  *,
  is_all: bool = True,
) -> None:
  """Raises ValueError, with counts and examples, if a wanted name is missing
  or, with `is_all`, an unexpected one is present."""
  # `lacks 2 arrays (a, b) and has 1 unexpected ones (c)`.
  missing, unexpected = sorted(wanted - present), sorted(present - wanted)
  parts = []
  if missing:
    parts.append(f'lacks {len(missing)} arrays ({some(missing)})')
  if unexpected and is_all:
    parts.append(f'has {len(unexpected)} unexpected ones ({some(unexpected)})')
  if parts:
    raise ValueError(f'{source} {" and ".join(parts)}')


def check(
  arrays: Mapping[str, Any], wanted: Mapping[str, Any], source: str | Path
) -> None:
  """Raises ValueError, with the first few differences, unless the arrays have
  the names, shapes and dtypes of `wanted`. The values of both mappings need
  only have a shape and a dtype."""
  check_names(set(arrays), set(wanted), source)
  # Integers must have the stored type; floats of any width are cast.
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
  """Joins the first few items, and adds how many more there are."""
  shown = separator.join(items[:_SHOWN])
  more = len(items) - _SHOWN
  return f'{shown} and {more} more' if more > 0 else shown


def flatten(tree: Weights) -> Weights:
  """Returns the leaves of a tree by name, their keys joined by '/'."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree.leaves_with_path(tree)
  }
