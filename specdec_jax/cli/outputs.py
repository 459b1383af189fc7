"""Where results go: checked before the work, written while it goes on."""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TextIO

from specdec_jax.files import replacing
from specdec_jax.files.one_writer import one_writer
from specdec_jax.files.paths import is_in_bucket, user_path
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.launch.visible_text import visible, visible_lines
from specdec_jax.theory import doubts

STANDARD_OUTPUT = '-'
# By `Completion.finish_reason`.
_ENDS = {
  'stop': 'at EOS or a stop string',
  'length': 'at the token limit',
  'nan': 'where no token could be drawn',
}


def tell(sentence: str) -> None:
  """Prints a sentence on standard error, if that is a terminal."""
  if progress.is_watched():
    progress.say(sentence)


def ending(reasons: Sequence[str]) -> str:
  """Describes how texts ended, from their `Completion.finish_reason`."""
  if len(reasons) == 1:
    return f'ended {_ENDS[reasons[0]]}'
  counts = {name: reasons.count(name) for name in _ENDS}
  return ', '.join(
    f'{count} ended {_ENDS[name]}' for name, count in counts.items() if count
  )


def check(
  outputs: Mapping[str, str | None], inputs: Mapping[str, str | None]
) -> None:
  """Raises ValueError for an output that cannot be written, or two options with
  the same path, before the work starts.

  Args:
    outputs: paths by option; None: not given.
    inputs: the same of files that are read.
  """
  # Paths are compared resolved: ./a and a are the same.
  taken = {_real(path): option for option, path in _files(inputs)}
  # Outputs are added one by one: no two may share a path.
  for option, path in _files(outputs):
    reason = _obstacle(path)
    if reason:
      raise ValueError(f'cannot write {option} {path}: {reason}')
    first_option = taken.setdefault(_real(path), option)
    if first_option != option:
      raise ValueError(f'{first_option} and {option} are both {path}')


def _files(paths: Mapping[str, str | None]) -> list[tuple[str, str]]:
  """Returns options and paths that name a file."""
  return [
    (option, path)
    for option, path in paths.items()
    if path is not None and path != STANDARD_OUTPUT
  ]


def _real(path: str) -> str:
  """Returns a path with links resolved."""
  location = user_path(path)
  return str(location) if is_in_bucket(location) else os.path.realpath(location)


def _obstacle(path: str) -> str | None:
  """Returns why a file cannot be written; None if it can."""
  if not path:
    return 'the path is empty'
  location = user_path(path)
  if is_in_bucket(location):
    return 'it is a folder' if location.is_dir() else None
  folder = Path(os.path.realpath(location)).parent
  if os.path.isdir(location):
    return 'it is a folder'
  if not folder.is_dir():
    return f'there is no folder {folder}'
  # What must be writable: the folder of a new file; of an existing one the
  # folder as well, since the new content is written beside it first.
  changed = [location if os.path.exists(location) else folder]
  if os.path.isfile(location):
    changed.append(folder)
  if not all(os.access(target, os.W_OK) for target in changed):
    return 'permission denied'
  # Some folders, such as /proc, are writable by their mode, but take no files.
  if folder in changed:
    try:
      tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
      return f'no file can be made in {folder} ({error.strerror})'
  return None


def _is_device(place: Path) -> bool:
  """Returns whether a path is a device or a pipe."""
  return place.exists() and not place.is_file()


def reserved(path: str | None) -> AbstractContextManager[None]:
  """Locks an output file while the block runs; ValueError if another process
  writes it. Files that cannot be written are reported by `check`."""
  if path in (None, STANDARD_OUTPUT) or _obstacle(path):
    return contextlib.nullcontext()
  place = user_path(path)
  if is_in_bucket(place) or _is_device(place):
    return contextlib.nullcontext()
  # The lock is in a cache folder, since a killed process leaves it behind, and
  # named after the resolved path, where the file will be replaced.
  final = os.path.realpath(place)
  folder = compilation_cache.writable_folder() or Path(tempfile.gettempdir())
  name = hashlib.sha256(os.fsencode(final)).hexdigest()[:32]
  return one_writer(folder / 'locks' / name, path)


@contextlib.contextmanager
def json_lines(path: str | None) -> Iterator[Callable[[dict], None]]:
  """Yields a function that writes an object as a line and flushes it; without
  a path it does nothing."""
  if path is None:
    yield lambda record: None
    return
  with opened(path) as file:
    yield lambda record: _write(file, _json_of(record, file))


def _json_of(value: object, file: TextIO, indent: int | None = None) -> str:
  """Returns a value as JSON; ValueError for NaN. Characters that the file's
  encoding lacks, or that control a terminal, are escaped."""
  as_json = functools.partial(json.dumps, value, allow_nan=False, indent=indent)
  text = as_json(ensure_ascii=False)
  is_unicode = (file.encoding or '').lower().startswith('utf')
  is_shown = not file.isatty() or visible_lines(text) == text
  return text if is_unicode and is_shown else as_json(ensure_ascii=True)


def report(
  args: argparse.Namespace, figures: Mapping[str, Any], *shown: object
) -> int:
  """Writes --json; unless that is `-`, prints `shown`, and the `doubts` among
  the figures. Returns the exit status 0."""
  if args.json:
    with opened(args.json) as file:
      _write(file, _json_of(figures, file, indent=2))
  if args.json != STANDARD_OUTPUT:
    screen = progress.console(color=args.color)
    warning = doubts.sentence(figures.get('doubts', ()))
    parts = [*shown, warning] if warning else shown
    for part in parts:
      if isinstance(part, str):
        part = visible_lines(part)
      screen.print(part, highlight=False, crop=False)
  return 0


def table(
  columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = ''
) -> object:
  """Makes a `rich` table of figures; with a title, its first column has names
  and is aligned left. Headings wrap between words, figures do not."""
  from rich.table import Table

  table_ = Table(title=visible(title) or None)
  cells = [tuple(map(visible, row)) for row in rows]
  # A column is as wide as its longest word or figure. Of the headings 'gamma'
  # and 'tokens/s with the prefill' over '11' and '1234.5': widths 5 and 8, and
  # the longer heading takes three lines.
  for i, column in enumerate(columns):
    justify: Literal['left', 'right'] = 'left' if title and not i else 'right'
    heading = visible(column)
    words = (*heading.split(), *(row[i] for row in cells))
    width = max(map(len, words), default=0)
    table_.add_column(heading, justify=justify, min_width=width)
  for row in cells:
    table_.add_row(*row)
  return table_


def _write(file: TextIO, text: str) -> None:
  # Flushed, so that an interrupted run leaves it in the file.
  file.write(text + '\n')
  file.flush()


@contextlib.contextmanager
def opened(path: str) -> Iterator[TextIO]:
  """Opens a text file to write, or standard output; errors name `path`.

  The file gets this name when the block ends without an error. Otherwise an
  existing file is left unchanged, and standard error says where the partial
  output is.
  """
  if path == STANDARD_OUTPUT:
    yield sys.stdout
    return

  say = lambda begun: progress.say(
    f'{path} is unchanged; what this run wrote is in {begun}'
  )
  place = user_path(path)
  replacement: AbstractContextManager[Path] = contextlib.nullcontext(place)
  if not _is_device(place):
    replacement = replacing.file(place, on_failure=say)
  # The file is closed before it replaces the old one.
  with replacement as begun, _written(begun, path) as file:
    yield file


@contextlib.contextmanager
def _written(begun: Path, path: str) -> Iterator[TextIO]:
  """Opens the file `begun`, whose errors name `path`."""
  # Half of a surrogate pair, which UTF-8 cannot encode, becomes a JSON escape.
  file = open(  # noqa: SIM115 - its closing is handled below
    begun, 'w', encoding='utf-8', errors='backslashreplace', newline='\n'
  )
  try:
    yield file
  finally:
    # Closing flushes the buffer once more, and fails if the disk is full.
    try:
      file.close()
    except OSError as error:
      raise OSError(error.errno, error.strerror, path) from error


def finite(value: float) -> float | None:
  """Returns a number that JSON can hold, or None if it is infinite or NaN."""
  return value if math.isfinite(value) else None
