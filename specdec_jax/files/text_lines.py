"""Lines of text files, and JSON objects of one line each."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_BYTE_ORDER_MARK = '\ufeff'


def read(path: Path) -> Iterator[tuple[str, str]]:
  """Yields the lines of a file that are not empty, each after its place.

  A line ends with `\\n` or `\\r\\n`. A byte order mark is no part of a line.
  Raises ValueError if the file cannot be read, or is not UTF-8.
  """
  try:
    with path.open('rb') as file:
      yield from decoded(file, str(path))
  except OSError as error:
    raise ValueError(f'cannot read {path}: {error.strerror}') from error


def decoded(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, str]]:
  """Yields the lines of a binary file, as `read` does; ValueError, with the
  line and the byte, if one is not UTF-8."""
  # Python's own mode for text would end a line at a lone \r, `str.splitlines`
  # at all of Unicode's separators: both may stand in a text, and in JSON.
  num_before = 0
  for number, data in enumerate(lines, start=1):
    line = _decode(data, name, number, num_before)
    num_before += len(data)
    if line := line.removesuffix('\n').removesuffix('\r'):
      yield f'{name}, line {number}', line


def read_whole(path: Path) -> str:
  """Returns the text of a file, without a byte order mark and with `\\n` for
  `\\r\\n`; ValueError as of `read`."""
  try:
    data = path.read_bytes()
  except OSError as error:
    raise ValueError(f'cannot read {path}: {error.strerror}') from error
  return _decode(data, str(path)).replace('\r\n', '\n')


def _decode(
  data: bytes, name: str, number: int = 1, num_before: int = 0
) -> str:
  """Decodes line `number` of a file and those behind it; `num_before` bytes are
  before them. ValueError names the line, from 1, and the byte, from 0."""
  try:
    text = data.decode()
  except UnicodeDecodeError as error:
    number += data.count(b'\n', 0, error.start)
    raise ValueError(
      f'{name}, line {number} is not UTF-8 text: {error.reason} at byte '
      f'{num_before + error.start}'
    ) from error
  return text if num_before else text.removeprefix(_BYTE_ORDER_MARK)


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields the objects of a JSONL file, each with its place; blank lines are
  none. ValueError as of `read` and `parse_object`."""
  for place, line in read(path):
    if line.strip():
      yield place, parse_object(line, place)


def parse_object(line: str, place: str) -> dict[str, Any]:
  """Parses a JSON object of a line; ValueError with the place if it is none."""
  try:
    record = json.loads(line)
  except json.JSONDecodeError as error:
    reason = f'{error.msg}, column {error.colno}'
    raise ValueError(f'{place} is not JSON ({reason})') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{place} is not JSON: {error}') from error
  if not isinstance(record, dict):
    raise ValueError(f'{place} is no JSON object')
  return record


def text_under(record: Mapping[str, object], key: str, place: str) -> str:
  """Returns the text that an object has under a key; ValueError with the place
  and the keys that there are, if there is none, or as of `check_encodable`."""
  text = record.get(key)
  if not isinstance(text, str):
    raise ValueError(f'{place} has no text under "{key}"; {keys_of(record)}')
  check_encodable(text, place)
  return text


def check_encodable(text: str, place: str) -> None:
  """Raises ValueError for half of a surrogate pair, which no UTF-8 can say."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f'{place} is not valid Unicode text') from error


def keys_of(record: Mapping[str, object]) -> str:
  """Returns the keys that an object has, for messages."""
  return f'its keys: {", ".join(map(repr, record)) or "none"}'
