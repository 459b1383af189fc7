"""Lines of text files, and JSON objects of one line each."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def read(path: Path) -> Iterator[tuple[str, str]]:
  """Yields the lines of a file that are not empty, each after its place.

  A line ends with `\\n` or `\\r\\n`. A byte order mark is no part of a line.
  Raises ValueError if the file cannot be read, or is not UTF-8.
  """
  try:
    # Python's own mode for text would end a line at a lone \r, `str.splitlines`
    # at all of Unicode's separators: both may stand in a text, and in JSON.
    with path.open(encoding='utf-8-sig', newline='\n') as file:
      for number, line in enumerate(file, start=1):
        if line := line.rstrip('\r\n'):
          yield f'{path}, line {number}', line
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is not UTF-8 text') from error
  except OSError as error:
    raise ValueError(f'cannot read {path}: {error.strerror}') from error


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
