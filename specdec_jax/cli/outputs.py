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
  """Says something on standard error, if that is a terminal."""
  if progress.is_watched():
    progress.say(sentence)


def ending(reasons: Sequence[str]) -> str:
  """Says how texts ended, from their `Completion.finish_reason`."""
  counts = {x: reasons.count(x) for x in _ENDS if x in reasons}
  if len(reasons) == 1:
    return f'ended {_ENDS[reasons[0]]}'
  return ', '.join(f'{n} ended {_ENDS[x]}' for x, n in counts.items())


def check(
  outputs: Mapping[str, str | None], inputs: Mapping[str, str | None]
) -> None:
  """Raises ValueError for an output that cannot be written, or two options with
  one path, before hours are spent; None is an option not given."""
  files = lambda paths: [
    each for each in paths.items() if each[1] not in (None, STANDARD_OUTPUT)
  ]
  # Paths are compared resolved, so that ./a and a are one.
  taken = {_real(path): option for option, path in files(inputs)}
  # Outputs join `taken` one by one: two of them must not share a path.
  for option, path in files(outputs):
    if reason := _obstacle(path):
      raise ValueError(f'cannot write {option} {path}: {reason}')
    other = taken.setdefault(_real(path), option)
    if other != option:
      raise ValueError(f'{other} and {option} are both {path}')


def _real(path: str) -> str:
  """Returns the one name of a path, without links."""
  found = user_path(path)
  return str(found) if is_in_bucket(found) else os.path.realpath(found)


def _obstacle(path: str) -> str | None:
  if not path:
    return 'the path is empty'
  found = user_path(path)
  if is_in_bucket(found):
    return 'it is a folder' if found.is_dir() else None
  folder = Path(os.path.realpath(found)).parent
  if os.path.isdir(found):
    return 'it is a folder'
  if not folder.is_dir():
    return f'there is no folder {folder}'
  # A new file changes its folder.
  changed = [found if os.path.exists(found) else folder]
  if os.path.isfile(found):  # It is made anew beside the old one.
    changed.append(folder)
  if not all(os.access(each, os.W_OK) for each in changed):
    return 'permission denied'
  # Some folders, such as /proc, take no file though they allow it.
  if folder in changed:
    try:
      tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
      return f'no file can be made in {folder} ({error.strerror})'
  return None


def _is_device(place: Path) -> bool:
  """Tells whether there is a device or a pipe, and no file."""
  return place.exists() and not place.is_file()


def reserved(path: str | None) -> AbstractContextManager[None]:
  """Locks a local file of results while the block runs; ValueError if another
  process writes it. What cannot be written is left to `check`."""
  if path in (None, STANDARD_OUTPUT) or _obstacle(path):
    return contextlib.nullcontext()
  place = user_path(path)
  if is_in_bucket(place) or _is_device(place):
    return contextlib.nullcontext()
  # Not beside the file, where a killed process would leave the lock; under the
  # name of what a link points to, where the file is replaced.
  final = os.path.realpath(place)
  folder = compilation_cache.writable_folder() or Path(tempfile.gettempdir())
  name = hashlib.sha256(os.fsencode(final)).hexdigest()[:32]
  return one_writer(folder / 'locks' / name, path)


@contextlib.contextmanager
def json_lines(path: str | None) -> Iterator[Callable[[dict], None]]:
  """Yields what writes an object as a line, at once; nothing without a path."""
  if path is None:
    yield lambda record: None
    return
  with opened(path) as file:
    yield lambda record: _write(file, _json_of(record, file))


def _json_of(value: object, file: TextIO, indent: int | None = None) -> str:
  """Returns a value as JSON; ValueError for NaN. Characters that the encoding
  of a file lacks, or that would act on a terminal, are escaped."""
  as_json = functools.partial(json.dumps, value, allow_nan=False, indent=indent)
  text = as_json(ensure_ascii=False)
  is_unicode = (file.encoding or '').lower().startswith('utf')
  is_shown = not file.isatty() or visible_lines(text) == text
  return text if is_unicode and is_shown else as_json(ensure_ascii=True)


def report(
  args: argparse.Namespace, figures: Mapping[str, Any], *shown: object
) -> int:
  """Writes --json, and shows the figures unless it is `-`, with the `doubts`
  that are among them; returns 0."""
  if args.json:
    with opened(args.json) as file:
      _write(file, _json_of(figures, file, indent=2))
  if args.json != STANDARD_OUTPUT:
    screen = progress.console(color=args.color)
    told = doubts.sentence(figures.get('doubts', ()))
    for part in (*shown, *([told] if told else [])):
      part = visible_lines(part) if isinstance(part, str) else part
      screen.print(part, highlight=False, crop=False)
  return 0


def table(
  columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = ''
) -> object:
  """Makes a `rich` table of figures; with a title, its first column has names.
  Titles of columns break between words, figures nowhere."""
  from rich.table import Table

  made = Table(title=visible(title) or None)
  cells = [tuple(map(visible, row)) for row in rows]
  # Of ('gamma', 'tokens/s with the prefill') and ('11', '1234.5'): widths 5
  # and 8, of 'gamma' and 'tokens/s'; the longer title takes three lines.
  for i, column in enumerate(columns):
    # A column is as wide as its longest word or figure.
    justify: Literal['left', 'right'] = 'left' if title and not i else 'right'
    heading = visible(column)
    words = (*heading.split(), *(row[i] for row in cells))
    made.add_column(
      heading,
      justify=justify,
      min_width=max(map(len, words), default=0),
    )
  for row in cells:
    made.add_row(*row)
  return made


def _write(file: TextIO, text: str) -> None:
  # Flushed, so that an interrupt keeps it.
  file.write(text + '\n')
  file.flush()


@contextlib.contextmanager
def opened(path: str) -> Iterator[TextIO]:
  """Opens a text file to write, or standard output; errors name `path`.

  The file has this name when the block ends well. Otherwise an old one stays,
  and what was written is kept beside it, where standard error says.
  """
  if path == STANDARD_OUTPUT:
    yield sys.stdout
    return

  say = lambda begun: progress.say(
    f'{path} is as it was; what this run wrote is in {begun}'
  )
  place = user_path(path)
  kept: AbstractContextManager[Path] = contextlib.nullcontext(place)
  if not _is_device(place):
    kept = replacing.file(place, on_failure=say)
  # The file is closed first, and only then put in the place of the old one.
  with kept as begun, _written(begun, path) as file:
    yield file


@contextlib.contextmanager
def _written(begun: Path, path: str) -> Iterator[TextIO]:
  """Opens the file `begun`, whose errors name `path`."""
  # Half of a surrogate pair, which UTF-8 cannot say, becomes its JSON escape.
  file = open(  # noqa: SIM115 - its closing is handled below
    begun, 'w', encoding='utf-8', errors='backslashreplace', newline='\n'
  )
  try:
    yield file
  finally:
    # What could not be written is still in the buffer, and fails again.
    try:
      file.close()
    except OSError as error:
      raise OSError(error.errno, error.strerror, path) from error


def finite(value: float) -> float | None:
  """Returns a number that JSON can hold, or None if it is infinite or NaN."""
  return value if math.isfinite(value) else None
