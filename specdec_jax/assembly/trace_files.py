"""Trace files: one JSON record per line, readable while they are written."""

import dataclasses
import functools
import json
import os
import reprlib
import sys
import types
from collections.abc import Sequence
from typing import TextIO

from specdec_jax.assembly import recording
from specdec_jax.assembly.recording import Record
from specdec_jax.drafters.stateless import MAX_GAMMA
from specdec_jax.files.paths import user_path

_NUMBER = int | float | None
_Types = type | types.UnionType
_TOKEN: dict[str, _Types] = {
  **dict.fromkeys(('text', 'verdict'), str),
  **{'token': int, 'p': _NUMBER},
}
# The keys of each type of record, and of a token, with their types. Keys with a
# question mark are optional, and further keys are allowed everywhere.
_FIELDS: dict[str, dict[str, _Types]] = {
  'header': {
    **dict.fromkeys(('target', 'drafter', 'verification'), str),
    'gamma': int,
    **dict.fromkeys(('temperature?', 'top_k?', 'top_p?', 'lenience?'), _NUMBER),
  },
  'prompt': {
    'text': str,
    **dict.fromkeys(('row', 'num_tokens', 'num_encoder_tokens?'), int),
  },
  'iteration': {
    **dict.fromkeys(('row', 'iteration', 'start', 'committed'), int),
    'drafted': list,
    'next': dict | None,
  },
  'summary': dict.fromkeys(('num_tokens', 'num_target_runs'), int),
  'drafted token': _TOKEN | dict.fromkeys(('q', 'u', 'accept_prob'), _NUMBER),
  'next': _TOKEN,
}
_TYPES = ('header', 'prompt', 'iteration', 'summary')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
  """A trace that was read: its records, prompts and iterations by row. The
  summary is None from a run that did not reach its end; `is_truncated` says
  that the file ends within a record, which was left out."""

  header: Record
  prompts: dict[int, Record]
  iterations: dict[int, list[Record]]
  summary: Record | None = None
  is_truncated: bool = False

  @property
  def rows(self) -> list[int]:
    """Rows with a prompt or an iteration, in the order they appeared."""
    return list(dict.fromkeys([*self.prompts, *self.iterations]))

  @property
  def is_interrupted(self) -> bool:
    """Whether the run did not reach its end."""
    return self.is_truncated or self.summary is None

  @functools.cached_property
  def verdicts(self) -> set[str]:
    """The verdicts that occur, over all tokens."""
    return {
      token['verdict']
      for records in self.iterations.values()
      for record in records
      for token in recording.tokens(record)
    }

  def summarize(self, row: int | None = None) -> recording.Summary:
    """Adds up one row, or all of them."""
    rows = self.iterations if row is None else [row]
    records = [
      record for row in rows for record in self.iterations.get(row, [])
    ]
    return recording.summarize(records, self.header['gamma'])


def write_record(file: TextIO, record: Record) -> None:
  """Appends a record and flushes; ValueError for what JSON lacks, as NaN."""
  file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + '\n')
  file.flush()


def read(path: str | os.PathLike[str]) -> Trace:
  """Reads a trace file, of an interrupted run too: a last line that breaks off
  is left out and reported as `is_truncated`. ValueError, with file, line and
  reason, if it is no trace of this version; OSError if it cannot be opened."""
  # A complete file ends with a newline, and its last piece is empty.
  *lines, unfinished = user_path(path).read_bytes().split(b'\n')
  is_truncated = _is_cut(unfinished)
  if unfinished and not is_truncated:
    lines.append(unfinished)
  records = []
  for number, line in enumerate(lines, start=1):
    try:
      records.append(_parse(line, is_first=number == 1))
    except ValueError as error:
      raise ValueError(f'{os.fspath(path)}:{number}: {error}') from error
  if not records:
    raise ValueError(
      f'{os.fspath(path)}:1: no header; the file is empty or its run was '
      'interrupted before the first record'
    )
  return dataclasses.replace(assemble(records), is_truncated=is_truncated)


def assemble(records: Sequence[Record]) -> Trace:
  """Makes the trace of its records, a header first, as `read` returns it."""
  of_type: dict[str, list[Record]] = {name: [] for name in _TYPES}
  for record in records:
    of_type[record['type']].append(record)
  iterations: dict[int, list[Record]] = {}
  for record in of_type['iteration']:
    iterations.setdefault(record['row'], []).append(record)
  return Trace(
    header=records[0],
    prompts={record['row']: record for record in of_type['prompt']},
    iterations=iterations,
    summary=next(reversed(of_type['summary']), None),
  )


def _is_cut(line: bytes) -> bool:
  """Says whether the last line, which has no end, breaks off."""
  try:
    json.loads(line or b'null')
  except ValueError:
    return True
  except RecursionError:  # Whole or not, it is no record.
    pass
  return False


def _parse(line: bytes, *, is_first: bool) -> Record:
  """Reads and checks the record of a line."""

  def refuse(constant: str) -> None:
    raise ValueError(f'{constant} is no JSON number')

  try:
    record = json.loads(line.decode(), parse_constant=refuse)
  except json.JSONDecodeError as error:
    raise ValueError(f'not a record of a trace: {error}') from error
  except RecursionError:
    raise ValueError('its lists are nested too deeply') from None
  record_type = record.get('type') if isinstance(record, dict) else None
  if record_type not in _TYPES:
    raise ValueError(f'not a record of a trace: its type is {record_type!r}')
  if is_first != (record_type == 'header'):
    raise ValueError(
      f'a trace has one header, its first record; got a {record_type}'
    )
  if is_first and record.get('version') != recording.VERSION:
    raise ValueError(
      f'trace version {record.get("version")!r}, this code reads version '
      f'{recording.VERSION}'
    )
  _check_fields(record, record_type)
  if is_first and not 0 <= (gamma := record['gamma']) <= MAX_GAMMA:
    raise ValueError(f'header has gamma {gamma}, expected 0 to {MAX_GAMMA}')
  if record_type == 'iteration':
    _check_tokens(record)
  return record


def _check_tokens(record: Record) -> None:
  """Raises ValueError unless the tokens of an iteration fit it."""
  named = [('drafted token', token) for token in record['drafted']]
  if record['next'] is not None:
    named.append(('next', record['next']))
  for name, token in named:
    if not isinstance(token, dict):
      raise ValueError(f'{name} is an object, got {type(token).__name__}')
    _check_fields(token, name)
    verdicts: tuple[str, ...] = recording.DRAFT_VERDICTS
    if name == 'next':
      verdicts = recording.NEXT_VERDICTS
    if token['verdict'] not in verdicts:
      raise ValueError(
        f'{name} has verdict {token["verdict"]!r}, expected one of '
        f'{", ".join(verdicts)}'
      )
  num_committed = len(recording.committed(record))
  if record['committed'] != num_committed:
    raise ValueError(
      f'committed is {record["committed"]}, but the verdicts commit '
      f'{num_committed} tokens'
    )


def _check_fields(record: Record, name: str) -> None:
  """Raises ValueError unless a record or a token has the fields that `_FIELDS`
  lists for `name`."""
  for field, expected in _FIELDS[name].items():
    is_optional, field = field.endswith('?'), field.removesuffix('?')
    if field not in record and not is_optional:
      raise ValueError(f'{name} lacks {field!r}')
    if field not in record:
      continue
    value = record[field]
    # JSON's true is an int to Python.
    is_valid = isinstance(value, expected) and not isinstance(value, bool)
    # 1e999 is infinite to Python, and an integer can be beyond every float.
    if is_valid and isinstance(value, int | float):
      is_valid = abs(value) <= sys.float_info.max
    if not is_valid:
      raise ValueError(f'{name} has {field!r} = {reprlib.repr(value)}')
