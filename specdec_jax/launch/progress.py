"""What a person sees while waiting; nearly silent when nobody is watching."""

import concurrent.futures
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

_Result = TypeVar('_Result')
# The name of threads that a process which fails does not wait for.
THREAD = 'specdec'


class Bar(NamedTuple):
  """A progress bar: `advance(amount)` when more is done, and a context in which
  it is hidden, so that other things can be printed."""

  advance: Callable[[float], None]
  hidden: Callable[[], AbstractContextManager[None]]


def is_watched() -> bool:
  """Tells whether standard error is a terminal."""
  return sys.stderr is not None and sys.stderr.isatty()


def console(*, is_stderr: bool = False, color: str = 'auto') -> Any:
  """Returns a `rich` console; `color` is 'auto', 'always' or 'never'."""
  from rich.console import Console

  settings: dict[str, Any] = {
    'auto': {'highlight': False},
    'always': {'force_terminal': True, 'color_system': 'standard'},
    'never': {'highlight': False, 'no_color': True},
  }
  return Console(stderr=is_stderr, **settings[color])


@contextlib.contextmanager
def waiting(
  message: str, *, notice_after: float | None = None
) -> Iterator[None]:
  """Shows `message` and a spinner on a terminal while the block runs; elsewhere
  standard error says it once after so many seconds, if that is not None."""

  def notice() -> None:
    with contextlib.suppress(OSError):
      print(f'specdec: {message} ...', file=sys.stderr, flush=True)

  if is_watched():
    with console(is_stderr=True).status(message):
      yield
    return
  timer = threading.Timer(notice_after or 0, notice)
  timer.daemon = True
  if notice_after is not None and sys.stderr is not None:
    timer.start()
  try:
    yield
  finally:
    timer.cancel()


@contextlib.contextmanager
def bar(message: str, total: int, *, is_shown: bool = True) -> Iterator[Bar]:
  """Yields a progress bar on a terminal, and nothing anywhere else."""
  if not is_shown or not is_watched():
    yield Bar(lambda amount: None, contextlib.nullcontext)
    return
  from rich import progress

  tasks = progress.Progress(
    progress.SpinnerColumn(),
    progress.TextColumn('{task.description}'),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeElapsedColumn(),
    progress.TimeRemainingColumn(),
    console=console(is_stderr=True),
    transient=True,
    # Else rich takes what is printed to a redirected standard output, too, to
    # the terminal.
    redirect_stdout=False,
    redirect_stderr=False,
  )
  task = tasks.add_task(message, total=total)

  @contextlib.contextmanager
  def hidden() -> Iterator[None]:
    tasks.stop()
    yield
    tasks.start()

  with tasks:
    yield Bar(lambda amount: tasks.update(task, advance=amount), hidden)


def interruptible(
  function: Callable[[], _Result], *, seconds: float = math.inf
) -> _Result:
  """Calls a function that computes for long, in a thread: Python sees an
  interrupt only between its own instructions, and so the caller does at once.
  A TimeoutError after `seconds`, when it goes on, see `leave_unfinished_work`.
  """
  future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

  def work() -> None:
    try:
      future.set_result(function())
    except BaseException as error:  # The caller's to handle.
      future.set_exception(error)

  # A daemon: Python ends without waiting for it.
  threading.Thread(target=work, daemon=True, name=THREAD).start()
  deadline = time.monotonic() + seconds
  while not concurrent.futures.wait([future], min(0.5, seconds)).done:
    if time.monotonic() > deadline:
      raise TimeoutError
  return future.result()


def leave_unfinished_work(status: int) -> None:
  """Ends the process if an `interruptible` call is still running: Python would
  wait for it, or tear down what it uses."""
  if any(thread.name == THREAD for thread in threading.enumerate()):
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    os._exit(status)
