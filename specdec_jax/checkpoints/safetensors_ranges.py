"""safetensors files in buckets, of which only the tensors asked for are read.

The format (https://github.com/huggingface/safetensors): the length of a header,
8 bytes; the header, JSON; the tensors, end to end.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specdec_jax.files.paths import mapped

_DTYPES: dict[str, Any] = {
  'F64': np.float64, 'F32': np.float32, 'F16': np.float16,
  'BF16': ml_dtypes.bfloat16, 'I64': np.int64, 'I32': np.int32,
  'I16': np.int16, 'I8': np.int8, 'U8': np.uint8, 'BOOL': np.bool_,
}  # fmt: skip
_LENGTH = 8
# The limit of safetensors itself.
_MAX_HEADER = 10**8


@dataclasses.dataclass(frozen=True)
class Entry:
  """A tensor in the header: its dtype, its shape, and where it lies in the
  file, with the methods of a slice of `safetensors.safe_open`."""

  dtype: str
  shape: list[int]
  start: int
  stop: int

  def get_shape(self) -> list[int]:
    return self.shape

  def get_dtype(self) -> str:
    return self.dtype


class RemoteFile:
  """An open file, with the methods of `safetensors.safe_open` that are called
  here; ValueError if it is none, or not complete."""

  def __init__(self, path: Path):
    # Slices of it are requests to the bucket.
    self._data = mapped(path)
    length = int.from_bytes(bytes(self._data[:_LENGTH]), 'little')
    end = _LENGTH + length
    if self._data.size < end or not 0 < length <= _MAX_HEADER:
      raise ValueError(f'its header would be {length} bytes')
    try:
      header = json.loads(bytes(self._data[_LENGTH:end]))
    except RecursionError as error:
      raise ValueError('its header is nested too deeply') from error
    if not isinstance(header, dict):
      raise ValueError('its header is no JSON object')
    header.pop('__metadata__', None)
    self._entries = {
      name: _entry(name, value, end, self._data.size)
      for name, value in header.items()
    }

  def keys(self) -> list[str]:
    return list(self._entries)

  def get_slice(self, name: str) -> Entry:
    return self._entries[name]

  def get_tensor(self, name: str) -> np.ndarray:
    entry = self._entries[name]
    if entry.dtype not in _DTYPES:
      raise ValueError(f'tensor {name} is stored as {entry.dtype}')
    values = self._data[entry.start : entry.stop]
    return values.view(_DTYPES[entry.dtype]).reshape(entry.shape)


def _entry(name: str, value: Any, begin: int, size: int) -> Entry:
  try:
    first, last = value['data_offsets']
    shape = [int(number) for number in value['shape']]
    start, stop = begin + int(first), begin + int(last)
    found = Entry(str(value['dtype']), shape, start, stop)
  except (KeyError, OverflowError, TypeError, ValueError) as error:
    raise ValueError(f'its header does not say what {name} is') from error
  # A type that is not known here is refused where its tensor is read.
  item = np.dtype(_DTYPES.get(found.dtype, np.uint8)).itemsize
  is_known = found.dtype in _DTYPES
  num_bytes = found.stop - found.start
  if not begin <= found.start <= found.stop <= size or (
    is_known and math.prod(shape) * item != num_bytes
  ):
    raise ValueError(f'tensor {name} does not lie in its {size} bytes')
  return found
