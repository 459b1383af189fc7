"""The GGUF container: metadata, and tensors by name.

Reads the header in one pass, where the `gguf` package makes an array of every
string, takes seconds over a vocabulary and raises anything of a damaged file;
the arithmetic of the quantised formats is left to that package. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import functools
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specdec_jax.checkpoints import parameters
from specdec_jax.checkpoints.settings import Json
from specdec_jax.files import require as packages
from specdec_jax.files.paths import mapped

if TYPE_CHECKING:
  from specdec_jax.files.buckets import Ranges

_MAGIC = b'GGUF'
_VERSIONS = (2, 3)
_MAX_AXES = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
  0: '<u1', 1: '<i1', 2: '<u2', 3: '<i2', 4: '<u4', 5: '<i4', 6: '<f4',
  7: '?', 10: '<u8', 11: '<i8', 12: '<f8',
}  # fmt: skip
_import_gguf = functools.partial(
  packages.require, 'gguf', extra='models', purpose='a GGUF file'
)
# So many blocks are dequantised at a time: temporaries stay in the CPU's cache.
_BLOCKS_AT_A_TIME = 2048
# So much of an object in a bucket is read first, for its header.
_FIRST_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where a tensor lies: its shape, slowest axis first; how it is quantised, a
  `gguf.GGMLQuantizationType`; its offset in bytes from the file's start."""

  shape: tuple[int, ...]
  type_id: int
  offset: int
  dtype: ClassVar = np.float32  # Of what `read_tensor` returns.


@dataclasses.dataclass(frozen=True)
class GgufFile:
  """An open GGUF file: strings, numbers, lists of strings and arrays of numbers
  by key; tensors by name; and its bytes, of `paths.mapped`."""

  path: str
  metadata: Json
  tensors: dict[str, TensorInfo]
  data: 'np.ndarray | Ranges'


class _Cursor:
  """Reads little-endian values one after another."""

  def __init__(self, data: np.ndarray, offset: int):
    self.view = memoryview(data)
    self.offset = offset

  def take(self, num_bytes: int) -> memoryview:
    end = self.offset + num_bytes
    if end > len(self.view):
      raise EOFError(f'its header needs more than {len(self.view)} bytes')
    start, self.offset = self.offset, end
    return self.view[start:end]

  def number(self, code: str) -> int:
    return struct.unpack('<' + code, self.take(struct.calcsize(code)))[0]

  def string(self) -> str:
    return str(self.take(self.number('Q')), 'utf-8')

  def value(self, type_id: int) -> Any:
    if type_id == _STRING:
      return self.string()
    if type_id in _SCALARS:
      return self.scalars(type_id, 1)[0].item()
    if type_id != _ARRAY:
      raise ValueError(f'it has metadata of the unknown type {type_id}')
    item_type, length = self.number('I'), self.number('Q')
    if item_type in _SCALARS:
      return self.scalars(item_type, length)
    if item_type == _ARRAY:
      raise ValueError('it has metadata with an array of arrays')
    return [self.value(item_type) for _ in range(length)]

  def scalars(self, type_id: int, length: int) -> np.ndarray:
    # A view of the file: Python's objects would take up to 36 times the memory.
    dtype = np.dtype(_SCALARS[type_id])
    return np.frombuffer(self.take(length * dtype.itemsize), dtype)


def open_gguf(path: Path) -> GgufFile:
  """Maps a GGUF file and reads its header; raises ValueError if it is no GGUF
  file, of another version, or truncated, OSError if it cannot be opened."""
  data = mapped(path)
  magic = bytes(data[: len(_MAGIC)])
  if magic != _MAGIC:
    raise ValueError(f'{path} is not a GGUF file: it starts with {magic!r}')
  try:
    metadata, tensors = _read_header(data)
    for name, info in tensors.items():
      _, block_size, block_bytes = _blocks(name, info)
      end = info.offset + math.prod(info.shape) // block_size * block_bytes
      if end > data.size:
        raise EOFError(f'tensor {name} ends at byte {end} of {data.size}')
  except EOFError as error:
    raise ValueError(f'{path} is truncated: {error}') from error
  except ValueError as error:
    raise ValueError(f'{path} cannot be read: {error}') from error
  return GgufFile(str(path), metadata, tensors, data)


def _read_header(
  data: 'np.ndarray | Ranges',
) -> tuple[Json, dict[str, TensorInfo]]:
  """Reads the metadata, and where tensors lie."""
  # The header does not state its length: from a bucket, ever more is read.
  num_bytes = data.size if isinstance(data, np.ndarray) else _FIRST_BYTES
  while True:
    try:
      return _parse_header(_Cursor(data[:num_bytes], len(_MAGIC)))
    except EOFError:
      if num_bytes >= data.size:
        raise
      num_bytes *= 4


def _parse_header(cursor: _Cursor) -> tuple[Json, dict[str, TensorInfo]]:
  version = cursor.number('I')
  if version not in _VERSIONS:
    raise ValueError(
      f'it is of version {version} (or big-endian), expected one of {_VERSIONS}'
    )
  num_tensors, num_keys = cursor.number('Q'), cursor.number('Q')
  metadata: Json = {}
  for _ in range(num_keys):
    key = cursor.string()
    if key in metadata:
      raise ValueError(f'metadata {key} occurs twice')
    metadata[key] = cursor.value(cursor.number('I'))
  tensors: dict[str, TensorInfo] = {}
  for _ in range(num_tensors):
    name, num_axes = cursor.string(), cursor.number('I')
    if name in tensors or not 1 <= num_axes <= _MAX_AXES:
      raise ValueError(f'tensor {name} occurs twice or has {num_axes} axes')
    # ggml counts axes from the fastest: [in, out] is our [out, in].
    fastest_first = [cursor.number('Q') for _ in range(num_axes)]
    type_id, offset = cursor.number('I'), cursor.number('Q')
    tensors[name] = TensorInfo(tuple(fastest_first[::-1]), type_id, offset)
  alignment = metadata.get('general.alignment', 32)
  if not isinstance(alignment, int) or alignment < 1:
    raise ValueError(f'general.alignment is {alignment!r}')
  # Tensors begin at the next multiple of the alignment, and their offsets count
  # from there: a header of 100 bytes and 32 give 128.
  start = -(-cursor.offset // alignment) * alignment
  return metadata, {
    name: dataclasses.replace(info, offset=start + info.offset)
    for name, info in tensors.items()
  }


def _blocks(name: str, info: TensorInfo) -> tuple[Any, int, int]:
  """Returns a tensor's quantisation, and the values and bytes of a block."""
  # Those of Q8_0 are 32 in 34: a scale of 16 bits and 32 of 8.
  gguf = _import_gguf()
  try:
    quantization = gguf.GGMLQuantizationType(info.type_id)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
  except (KeyError, ValueError) as error:
    raise ValueError(
      f'tensor {name} is of type {info.type_id}, which gguf does not know'
    ) from error
  if info.shape[-1] % block_size:
    raise ValueError(
      f'tensor {name} has rows of {info.shape[-1]}, in blocks of {block_size}'
    )
  return quantization, block_size, block_bytes


def read_tensor(file: GgufFile, name: str) -> np.ndarray:
  """Reads and dequantises one tensor: float32 of its shape, in its own memory.
  ValueError if gguf cannot dequantise it, or it holds a NaN or infinity."""
  gguf, info = _import_gguf(), file.tensors[name]
  quantization, block_size, block_bytes = _blocks(name, info)
  result = np.empty(math.prod(info.shape), np.float32)
  num_blocks = result.size // block_size
  end = info.offset + num_blocks * block_bytes
  blocks = np.asarray(file.data[info.offset : end])
  # Types of one element per block are plain numbers: take longer strides.
  stride = _BLOCKS_AT_A_TIME * max(1, 32 // block_size)
  with np.errstate(all='ignore'):
    for start in range(0, num_blocks, stride):
      stop = min(start + stride, num_blocks)
      chunk = blocks[start * block_bytes : stop * block_bytes]
      values = result[start * block_size : stop * block_size]
      try:
        # One row: the package loops in Python over groups of rows.
        values[:] = gguf.dequantize(chunk[None], quantization)[0]
      except NotImplementedError as error:
        raise ValueError(
          f'{file.path}: gguf cannot dequantise {name}, {quantization.name}'
        ) from error
      if not parameters.is_all_finite(values):
        raise ValueError(f'{file.path}: tensor {name} holds NaN or infinity')
  # Blocks follow each other along the last axis, as in C.
  return result.reshape(info.shape)
