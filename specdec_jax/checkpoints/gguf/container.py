"""The GGUF container, in one file or split: metadata, and tensors by name.

Reads the header in one pass. The `gguf` package would make an array of every
string, take seconds for a vocabulary, and raise any exception for a damaged
file; it dequantises the tensors. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import functools
import math
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specdec_jax.checkpoints import parameters
from specdec_jax.files import require as packages
from specdec_jax.files.paths import is_in_bucket, mapped
from specdec_jax.files.settings import Json, Settings

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
# Blocks that are dequantised at a time, so that temporaries fit the CPU's
# cache.
_BLOCKS_AT_A_TIME = 2048
# Bytes of an object in a bucket that are read first, for its header.
_FIRST_BYTES = 2**22
# llama.cpp's names for the files of a split model.
_SHARD_NAME = re.compile(r'(.+)-(\d{5})-of-(\d{5})\.gguf')


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where a tensor is stored.

  Attributes:
    shape: slowest axis first.
    type_id: its quantisation, a `gguf.GGMLQuantizationType`.
    offset: in bytes from the start of its file.
    data: the bytes of that file, from `paths.mapped`.
    dtype: the dtype that `read_tensor` returns.
  """

  shape: tuple[int, ...]
  type_id: int
  offset: int
  data: 'np.ndarray | Ranges' = dataclasses.field(repr=False)
  dtype: ClassVar = np.float32


@dataclasses.dataclass(frozen=True)
class GgufFile:
  """A model in one or several open GGUF files.

  Attributes:
    path: of the first file.
    metadata: strings, numbers, lists of strings and arrays of numbers by key.
    tensors: those of all files by name.
  """

  path: str
  metadata: Json
  tensors: dict[str, TensorInfo]


class _Cursor:
  """Reads little-endian values one after another."""

  def __init__(self, data: np.ndarray, offset: int):
    self.view = memoryview(data)
    self.offset = offset

  def take(self, num_bytes: int) -> memoryview:
    end = self.offset + num_bytes
    if end > len(self.view):
      raise self.end_of_header()
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
    item_type = self.number('I')
    length = self.number('Q')
    if item_type in _SCALARS:
      return self.scalars(item_type, length)
    if item_type == _ARRAY:
      raise ValueError('it has metadata with an array of arrays')
    if item_type != _STRING:
      raise ValueError(f'it has metadata of the unknown type {item_type}')
    return self.strings(length)

  def strings(self, length: int) -> list[str]:
    # As `string`, without a call for each: vocabularies have 50,000 and more.
    read_length = struct.Struct('<Q')
    result = []
    for _ in range(length):
      start = self.offset + read_length.size
      if start > len(self.view):
        raise self.end_of_header()
      (num_bytes,) = read_length.unpack_from(self.view, self.offset)
      end = start + num_bytes
      if end > len(self.view):
        raise self.end_of_header()
      result.append(str(self.view[start:end], 'utf-8'))
      self.offset = end
    return result

  def end_of_header(self) -> EOFError:
    return EOFError(f'its header needs more than {len(self.view)} bytes')

  def scalars(self, type_id: int, length: int) -> np.ndarray:
    # A view of the file: Python's objects would take up to 36 times the memory.
    dtype = np.dtype(_SCALARS[type_id])
    return np.frombuffer(self.take(length * dtype.itemsize), dtype)


def shard_paths(path: Path) -> list[Path]:
  """Returns all files of the model whose file, or one of whose files, is at
  `path`; llama.cpp's names state how many there are."""
  # `name-00002-of-00003.gguf` is one of three.
  match = _SHARD_NAME.fullmatch(path.name)
  if not match:
    return [path]
  stem, _, count = match.groups()
  return [
    path.with_name(f'{stem}-{number:05}-of-{count}.gguf')
    for number in range(1, int(count) + 1)
  ]


def open_gguf(path: Path) -> GgufFile:
  """Maps a GGUF file, or all files of a split model, and reads the headers.

  `path` is any of the files. Raises ValueError if a file is not GGUF, of
  another version or truncated, if tensors overlap, or if the files do not
  belong to one model; OSError if one cannot be opened.
  """
  paths = shard_paths(path)
  for shard_path in paths:
    if len(paths) > 1 and not shard_path.is_file():
      raise ValueError(
        f'{path} is one of the {len(paths)} files of a model, and '
        f'{shard_path.name} is missing'
      )
  # The first file has the metadata of the model.
  first = _open_file(paths[0])
  _check_shard(first, 0, len(paths))
  tensors = dict(first.tensors)
  for number, shard_path in enumerate(paths[1:], start=1):
    shard = _open_file(shard_path)
    _check_shard(shard, number, len(paths))
    repeated = tensors.keys() & shard.tensors.keys()
    if repeated:
      raise ValueError(
        f'{shard.path} has tensor {min(repeated)}, as another file of the model'
      )
    tensors |= shard.tensors
  num_tensors = _split_value(first, 'tensors.count', len(tensors))
  if num_tensors != len(tensors):
    raise ValueError(
      f'{first.path}: split.tensors.count is {num_tensors}, and the files have '
      f'{len(tensors)} tensors'
    )
  return GgufFile(first.path, first.metadata, tensors)


def _check_shard(shard: GgufFile, number: int, count: int) -> None:
  """Raises ValueError unless the metadata of a file has the given index
  `number`, from 0, and the `count` of files."""
  stated_count = _split_value(shard, 'count', 1)
  stated_number = _split_value(shard, 'no', 0)
  # A file that is not split may state 0 or 1, or neither key.
  if max(stated_count, 1) == count and stated_number == number:
    return
  raise ValueError(
    f'{shard.path} is, by its metadata, file {stated_number + 1} of '
    f'{max(stated_count, 1)} of a model, and by its name {number + 1} of '
    f'{count}: the files of a split model are called NAME-00001-of-00003.gguf, '
    'NAME-00002-of-00003.gguf and so on'
  )


def _split_value(shard: GgufFile, key: str, default: int) -> int:
  values = Settings(path=shard.path, values=shard.metadata)
  return values.count(f'split.{key}', default, least=0)


def _open_file(path: Path) -> GgufFile:
  """Maps one GGUF file and reads its header; the errors are `open_gguf`'s.

  A model's sizes, weights and vocabulary are read one after another: the header
  of a file on a disk is kept until the file changes.
  """
  if is_in_bucket(path):
    return _read_file(path)
  status = path.stat()
  return _read_unchanged_file(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _read_unchanged_file(path: Path, mtime_ns: int, num_bytes: int) -> GgufFile:
  del mtime_ns, num_bytes  # They tell a changed file from the one before.
  return _read_file(path)


def _read_file(path: Path) -> GgufFile:
  data = mapped(path)
  magic = bytes(data[: len(_MAGIC)])
  if magic != _MAGIC:
    raise ValueError(f'{path} is not a GGUF file: it starts with {magic!r}')
  try:
    metadata, tensors = _read_header(data)
    _check_offsets(tensors, data.size)
  except EOFError as error:
    raise ValueError(f'{path} is truncated: {error}') from error
  except ValueError as error:
    raise ValueError(f'{path} cannot be read: {error}') from error
  return GgufFile(str(path), metadata, tensors)


def _check_offsets(tensors: dict[str, TensorInfo], num_bytes: int) -> None:
  """Raises EOFError if a tensor ends after `num_bytes`, the size of its file,
  and ValueError if two overlap."""
  end, previous = 0, ''
  for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
    _, block_size, block_bytes = _blocks(name, info)
    size = math.prod(info.shape) // block_size * block_bytes
    if info.offset + size > num_bytes:
      raise EOFError(
        f'tensor {name} ends at byte {info.offset + size} of {num_bytes}'
      )
    if size and info.offset < end:
      raise ValueError(
        f'tensor {name} begins at byte {info.offset}, before tensor {previous} '
        f'ends, at {end}'
      )
    if size:
      end, previous = info.offset + size, name


def _read_header(
  data: 'np.ndarray | Ranges',
) -> tuple[Json, dict[str, TensorInfo]]:
  """Reads the metadata and the offsets of the tensors."""
  # The header does not state its length: from a bucket, a first part is read,
  # and then longer ones until the header is complete.
  num_bytes = data.size if isinstance(data, np.ndarray) else _FIRST_BYTES
  while True:
    try:
      return _parse_header(_Cursor(data[:num_bytes], len(_MAGIC)), data)
    except EOFError:
      if num_bytes >= data.size:
        raise
      num_bytes *= 4


def _parse_header(
  cursor: _Cursor, data: 'np.ndarray | Ranges'
) -> tuple[Json, dict[str, TensorInfo]]:
  version = cursor.number('I')
  if version not in _VERSIONS:
    raise ValueError(
      f'it is of version {version} (or big-endian), expected one of {_VERSIONS}'
    )
  num_tensors = cursor.number('Q')
  num_keys = cursor.number('Q')
  metadata: Json = {}
  for _ in range(num_keys):
    key = cursor.string()
    if key in metadata:
      raise ValueError(f'metadata {key} occurs twice')
    metadata[key] = cursor.value(cursor.number('I'))
  tensors: dict[str, TensorInfo] = {}
  for _ in range(num_tensors):
    name = cursor.string()
    num_axes = cursor.number('I')
    if name in tensors or not 1 <= num_axes <= _MAX_AXES:
      raise ValueError(f'tensor {name} occurs twice or has {num_axes} axes')
    # ggml counts axes from the fastest: [in, out] is our [out, in].
    fastest_first = [cursor.number('Q') for _ in range(num_axes)]
    type_id = cursor.number('I')
    offset = cursor.number('Q')
    shape = tuple(fastest_first[::-1])
    tensors[name] = TensorInfo(shape, type_id, offset, data)
  alignment = metadata.get('general.alignment', 32)
  if not isinstance(alignment, int) or alignment < 1:
    raise ValueError(f'general.alignment is {alignment!r}')
  for name, info in tensors.items():
    if info.offset % alignment:
      raise ValueError(
        f'tensor {name} has the offset {info.offset}, no multiple of the '
        f'alignment {alignment}'
      )
  # Tensors begin at the next multiple of the alignment, and their offsets count
  # from there: a header of 100 bytes and 32 give 128.
  start = -(-cursor.offset // alignment) * alignment
  return metadata, {
    name: dataclasses.replace(info, offset=start + info.offset)
    for name, info in tensors.items()
  }


def _blocks(name: str, info: TensorInfo) -> tuple[Any, int, int]:
  """Returns a tensor's quantisation, and the values and bytes of a block."""
  # A block of Q8_0 has 32 values in 34 bytes: a 16-bit scale and 8 bits each.
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
  """Reads and dequantises one tensor, as a new float32 array. ValueError if
  gguf cannot dequantise it, or it holds a NaN or infinity."""
  gguf = _import_gguf()
  info = file.tensors[name]
  quantization, block_size, block_bytes = _blocks(name, info)
  result = np.empty(math.prod(info.shape), np.float32)
  num_blocks = result.size // block_size
  end = info.offset + num_blocks * block_bytes
  blocks = np.asarray(info.data[info.offset : end])
  # Unquantised types have blocks of one value: take more blocks at a time.
  stride = _BLOCKS_AT_A_TIME * max(1, 32 // block_size)
  with np.errstate(all='ignore'):
    for start in range(0, num_blocks, stride):
      stop = min(start + stride, num_blocks)
      chunk = blocks[start * block_bytes : stop * block_bytes]
      values = result[start * block_size : stop * block_size]
      try:
        # As one row, since the package loops in Python over groups of rows.
        values[:] = gguf.dequantize(chunk[None], quantization)[0]
      except NotImplementedError as error:
        raise ValueError(
          f'{file.path}: gguf cannot dequantise {name}, {quantization.name}'
        ) from error
      if not parameters.is_all_finite(values):
        raise ValueError(f'{file.path}: tensor {name} holds NaN or infinity')
  # Blocks follow each other along the last axis, as in C.
  return result.reshape(info.shape)
