"""What a person sees while waiting; silent when nobody is watching."""

import contextlib
from collections.abc import Iterator
from typing import Any


def console(*, is_stderr: bool = True, color: str = 'auto') -> Any:
  """A `rich` console.

  Args:
    is_stderr: writes to standard error instead of standard output.
    color: 'auto', 'always' or 'never'.
  """
  from rich.console import Console

  if color == 'always':
    return Console(
      stderr=is_stderr, force_terminal=True, color_system='standard'
    )
  if color == 'never':
    return Console(stderr=is_stderr, no_color=True, highlight=False)
  return Console(stderr=is_stderr, highlight=False)


@contextlib.contextmanager
def waiting(message: str) -> Iterator[None]:
  """Shows `message` and a spinner on a terminal while the block runs."""
  screen = console()
  if not screen.is_terminal:
    yield
    return
  with screen.status(message):
    yield


@contextlib.contextmanager
def bar(message: str, total: int) -> Iterator[Any]:
  """A progress bar on a terminal.

  Yields:
    `advance(num_done, note='')`.
  """
  from rich import progress

  screen = console()
  columns = (
    progress.TextColumn('{task.description}'),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeRemainingColumn(),
    progress.TextColumn('{task.fields[note]}'),
  )
  with progress.Progress(
    *columns,
    console=screen,
    transient=True,
    disable=not screen.is_terminal,
  ) as tasks:
    task = tasks.add_task(message, total=total, note='')

    def advance(num_done: int, note: str = '') -> None:
      tasks.update(task, advance=num_done, note=note)

    yield advance
