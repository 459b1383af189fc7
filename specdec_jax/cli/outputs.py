"""Where results go: checked before the work, written while it goes on."""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_jax.files import replacing
from specdec_jax.files.local_path import local_path
from specdec_jax.launch import progress

STANDARD_OUTPUT = '-'


def check(
  outputs: Mapping[str, str | None], inputs: Mapping[str, str | None]
) -> None:
  """Finds outputs that cannot be written before hours are spent on them.

  Creates and empties nothing. Both are paths by option, None where an option
  was not given; inputs must not be overwritten.

  Raises:
    ValueError: if a path cannot be written, or two options share one.
  """
  files = lambda paths: [
    (option, path)
    for option, path in paths.items()
    if path not in (None, STANDARD_OUTPUT)
  ]
  for _, path in files({**outputs, **inputs}):
    local_path(path)
  taken = {os.path.realpath(path): option for option, path in files(inputs)}
  for option, path in files(outputs):
    if reason := _obstacle(path):
      raise ValueError(f'cannot write {option} {path}: {reason}')
    other = taken.setdefault(os.path.realpath(path), option)
    if other != option:
      raise ValueError(f'{other} and {option} are both {path}')


def _obstacle(path: str) -> str | None:
  """Why a file cannot be written, as far as can be known before."""
  if not path:
    return 'the path is empty'
  folder = Path(os.path.realpath(path)).parent
  if os.path.isdir(path):
    return 'it is a folder'
  if not folder.is_dir():
    return f'there is no folder {folder}'
  is_there = os.path.exists(path)
  # A file appears in its folder, beside an old one first; a device is written.
  is_made = not is_there or os.path.isfile(path)
  if (is_there and not os.access(path, os.W_OK)) or (
    is_made and not os.access(folder, os.W_OK)
  ):
    return 'permission denied'
  return None


@contextlib.contextmanager
def json_lines(path: str | None) -> Iterator[Callable[[dict], None]]:
  """Yields what writes an object as one line, at once, so that an interrupt
  keeps it; if `path` is None, it does nothing."""
  if path is None:
    yield lambda record: None
    return
  with opened(path) as file:
    # What a terminal's encoding lacks, JSON can still say.
    is_ascii = not (file.encoding or '').lower().startswith('utf')

    def write(record: dict[str, Any]) -> None:
      line = json.dumps(record, ensure_ascii=is_ascii, allow_nan=False)
      file.write(line + '\n')
      file.flush()

    yield write


def report(args: argparse.Namespace, figures: Any, *shown: Any) -> int:
  """Writes figures to --json, and shows them unless that is standard output;
  the exit status."""
  if args.json:
    write_json(args.json, figures)
  if args.json != STANDARD_OUTPUT:
    screen = progress.console(color=args.color)
    for part in shown:
      screen.print(part, highlight=False)
  return 0


def table(
  columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = ''
) -> Any:
  """A `rich` table of figures; with a title, its first column has names."""
  from rich.table import Table

  made = Table(title=title or None)
  for i, column in enumerate(columns):
    made.add_column(column, justify='left' if title and not i else 'right')
  for row in rows:
    made.add_row(*row)
  return made


def write_json(path: str, value: Any) -> None:
  """Writes one value, indented."""
  with opened(path) as file:
    file.write(json.dumps(value, indent=2, allow_nan=False) + '\n')
    file.flush()


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
  """A text file to write, or standard output.

  An old file of that name is replaced when the block ends well. Otherwise it
  stays, and what was written is kept beside it, under a name that standard
  error tells.

  Raises:
    OSError: that names `path`, if it cannot be written.
    ValueError: if standard output is closed.
  """

  def say(begun: Path) -> None:
    if sys.stderr is not None:
      print(
        f'specdec: {path} is as it was; what this run wrote is in {begun}',
        file=sys.stderr,
      )

  if path != STANDARD_OUTPUT:
    kept: Any = contextlib.nullcontext(path)  # Nothing, a device or a pipe.
    if os.path.isfile(path):
      kept = replacing.file(path, on_failure=say)
    with kept as begun, _written(begun, path) as file:
      yield file
  elif sys.stdout is None:
    raise ValueError('standard output is closed')
  else:
    yield sys.stdout


@contextlib.contextmanager
def _written(begun: str | Path, path: str) -> Iterator[Any]:
  """The open file `begun`, whose errors name `path`."""
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
  """A number as JSON can hold it; None if it is infinite or no number."""
  return value if math.isfinite(value) else None
