"""T5X's own format: a msgpack file of tensorstore specs, a zarr an array.

`checkpoint` holds `{'version': 3, 'optimizer': {'target': params, 'state':
{'step', 'param_states'}}}` as flax's msgpack. A leaf is an array, or the spec
of one, which lies in a folder named after it with dots for slashes.
"""

from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.checkpoints import stored_arrays
from specdec_jax.checkpoints.stored_arrays import Stored

FILE = 'checkpoint'
_VERSION = 3
_CHUNK_ELEMENTS = 2**22


def read_index(folder: Path) -> dict[str, Any]:
  """The tree `{'state', 'target'}` of a checkpoint, with specs for arrays.

  Raises:
    ValueError: if the file is truncated, no T5X checkpoint, or of another
      version.
  """
  import msgpack
  from flax import serialization

  path = folder / FILE
  try:
    contents = serialization.msgpack_restore(path.read_bytes())
  except (ValueError, msgpack.UnpackException) as error:
    raise ValueError(
      f'{path} is truncated or no T5X checkpoint ({type(error).__name__})'
    ) from error
  if not isinstance(contents, dict) or not isinstance(
    contents.get('optimizer'), dict
  ):
    raise ValueError(f'{path} is no T5X checkpoint: it has no optimizer')
  version = contents.get('version', 0)
  if version != _VERSION:
    raise ValueError(
      f'{path} is of version {version}, which stores bfloat16 in another way; '
      f'expected {_VERSION}: restore and save it with a newer T5X'
    )
  return contents['optimizer']


def open_target(folder: Path) -> dict[str, Stored]:
  """The stored parameters of a checkpoint by name.

  Specs of other places, such as a bucket, are read from `folder`: T5X writes
  paths that are relative to it.
  """
  target = read_index(folder).get('target')
  if not isinstance(target, dict):
    raise ValueError(f'{folder / FILE} holds no parameters')
  arrays: dict[str, Stored] = {}
  specs = {}
  for name, leaf in _leaves(target).items():
    if isinstance(leaf, dict):
      specs[name] = _local_spec(folder, name, leaf)
    else:
      arrays[name] = np.asarray(leaf)
  return arrays | stored_arrays.open_all(specs, source=str(folder))


def _leaves(tree: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """Arrays and specs by name."""
  leaves: dict[str, Any] = {}
  for key, value in tree.items():
    is_spec = isinstance(value, dict) and isinstance(value.get('driver'), str)
    if isinstance(value, dict) and not is_spec:
      leaves |= _leaves(value, f'{prefix}{key}/')
    else:
      leaves[f'{prefix}{key}'] = value
  return leaves


def _local_spec(folder: Path, name: str, spec: dict[str, Any]) -> dict:
  """A written spec as one of a local zarr, with what must hold of it.

  tensorstore before 0.1.14 had the path beside the kvstore instead of in it.
  """
  kvstore = spec.get('kvstore')
  if spec['driver'] != 'zarr' or not isinstance(kvstore, dict):
    raise ValueError(f'{folder}: array {name} is no zarr: {spec}')
  path = str(kvstore.get('path', spec.get('path', ''))).strip('/')
  if not path or '..' in Path(path).parts:
    raise ValueError(f'{folder}: array {name} has no valid path: {path!r}')
  local: dict[str, Any] = {'driver': 'zarr', 'kvstore': _kvstore(folder / path)}
  if shape := spec.get('metadata', {}).get('shape'):
    local['metadata'] = {'shape': [int(size) for size in shape]}
  return local


def _kvstore(folder: Path) -> dict[str, str]:
  return {'driver': 'file', 'path': f'{folder.absolute()}/'}


def write(folder: Path, params: Any, *, step: int) -> None:
  """Writes a checkpoint into a folder, its index last.

  Args:
    folder: exists.
    params: a tree of dicts of numpy arrays.
    step: training steps taken.
  """
  from flax import serialization

  tensorstore = stored_arrays.import_tensorstore()
  specs = {}
  pending = []
  for name, values in stored_arrays.flatten(params).items():
    path = f'target.{name.replace("/", ".")}/'
    spec = {
      'driver': 'zarr',
      'dtype': values.dtype.name,
      'kvstore': {'driver': 'file', 'path': path},
      'metadata': {
        'chunks': chunk_shape(values.shape),
        'compressor': {'id': 'gzip', 'level': 1},
        'shape': list(values.shape),
      },
    }
    store = tensorstore.open(
      {**spec, 'kvstore': _kvstore(folder / path)}, create=True
    ).result()
    pending.append(store.write(values))
    specs[name] = spec
  for future in pending:
    future.result()
  # Keys in the order in which T5X writes them.
  contents = {
    'optimizer': {
      'state': {'param_states': {}, 'step': np.int32(step)},
      'target': stored_arrays.nest(dict(sorted(specs.items()))),
    },
    'version': _VERSION,
  }
  (folder / FILE).write_bytes(serialization.msgpack_serialize(contents))


def chunk_shape(shape: tuple[int, ...]) -> list[int]:
  """Chunks of at most 4 Mi elements: the largest axis is halved until then, so
  that a process which needs a slice decompresses little else."""
  chunks = list(shape)
  while np.prod(chunks, dtype=np.int64) > _CHUNK_ELEMENTS:
    axis = int(np.argmax(chunks))
    chunks[axis] = -(-chunks[axis] // 2)
  return chunks
