"""Zarr arrays of gzip chunks, inflated to the size of a chunk and no further.

tensorstore inflates a chunk to its end before it looks at its size: 4 MB of a
damaged or hostile file took 4 GB of memory before they were refused.
"""

import dataclasses
import itertools
import math
import zlib
from typing import Any

import numpy as np

_COMPRESSORS = ('gzip', 'zlib')
# zlib looks itself which of the two headers there is.
_EITHER_HEADER = 32 + zlib.MAX_WBITS


@dataclasses.dataclass(frozen=True)
class GzipArray:
  """An array whose chunks are compressed with gzip or zlib.

  Attributes:
    kvstore: a `tensorstore.KvStore` that holds the chunks.
    shape: of the array.
    dtype: of what is read.
    stored_dtype: of what is stored; differs in its byte order at most.
    chunks: shape of a chunk.
    order: `'C'` or `'F'`, of the elements in a chunk.
    separator: between the numbers in a chunk's name.
  """

  kvstore: Any
  shape: tuple[int, ...]
  dtype: np.dtype
  stored_dtype: np.dtype
  chunks: tuple[int, ...]
  order: str
  separator: str

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    """The values in a slice of every axis, read from disk.

    Raises:
      ValueError: if a chunk is missing, damaged, or of another size.
    """
    spans = [
      part.indices(size)[:2]
      for part, size in zip(index, self.shape, strict=True)
    ]
    values = np.empty([stop - start for start, stop in spans], self.dtype)
    grid = [
      range(start // chunk, -(-stop // chunk))
      for (start, stop), chunk in zip(spans, self.chunks, strict=True)
    ]
    for place in itertools.product(*grid):
      into, part = [], []
      for i, chunk, (start, stop) in zip(
        place, self.chunks, spans, strict=True
      ):
        first, last = max(start, i * chunk), min(stop, (i + 1) * chunk)
        into.append(slice(first - start, last - start))
        part.append(slice(first - i * chunk, last - i * chunk))
      values[tuple(into)] = self._read_chunk(place)[tuple(part)]
    return values

  def _read_chunk(self, place: tuple[int, ...]) -> np.ndarray:
    name = self.separator.join(map(str, place)) or '0'
    found = self.kvstore.read(name).result()
    if found.state != 'value':
      raise ValueError(f'chunk {name} is missing')
    size = math.prod(self.chunks) * self.stored_dtype.itemsize
    inflater = zlib.decompressobj(_EITHER_HEADER)
    try:
      # One byte more than there may be.
      content = inflater.decompress(found.value, size + 1)
    except zlib.error as error:
      raise ValueError(f'chunk {name} is damaged: {error}') from error
    if len(content) != size or not inflater.eof or inflater.unused_data:
      raise ValueError(f'chunk {name} does not hold {size} bytes')
    flat = np.frombuffer(content, self.stored_dtype)
    return flat.reshape(self.chunks, order=self.order)  # type: ignore


def bounded(store: Any) -> Any:
  """A `tensorstore.TensorStore`, or its `GzipArray` if its chunks are gzip.

  Raises:
    ValueError: if a chunk is larger than the array, or elements are records.
  """
  shape, chunks = tuple(store.shape), store.chunk_layout.read_chunk.shape
  if any(c > max(1, s) for c, s in zip(chunks or (), shape, strict=True)):
    raise ValueError(f'its chunks are {list(chunks)}, it is {list(shape)}')
  metadata = store.spec().to_json().get('metadata', {})
  if (metadata.get('compressor') or {}).get('id') not in _COMPRESSORS:
    return store
  if not isinstance(metadata['dtype'], str):
    raise ValueError(f'its elements are records: {metadata["dtype"]}')
  return GzipArray(
    kvstore=store.kvstore,
    shape=shape,
    dtype=store.dtype.numpy_dtype,
    stored_dtype=np.dtype(metadata['dtype']),
    chunks=tuple(metadata['chunks']),
    order=metadata['order'],
    separator=metadata['dimension_separator'],
  )
