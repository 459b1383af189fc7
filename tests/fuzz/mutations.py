"""Random changes of bytes, and of trees field by field.

All draw from one `random.Random`, so that a seed repeats them.
"""

import random
from typing import Any

from tests.fuzz.formats import DEEP, EXTENSION, MAP_KEY, Twin

# Where paths in a mutated file lead, if they lead out of its folder.
OUTSIDE = '../outside'

_NUMBERS = (
  0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 4096, 65535, 65536, 10**6,
  2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 10**9, 2**53 + 1, 2**63 - 1,
  2**63, -(2**63), 2**64 - 1, 10**30, 0.0, -0.0, 0.5, 1.0, 2.0, -1.5, 1e-40,
  1e38, 1e300, float('inf'), float('-inf'), float('nan'),
)  # fmt: skip
_STRINGS = (
  '', 'x', '0', '2', '1.5', 'true', 'false', 'none', 'default', 'linear', '/',
  '.', '..', 'a' * 300, '\x00', '\ud800', '\u2581', '\u0120', '%s%n', '{{',
  'float32', 'bfloat16', '<f4', '|V65536', 'object', 'gelu', 'zarr', 'null',
  f'{OUTSIDE}/model.safetensors', f'{OUTSIDE}/', '/etc/passwd', '/dev/zero',
  DEEP, MAP_KEY,
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
  """One to four changes; `other` is what is spliced in."""
  changed = bytearray(data)
  for _ in range(rng.choice((1, 1, 1, 2, 4))):
    rng.choice(_BYTE_CHANGES)(rng, changed, other)
  return bytes(changed)


def _flip(rng: random.Random, data: bytearray, other: bytes) -> None:
  if data:
    data[_place(rng, data)] ^= 1 << rng.randrange(8)


def _overwrite(rng: random.Random, data: bytearray, other: bytes) -> None:
  if data:
    data[_place(rng, data)] = rng.choice((0, 1, 127, 128, 255, 0x5B, 0x7B))


def _truncate(rng: random.Random, data: bytearray, other: bytes) -> None:
  del data[_place(rng, data) :]


def _delete(rng: random.Random, data: bytearray, other: bytes) -> None:
  start = _place(rng, data)
  del data[start : start + rng.choice((1, 2, 4, 8, 64, 1024))]


def _insert(rng: random.Random, data: bytearray, other: bytes) -> None:
  start = _place(rng, data)
  data[start:start] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))


def _repeat(rng: random.Random, data: bytearray, other: bytes) -> None:
  start = _place(rng, data)
  part = data[start : start + rng.choice((1, 2, 4, 8, 64, 1024))]
  data[start:start] = part * rng.choice((1, 1, 2, 16))


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
  start, size = _place(rng, data), rng.choice((4, 16, 256, 4096))
  first = _place(rng, other)
  data[start : start + size] = other[first : first + size]


def _write_number(rng: random.Random, data: bytearray, other: bytes) -> None:
  size = rng.choice((2, 4, 8))
  number = rng.choice(_NUMBERS[:27]) % 256**size
  start = _place(rng, data)
  data[start : start + size] = number.to_bytes(
    size, rng.choice(('little', 'little', 'big'))
  )


def _place(rng: random.Random, data: bytes | bytearray) -> int:
  """Anywhere; half of the time near the start, where headers are."""
  size = len(data)
  return rng.randrange(max(1, min(size, 256) if rng.random() < 0.5 else size))


_BYTE_CHANGES = (
  _flip, _flip, _overwrite, _truncate, _delete, _insert, _repeat, _splice,
  _write_number,
)  # fmt: skip


def mutate_tree(rng: random.Random, tree: Any) -> Any:
  """One to three changed fields of a tree, which is changed in place."""
  root = [tree]
  for _ in range(rng.choice((1, 1, 1, 2, 3))):
    holder, key = _pick(rng, root)
    rng.choice(_FIELD_CHANGES)(rng, holder, key)
  return root[0] if root else None


def _pick(rng: random.Random, root: list) -> tuple[Any, Any]:
  """A field, at a depth that does not depend on how many fields there are."""
  if not root:
    root.append(None)
  holder: Any = root
  while True:
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    key = rng.choice(keys)
    child = holder[key]
    if not isinstance(child, (dict, list)) or not child or rng.random() < 0.15:
      return holder, key
    holder = child


def _value(rng: random.Random) -> Any:
  kind = rng.randrange(8)
  if kind < 3:
    return rng.choice(_NUMBERS)
  if kind < 5:
    return rng.choice(_STRINGS)
  if kind == 5:
    return rng.choice((None, True, False, b'', b'\xff\x00', DEEP))
  if kind == 6:
    return [_value(rng) for _ in range(rng.randrange(4))]
  return {rng.choice(_STRINGS): _value(rng) for _ in range(rng.randrange(3))}


def _replace(rng: random.Random, holder: Any, key: Any) -> None:
  holder[key] = _value(rng)


def _remove(rng: random.Random, holder: Any, key: Any) -> None:
  del holder[key]


def _double(rng: random.Random, holder: Any, key: Any) -> None:
  if isinstance(holder, list):
    holder.insert(key, holder[key])
  else:
    twin = Twin(key) if isinstance(key, str) else key
    holder[twin] = rng.choice((holder[key], _value(rng)))


def _rename(rng: random.Random, holder: Any, key: Any) -> None:
  value = holder[key]
  if isinstance(holder, dict):
    del holder[key]
    holder[rng.choice((*_STRINGS, 3, None, b'\xff', (1,)))] = value


def _swap(rng: random.Random, holder: Any, key: Any) -> None:
  other = rng.choice(
    list(holder) if isinstance(holder, dict) else range(len(holder))
  )
  holder[key], holder[other] = holder[other], holder[key]


def _wrap(rng: random.Random, holder: Any, key: Any) -> None:
  value = holder[key]
  extension = {EXTENSION: rng.choice((1, 2, 3, 9)), 'content': value}
  holder[key] = rng.choice(([value], {'x': value}, extension, str(value)))


def _adjust(rng: random.Random, holder: Any, key: Any) -> None:
  """A value of the same type."""
  value = holder[key]
  if isinstance(value, bool):
    holder[key] = not value
  elif isinstance(value, int):
    holder[key] = rng.choice((value + 1, value - 1, -value, value * 2))
  elif isinstance(value, float):
    holder[key] = rng.choice((value * 2, -value, value + 1, float(int(1e9))))
  elif isinstance(value, (bytes, str)):
    _adjust_text(rng, holder, key)
  else:
    _replace(rng, holder, key)


def _adjust_text(rng: random.Random, holder: Any, key: Any) -> None:
  value = holder[key]
  text = value if isinstance(value, bytes) else value.encode(errors='replace')
  changed = mutate_bytes(rng, text, text)
  if isinstance(value, str):
    holder[key] = changed.decode(errors='replace')
  else:
    holder[key] = changed


_FIELD_CHANGES = (
  _replace, _replace, _replace, _remove, _double, _rename, _swap, _wrap,
  _adjust, _adjust,
)  # fmt: skip
