"""Orbax's trees of arrays, and our own checkpoints, which are such trees.

Writing is Orbax's own. Reading goes through tensorstore, so that a process
reads the slices it needs, on whatever topology the tree was written.
"""

import functools
import glob
from pathlib import Path
from typing import Any

from specdec_jax.checkpoints import model_file, stored_arrays
from specdec_jax.checkpoints.stored_arrays import Stored
from specdec_jax.files import full_disk, settings
from specdec_jax.files.require import require
from specdec_jax.files.settings import Json, Settings
from specdec_jax.launch import processes
from specdec_jax.models import quantized
from specdec_jax.models.families import AnyConfig
from specdec_jax.models.products import Weights

import_orbax = functools.partial(
  require, 'orbax.checkpoint', extra='models', purpose='an Orbax checkpoint'
)
_METADATA = '_METADATA'
PARAMS = 'params'


def save(folder: Path, config: AnyConfig, params: Weights) -> None:
  """Writes a model that `restore` reads: the config as JSON, the parameters
  with Orbax, in their dtypes. Creates the folder; several processes write it
  together. All of them raise ValueError if it already holds parameters."""

  def make_empty() -> None:
    if (folder / PARAMS).exists():
      raise ValueError(f'{folder} already holds parameters')
    folder.mkdir(parents=True, exist_ok=True)

  processes.ask_first(make_empty)
  # zarr has no 4-bit dtype: the values are stored as bytes, and compressed.
  params = quantized.in_bytes(params)
  write_tree(folder / PARAMS, params)
  weights = quantized.name_of(params)
  if processes.is_first():
    model_file.write(folder, config, weights)


def is_checkpoint(folder: Path) -> bool:
  """Tells whether a folder is what `save` writes."""
  return (folder / model_file.NAME).is_file() and (folder / PARAMS).is_dir()


def restore(folder: Path, expected: Weights) -> Weights:
  """Reads the parameters that `save` wrote; see `stored_arrays.read_tree`."""
  arrays = open_tree(folder / PARAMS)
  return stored_arrays.read_tree(arrays, expected, source=str(folder))


def write_tree(folder: Path, tree: Weights) -> None:
  """Writes a tree of arrays; the folder appears when it is complete. Raises
  OSError if there is no space for it, and ValueError as `text_of`."""
  checkpointer = import_orbax().PyTreeCheckpointer()
  with full_disk.named(folder, tree):
    checkpointer.save(text_of(folder.absolute()), tree)


def text_of(folder: Path) -> str:
  """Returns a folder's path as text; ValueError if Orbax would expand it."""
  # Orbax would take the path for a pattern, and find other files or none.
  if glob.has_magic(str(folder)):
    raise ValueError(f'{folder}: Orbax reads *, ? and [ as patterns')
  return str(folder)


def open_tree(folder: Path, prefix: str = '') -> dict[str, Stored]:
  """Returns the stored arrays of a tree of Orbax by name, without reading them;
  with a `prefix`, those below it, and their names without it. Raises ValueError
  if the tree was not written to its end, or is damaged."""
  path = folder / _METADATA
  if not path.is_file():
    raise ValueError(f'{folder} has no {_METADATA}: not written to its end')
  metadata = settings.read(path)
  if not metadata.has('tree_metadata'):
    metadata.refuse('tree_metadata', 'the arrays of the tree')
  # Orbax of 2024 does not state it; its reader, too, looks for this file.
  has_manifest = (folder / 'manifest.ocdbt').is_file()
  is_ocdbt = metadata.flag('use_ocdbt', has_manifest)
  # Earlier versions did not state the driver either, which was zarr.
  driver = 'zarr3' if metadata.flag('use_zarr3', False) else 'zarr'
  tree = metadata.at('tree_metadata')
  specs = {}
  for entry in map(tree.at, tree.values):
    keys = _keys(entry)
    name = '/'.join(keys)
    file_name = '.'.join(keys)
    if not name.startswith(prefix):
      continue
    if entry.at('value_metadata').flag('skip_deserialize', False):
      continue  # An empty branch of the tree.
    # OCDBT holds all arrays in one store, by the names of their folders.
    kvstore: Json = stored_arrays.kvstore(folder / file_name)
    if is_ocdbt:
      base = stored_arrays.kvstore(folder)
      kvstore = {'driver': 'ocdbt', 'base': base, 'path': f'{file_name}/'}
    specs[name.removeprefix(prefix)] = {'driver': driver, 'kvstore': kvstore}
  return stored_arrays.open_all(specs, source=str(folder))


def _keys(entry: Settings) -> list[str]:
  """Returns the keys that lead to an entry of a tree; they name its files."""
  keys = entry.values.get('key_metadata')
  names: list[Any] = [
    isinstance(key, dict) and key.get('key')
    for key in (keys if isinstance(keys, list) else [])
  ]
  # `..` would lead to the parent folder; lone surrogates are not printable.
  is_name = lambda name: (
    isinstance(name, str)
    and name.strip('.') != ''
    and '/' not in name
    and name.isprintable()
  )
  if not names or not all(map(is_name, names)):
    raise ValueError(f'{entry.path} is damaged: an array has the keys {names}')
  return names
