"""Tensors in a folder's safetensors files, as Hugging Face lays them out."""

import functools
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import stored_arrays
from specdec_jax.checkpoints.parameters import (
  Parameter,
  is_all_finite,
  read_all,
)
from specdec_jax.files import replacing, settings
from specdec_jax.files.paths import is_in_bucket, mapped
from specdec_jax.files.require import require
from specdec_jax.models import families, quantized
from specdec_jax.models.families import AnyConfig
from specdec_jax.models.products import Weights

SINGLE_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
_ADAPTER = 'adapter_config.json'
# The dtypes that are read. torch writes token ids as int64; they are narrowed.
_DTYPES = {
  'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': jnp.bfloat16,
  'I64': np.int32, 'I32': np.int32, 'I8': np.int8,
}  # fmt: skip
# The limit of safetensors itself.
_MAX_HEADER = 10**8
# Advice for a model whose output weights are not tied to its embeddings.
UNTIE = (
  '; if the output weights are not tied to the embeddings, config.json needs '
  '"tie_word_embeddings": false'
)
_import_safetensors = functools.partial(
  require, 'safetensors', extra='models', purpose='a safetensors file'
)


class TensorFile(Protocol):
  """The methods of `safetensors.safe_open` that are used."""

  def keys(self) -> Iterable[str]: ...

  def get_slice(self, name: str) -> Any: ...

  def get_tensor(self, name: str) -> np.ndarray: ...


class RemoteFile:
  """A `TensorFile` in a bucket: reads the header, and then only the requested
  tensors. Raises SafetensorError if it is damaged."""

  def __init__(self, path: Path):
    # The length of the header, 8 bytes; the header, JSON; the tensors.
    self._data = mapped(path)
    length = int.from_bytes(bytes(self._data[:8]), 'little')
    self._begin = 8 + min(length, _MAX_HEADER)
    head = bytes(self._data[: self._begin])
    # safetensors checks the header, in a sparse file of the same length.
    with tempfile.NamedTemporaryFile() as file:
      file.write(head)
      file.truncate(self._data.size)
      opened = _import_safetensors().safe_open(file.name, framework='np')
    self.keys, self.get_slice = opened.keys, opened.get_slice
    self._entries = json.loads(head[8:])

  def get_tensor(self, name: str) -> np.ndarray:
    tensor = self.get_slice(name)
    shape = tensor.get_shape()
    # Reads no values, only their dtype.
    dtype = tensor[:0].dtype if shape else tensor[...].dtype
    start, stop = self._entries[name]['data_offsets']
    values = self._data[self._begin + start : self._begin + stop]
    return values.view(dtype).reshape(shape)


# The open file that has each tensor, by name.
Tensors = dict[str, TensorFile]
# The tensors that a network needs, and its parameters, by the file's names.
Needed = tuple[Tensors, tuple[Parameter, ...]]


def open_tensors(folder: Path, config: AnyConfig | None = None) -> Tensors:
  """Returns the open file of every tensor name.

  Raises ValueError if a file or a tensor of the index is missing, a file is
  truncated, or there are fewer tensors than the layers that `config` states.
  """
  safetensors = _import_safetensors()
  handles: Tensors = {}
  for file_name, names in _names_of_file(folder).items():
    path = folder / file_name
    # Unlike Path.is_file, it accepts names that no file can have.
    if not (path.is_file() if is_in_bucket(path) else os.path.isfile(path)):
      raise ValueError(f'{folder} lacks {file_name}, which {INDEX_FILE} names')
    try:
      if is_in_bucket(path):
        handle: TensorFile = RemoteFile(path)
      else:
        handle = safetensors.safe_open(path, framework='np')
    except (safetensors.SafetensorError, ValueError, OSError) as error:
      if is_in_bucket(path) and isinstance(error, OSError):
        raise  # The bucket did not answer: the file may be complete.
      raise ValueError(f'{path} is incomplete or damaged: {error}') from error
    # The index may not match the files.
    present = set(handle.keys())
    stored_arrays.check_names(present, {*names} or present, path, is_all=False)
    handles.update(dict.fromkeys(names or present, handle))
  # Checked before parameters are listed: a file may state a thousand layers.
  num_layers = sum(families.num_layers(config)) if config else 0
  if num_layers > len(handles):
    raise ValueError(
      f'{folder} has {len(handles)} tensors, too few for {num_layers} layers'
    )
  return handles


def refuse_adapter(folder: Path) -> None:
  """Raises ValueError if a folder without a model has one of PEFT's adapters,
  such as LoRA's."""
  path = folder / _ADAPTER
  if not path.is_file():
    return
  key = 'base_model_name_or_path'
  base = settings.read(path).text(key, 'its base model')
  raise ValueError(
    f'{folder} has an adapter ({_ADAPTER}) and no model: merge it into '
    f'{base!r} with merge_and_unload() of peft, and save that'
  )


def _names_of_file(folder: Path) -> dict[str, list[str]]:
  """Reads which tensors each file has; an empty list stands for all."""
  if (folder / SINGLE_FILE).is_file():
    return {SINGLE_FILE: []}
  index_path = folder / INDEX_FILE
  if not index_path.is_file():
    refuse_adapter(folder)
    raise ValueError(
      f'{folder} has no weights: expected {SINGLE_FILE} or {INDEX_FILE}; '
      'convert a pytorch_model.bin with safetensors.torch.save_file'
    )
  index = settings.read(index_path)
  if not index.has('weight_map'):
    index.refuse('weight_map', 'an object of file names')
  weight_map = index.at('weight_map')
  # From {tensor: file} to {file: [tensors]}.
  names_of_file: dict[str, list[str]] = {}
  for name in weight_map.values:
    file_name = weight_map.text(name)
    file_path = PurePath(file_name)
    if file_path.is_absolute() or '..' in file_path.parts:
      weight_map.refuse(name, 'a file in this folder')
    names_of_file.setdefault(file_name, []).append(name)
  return names_of_file


def read_params(
  folder: Path,
  handles: Tensors,
  parameters: Sequence[Parameter],
  *,
  dtype: jnp.dtype,
) -> Weights:
  """Returns all parameters of a network as our tree, in `dtype`.

  `handles` come from `open_tensors`, without the tensors that the network does
  not need; `folder` is for messages. Raises ValueError if a tensor is missing,
  unexpected, of another shape or dtype, or not finite.
  """
  shapes = {}
  for name, handle in handles.items():
    stored = handle.get_slice(name)
    stored_dtype = stored.get_dtype()
    if stored_dtype not in _DTYPES:
      raise ValueError(
        f'{folder}: {name} is stored as {stored_dtype}, which is not supported'
      )
    shapes[name] = jax.ShapeDtypeStruct(
      stored.get_shape(), _DTYPES[stored_dtype]
    )
  wanted = {name: p.in_file for p in parameters for name in p.names}
  stored_arrays.check(shapes, wanted, folder)

  def read(parameter: Parameter, name: str) -> np.ndarray:
    values: np.ndarray = handles[name].get_tensor(name)
    if np.issubdtype(values.dtype, np.integer):
      narrow = values.astype(parameter.dtype)
      if not np.array_equal(narrow, values):
        raise ValueError(f'{folder}: tensor {name} holds more than 32 bits')
      return narrow
    values = values.astype(np.float32, copy=False)
    if not is_all_finite(values):
      raise ValueError(f'{folder}: tensor {name} holds a NaN or an infinity')
    return values

  return read_all(read, parameters, dtype)


def without_copy(
  folder: Path, handles: Tensors, name: str, *, of: str, remedy: str = ''
) -> Tensors:
  """Drops the tensor `name`, a copy of the tied embeddings `of`, which some
  folders contain; ValueError, ending with `remedy`, if the two differ."""
  remaining = dict(handles)
  copy = remaining.pop(name, None)
  # A missing embedding is reported when it is read.
  if copy is None or of not in remaining:
    return remaining
  embeddings = remaining[of].get_tensor(of)
  if not np.array_equal(embeddings, copy.get_tensor(name)):
    raise ValueError(
      f'{folder}: {name} differs from {of}, and they are tied{remedy}'
    )
  return remaining


def write_params(
  folder: Path, params: Weights, parameters: Sequence[Parameter]
) -> str:
  """Writes our tree as model.safetensors, in its dtypes, creating the folder;
  returns the name of the dtype. Raises ValueError if a parameter is missing, of
  another shape, or quantized where the format stores floats."""
  safetensors_numpy = require(
    'safetensors.numpy', extra='models', purpose='a safetensors file'
  )
  leaves = stored_arrays.flatten(params)
  tensors = {}
  for parameter in parameters:
    if parameter.path not in leaves:
      raise ValueError(f'the parameters have no {parameter.path}')
    values = np.asarray(leaves[parameter.path])
    if quantized.is_packed(values) and parameter.dtype != np.int8:
      raise ValueError(
        f'{parameter.path} is quantized, and this format cannot store scales: '
        'write orbax or safetensors'
      )
    if values.shape != parameter.shape:
      raise ValueError(
        f'{parameter.path} is {list(values.shape)}, expected '
        f'{list(parameter.shape)}'
      )
    # safetensors writes an array's memory, whatever its strides.
    for name, tensor in zip(
      parameter.names, parameter.to_tensors(values), strict=True
    ):
      tensors[name] = np.ascontiguousarray(tensor)
  folder.mkdir(parents=True, exist_ok=True)
  with replacing.file(folder / SINGLE_FILE) as path:
    safetensors_numpy.save_file(tensors, path, metadata={'format': 'pt'})
  floats = (p.names[0] for p in parameters if p.dtype is None)
  return tensors[next(floats)].dtype.name
