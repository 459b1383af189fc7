"""Writes tables of an experiment as Markdown and JSON, with their origin."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import specdec_jax
from experiments import provenance
from specdec_jax.launch import platforms

Cells = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """What was measured.

  Attributes:
    rows: cells by column, the same columns in all.
    figures: files of the same folder that belong to it.
    notes: sentences below it.
  """

  rows: Sequence[Cells]
  figures: Sequence[str] = ()
  notes: Sequence[str] = ()


def header(module: str, argv: Sequence[str], started: float) -> dict[str, str]:
  """Makes the lines above every table.

  Args:
    module: what `python -m` was given.
    argv: its arguments.
    started: `time.time()` before the table was measured.
  """
  seconds = time.time() - started
  flags = os.environ.get('XLA_FLAGS', '').strip()
  return {
    'command': shlex.join(['python', '-m', module, *map(_shorten, argv)]),
    'device': f'{platforms.device_name()}, jax {jax.__version__}',
    **({'XLA_FLAGS': flags} if flags else {}),
    'date': day(started),
    'time': f'{seconds:.0f} s',
    **of_code(),
  }


def of_code() -> dict[str, str]:
  """Names the commit that is measured, and the digest of its code."""
  return {'commit': provenance.commit() or '-', 'code': provenance.code()}


def versions(*packages: str) -> str:
  """Names packages with their versions; a checkout has that of its code."""
  ours = {'specdec_jax': specdec_jax.__version__}
  return ', '.join(
    f'{name} {ours.get(name) or importlib.metadata.version(name)}'
    for name in packages
  )


def age(contents: Mapping[str, Any]) -> str | None:
  """Says which code has changed since results were measured; None if none."""
  changed = provenance.changed_since(contents.get('code'))
  if changed == []:
    return None
  if changed is None:
    return 'of an earlier version, before results named their code'
  commit = contents['commit'].partition(' ')
  return (
    f'measured at {commit[0][:10]}{commit[1]}{commit[2]}, before later changes '
    f'of {", ".join(changed)}'
  )


def lines(path: Path) -> list[Cells]:
  """Reads the lines of JSON that a stopped run has left, and removes the last
  one if it is unfinished."""
  text = path.read_text('utf-8') if path.exists() else ''
  whole, end, rest = text.rpartition('\n')
  if rest:
    path.write_text(whole + end, 'utf-8')
  return [json.loads(line) for line in whole.splitlines()]


def day(started: float) -> str:
  """The date of a `time.time()`."""
  return datetime.datetime.fromtimestamp(started, datetime.UTC).strftime(
    '%Y-%m-%d'
  )


def interval(
  found: Sequence[float] | None, form: str = '{:.3f} to {:.3f}'
) -> str:
  """Makes a cell with both ends of an interval, empty without one."""
  return '' if found is None else form.format(*found)


def measure(
  command: tuple[str, Sequence[str]],
  folder: Path,
  name: str,
  title: str,
  make: Callable[[], Table],
  more: Mapping[str, str] = {},
) -> None:
  """Makes, writes and prints a table; see `header` and `write`."""
  started, code = time.time(), of_code()  # As it is when it is measured.
  table = make()
  above = header(*command, started) | code | {**more}
  print(write(folder, name, title=title, header=above, table=table), flush=True)


def write(
  folder: Path,
  name: str,
  *,
  title: str,
  header: Mapping[str, str],
  table: Table,
) -> str:
  """Writes one table as JSON and as Markdown; returns the latter.

  Args:
    folder: is created if it does not exist.
    name: of the files.
    title: of the table.
    header: see `header`.
    table: the rest.
  """
  folder.mkdir(parents=True, exist_ok=True)
  if len({frozenset(row) for row in table.rows}) > 1:
    raise ValueError(f'{title}: rows have different columns')
  contents = {'title': title, **header, **dataclasses.asdict(table)}
  text = json.dumps(contents, indent=2, ensure_ascii=False)
  (folder / f'{name}.json').write_text(text + '\n', encoding='utf-8')
  shown = markdown(contents)
  (folder / f'{name}.md').write_text(shown, encoding='utf-8')
  return shown


def markdown(
  contents: Mapping[str, Any], level: int = 2, folder: str = ''
) -> str:
  """Formats the contents that `write` wrote as Markdown.

  Args:
    contents: of the JSON file.
    level: of the heading.
    folder: where the figures are, relative to the page.
  """
  apart = ('title', 'rows', 'figures', 'notes', 'code')
  lines = [f'{"#" * level} {contents["title"]}', '']
  lines += [
    f'- {name}: {f"`{value}`" if name == "command" else value}'
    for name, value in contents.items()
    if name not in apart
  ]
  rows = contents['rows']
  if rows:
    columns = list(rows[0])
    lines += ['', f'| {" | ".join(columns)} |', '|---' * len(columns) + '|']
    lines += [
      f'| {" | ".join(_cell(row[column]) for column in columns)} |'
      for row in rows
    ]
  for figure in contents.get('figures', ()):
    lines += ['', f'![{contents["title"]}]({folder}{figure})']
  for note in contents.get('notes', ()):
    lines += ['', note]
  return '\n'.join(lines) + '\n'


def _cell(value: Any) -> str:
  if value is None:
    return ''
  return f'{value:.2f}' if isinstance(value, float) else str(value)


def _shorten(argument: str) -> str:
  """Removes the folders of this machine from an argument."""
  return ':'.join(
    '.../' + '/'.join(Path(part).parts[-2:]) if part.startswith('/') else part
    for part in argument.replace('=/', '=:/').split(':')
  ).replace('=:', '=')
