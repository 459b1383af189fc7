"""T5X's own format: a msgpack file of tensorstore specs, one zarr per array.

`checkpoint` holds `{'version': 3, 'optimizer': {'target': params, 'state':
{'step', 'param_states'}}}` as flax's msgpack. A leaf is an array or the spec of
one, stored in a folder with the array's name, dots replacing slashes.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization, traverse_util

from specdec_jax.checkpoints import stored_arrays
from specdec_jax.checkpoints.stored_arrays import Stored
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models.products import Weights

FILE = 'checkpoint'
_VERSION = 3
_CHUNK_ELEMENTS = 2**22


def _read_index(folder: Path) -> Settings:
  """Reads the trees `state` and `target`, with specs in place of arrays."""
  path = folder / FILE
  packed = path.read_bytes()
  try:
    contents = serialization.msgpack_restore(packed)
  except Exception as error:  # flax and numpy raise many types.
    raise ValueError(
      f'{path} is truncated or no T5X checkpoint: {error!r}'
    ) from error
  if not isinstance(contents, dict):
    raise ValueError(f'{path} is no T5X checkpoint: it holds no names')
  index = Settings(path=str(path), values=contents)
  if index.count('version', 0, least=0) != _VERSION:
    index.refuse('version', str(_VERSION))
  # T5X calls all of it the optimizer, and the parameters its target.
  return index.at('optimizer')


def open_step(folder: Path) -> Stored | None:
  """Reads the number of training steps, None if the checkpoint lacks it; raises
  ValueError if the file is damaged, or the value is not a number."""
  state = _read_index(folder).at('state')
  step = state.values.get('step')
  if not isinstance(step, int | np.ndarray | np.generic | None):
    state.refuse('step', 'an integer')
  return None if step is None else np.asarray(step)


def open_target(folder: Path) -> dict[str, Stored]:
  """Returns the stored parameters of a checkpoint by name.

  Paths in specs are relative to `folder`, also of a checkpoint that was copied
  from a bucket. Raises ValueError if the file is damaged, or a parameter is
  neither an array nor the spec of one in this folder.
  """
  target = _read_index(folder).at('target')
  leaves = dataclasses.replace(target, values=_leaves(target.values))
  arrays, specs = {}, {}
  for name, leaf in leaves.values.items():
    if isinstance(leaf, np.ndarray):
      arrays[name] = leaf
    else:
      specs[name] = _local_spec(folder, leaves.at(name))
  return arrays | stored_arrays.open_all(specs, source=str(folder))


def _leaves(tree: Mapping[str, Any]) -> Json:
  """Returns arrays and specs by name."""
  # A spec is a dictionary as well, but it names a driver.
  is_spec = lambda path, value: isinstance(value.get('driver'), str)
  by_path = traverse_util.flatten_dict(tree, is_leaf=is_spec)
  return {'/'.join(map(str, path)): leaf for path, leaf in by_path.items()}


def _local_spec(folder: Path, spec: Settings) -> Json:
  """Checks a stored spec, and returns one of the zarr in this folder."""
  spec.expect('driver', 'zarr')
  kvstore = spec.at('kvstore')
  metadata = spec.at('metadata')
  # tensorstore before 0.1.14 had the path beside the kvstore.
  location = kvstore if kvstore.has('path') else spec
  path = location.text('path').strip('/')
  # Nothing outside of the checkpoint's folder is opened.
  if Path(path) == Path() or '..' in Path(path).parts:
    location.refuse('path', 'a folder beside this file')
  local: Json = {
    'driver': 'zarr',
    'kvstore': stored_arrays.kvstore(folder / path),
  }
  if metadata.has('shape'):
    local['metadata'] = {'shape': metadata.counts('shape')}
  return local


def write(folder: Path, params: Weights, *, step: int) -> None:
  """Writes numpy arrays into an existing folder, and then the index."""
  tensorstore = stored_arrays.import_tensorstore()
  specs, pending = {}, []
  # Arrays are written concurrently, and the index after all of them.
  for name, values in stored_arrays.flatten(params).items():
    path = f'target.{name.replace("/", ".")}/'
    specs[name] = {
      'driver': 'zarr',
      'dtype': values.dtype.name,
      'kvstore': {'driver': 'file', 'path': path},
      'metadata': {
        'chunks': chunk_shape(values.shape),
        'compressor': {'id': 'gzip', 'level': 1},
        'shape': list(values.shape),
      },
    }
    kvstore = stored_arrays.kvstore(folder / path)
    store = tensorstore.open({**specs[name], 'kvstore': kvstore}, create=True)
    pending.append(store.result().write(values))
  for future in pending:
    future.result()
  # Keys in the order in which T5X writes them.
  target = traverse_util.unflatten_dict(dict(sorted(specs.items())), sep='/')
  state = {'param_states': {}, 'step': np.int32(step)}
  contents = {
    'optimizer': {'state': state, 'target': target},
    'version': _VERSION,
  }
  (folder / FILE).write_bytes(serialization.msgpack_serialize(contents))


def chunk_shape(shape: tuple[int, ...]) -> list[int]:
  """Halves the largest axis until a chunk has at most 4 Mi elements."""
  # A process that needs a slice then decompresses little else. [32128, 512] has
  # 16 Mi elements: its chunks are [16064, 512], and then [8032, 512].
  chunks = list(shape)
  while np.prod(chunks, dtype=np.int64) > _CHUNK_ELEMENTS:
    axis = int(np.argmax(chunks))
    chunks[axis] = -(-chunks[axis] // 2)
  return chunks
