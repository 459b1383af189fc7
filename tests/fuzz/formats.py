"""Files as trees of dicts, lists and scalars, and trees as files again.

The trees are there to be changed by field, so `write` takes any tree: what the
format cannot say is coerced to the next best, never refused.
"""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.checkpoints.gguf import container

# Stand-ins for what a tree cannot say itself; `write` puts it in their place.
DEEP = '@deep'
MAP_KEY = '@map'
EXTENSION = '@extension'
_LEVELS = 3000
_MASK = {'I': 2**32 - 1, 'Q': 2**64 - 1}


class Twin(str):
  """A key that a dict takes beside the one it is equal to."""

  __slots__ = ()
  __hash__ = object.__hash__

  def __eq__(self, other: object) -> bool:
    return self is other


def parse_json(data: bytes) -> Any:
  return json.loads(data)


def write_json(tree: Any) -> bytes:
  text = json.dumps(tree, default=str, skipkeys=True)
  return text.replace(f'"{DEEP}"', '[' * _LEVELS + ']' * _LEVELS).encode()


def parse_lines(data: bytes) -> list:
  return [json.loads(line) for line in data.splitlines()]


def write_lines(tree: Any) -> bytes:
  lines = tree if isinstance(tree, list) else [tree]
  return b''.join(write_json(line) + b'\n' for line in lines)


def parse_safetensors(data: bytes) -> dict[str, Any]:
  size = int.from_bytes(data[:8], 'little')
  return {'header': json.loads(data[8 : 8 + size]), 'data': data[8 + size :]}


def write_safetensors(tree: Any) -> bytes:
  if not isinstance(tree, dict):
    return write_json(tree)
  header = write_json(tree.get('header'))
  header += b' ' * (-len(header) % 8)
  return _number('Q', len(header)) + header + _bytes(tree.get('data'))


def parse_gzip(data: bytes) -> bytes:
  return gzip.decompress(data)


def write_gzip(tree: Any) -> bytes:
  return gzip.compress(_bytes(tree), compresslevel=1, mtime=0)


def parse_msgpack(data: bytes) -> Any:
  """Extensions become dicts; those of flax hold msgpack themselves."""
  import msgpack

  def extension(code: int, content: bytes) -> dict[str, Any]:
    return {EXTENSION: code, 'content': parse_msgpack(content)}

  return msgpack.unpackb(data, ext_hook=extension, strict_map_key=False)


def write_msgpack(tree: Any) -> bytes:
  """Dicts are written pair by pair, so that a key can be anything."""
  import msgpack

  match tree:
    case {'@extension': code, 'content': content}:
      code = code if type(code) is int else 1
      return msgpack.packb(msgpack.ExtType(code & 127, write_msgpack(content)))
    case dict():
      pairs = (write_msgpack(k) + write_msgpack(v) for k, v in tree.items())
      return msgpack.Packer().pack_map_header(len(tree)) + b''.join(pairs)
    case list() | tuple():
      items = b''.join(map(write_msgpack, tree))
      return msgpack.Packer().pack_array_header(len(tree)) + items
    case int() if not -(2**63) <= tree < 2**64:
      return msgpack.packb(tree % 2**64)
  if tree == DEEP:
    return b'\x91' * _LEVELS + b'\xc0'
  if tree == MAP_KEY:
    return b'\x80'
  return msgpack.packb(tree, default=str, unicode_errors='surrogatepass')


# Messages within the messages of a SentencePiece model.
_MESSAGES = {1, 2, 3}


def parse_protobuf(data: bytes, *, is_outer: bool = True) -> list:
  """A message as lists `[field, value]`."""
  fields, at = [], 0
  while at < len(data):
    tag, at = _parse_varint(data, at)
    number, wire = tag >> 3, tag & 7
    value: Any
    if wire == 0:
      value, at = _parse_varint(data, at)
    elif wire == 5:
      value, at = struct.unpack_from('<f', data, at)[0], at + 4
    else:
      assert wire == 2, wire
      size, at = _parse_varint(data, at)
      value, at = data[at : at + size], at + size
      if is_outer and number in _MESSAGES:
        value = parse_protobuf(value, is_outer=False)
    fields.append([number, value])
  return fields


def write_protobuf(tree: Any) -> bytes:
  message = b''
  for field in tree if isinstance(tree, list) else [tree]:
    number, value = field if _is_pair(field) else (1, field)
    number = number if type(number) is int and 0 < number < 2**29 else 1
    if isinstance(value, float):
      message += _varint(number << 3 | 5) + struct.pack('<f', _float32(value))
    elif isinstance(value, int):
      message += _varint(number << 3) + _varint(value % 2**64)
    else:
      is_message = isinstance(value, list)
      content = write_protobuf(value) if is_message else _bytes(value)
      message += _varint(number << 3 | 2) + _varint(len(content)) + content
  return message


def _is_pair(field: Any) -> bool:
  return isinstance(field, list) and len(field) == 2


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte, at = data[at], at + 1
    value |= (byte & 127) << shift
    shift += 7
    if byte < 128:
      return value, at


def _varint(value: int) -> bytes:
  groups = [value & 127]
  while value := value >> 7:
    groups.append(value & 127)
  return bytes(g | 128 for g in groups[:-1]) + bytes(groups[-1:])


def parse_gguf(path: Path) -> dict[str, Any]:
  """By our own reader, of a file that it is known to read right."""
  file = container.open_gguf(path)
  first = min(file.tensors.values(), key=lambda info: info.offset)
  return {
    'metadata': {
      key: value.tolist() if isinstance(value, np.ndarray) else value
      for key, value in file.metadata.items()
    },
    'tensors': [
      {
        'name': name,
        'shape': list(info.shape[::-1]),
        'type': info.type_id,
        'offset': info.offset - first.offset,
      }
      for name, info in file.tensors.items()
    ],
    'data': first.data[first.offset :].tobytes(),
  }


def write_gguf(tree: Any) -> bytes:
  tree = tree if isinstance(tree, dict) else {}
  metadata, tensors = tree.get('metadata'), tree.get('tensors')
  metadata = metadata if isinstance(metadata, dict) else {'': metadata}
  tensors = tensors if isinstance(tensors, list) else []
  file = b'GGUF' + _number('I', 3)
  file += _number('Q', len(tensors)) + _number('Q', len(metadata))
  for key, value in metadata.items():
    code, content = _gguf_value(value)
    file += _gguf_string(key) + _number('I', code) + content
  for info in tensors:
    info = info if isinstance(info, dict) else {'name': info}
    shape = info.get('shape')
    shape = shape if isinstance(shape, list) else [shape]
    file += _gguf_string(info.get('name')) + _number('I', len(shape))
    file += b''.join(_number('Q', size) for size in shape)
    file += _number('I', info.get('type')) + _number('Q', info.get('offset'))
  return file + bytes(-len(file) % 32) + _bytes(tree.get('data'))


def _gguf_value(value: Any) -> tuple[int, bytes]:
  """The code of a value's type, and its bytes."""
  if value == DEEP:
    level = _number('I', 9) + _number('Q', 1)
    return 9, level * _LEVELS + _number('I', 4) + _number('Q', 0)
  match value:
    case bool():
      return 7, bytes([value])
    case int() if 0 <= value < 2**32:
      return 4, _number('I', value)
    case int() if -(2**63) <= value < 2**63:
      return 11, struct.pack('<q', value)
    case int():
      return 10, _number('Q', value)
    case float():
      return 6, struct.pack('<f', _float32(value))
    case dict():
      return _gguf_value(list(value.values()))
    case list() | tuple():
      items = [_gguf_value(item) for item in value]
      code = items[0][0] if items else 8
      same = [content for kind, content in items if kind == code]
      return 9, (_number('I', code) + _number('Q', len(same)) + b''.join(same))
  return 8, _gguf_string(value)


def _gguf_string(value: Any) -> bytes:
  content = _bytes(value)
  return _number('Q', len(content)) + content


def _number(code: str, value: Any) -> bytes:
  is_number = isinstance(value, (int, float)) and value == value
  number = int(value) if is_number and abs(value) < 2**80 else 2**63
  return struct.pack('<' + code, number & _MASK[code])


def _float32(value: float) -> float:
  return value if abs(value) < 3e38 else float('inf')


def _bytes(value: Any) -> bytes:
  if isinstance(value, bytes):
    return value
  return str(value).encode('utf-8', 'surrogatepass')
