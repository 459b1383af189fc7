"""Progress: a bar on a terminal, else lines."""

import concurrent.futures
import contextlib
import datetime
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from specdec_jax.files.require import require
from specdec_jax.launch import visible_text

_Result = TypeVar('_Result')
# A process that fails does not wait for threads of this name.
THREAD = 'specdec'


class Bar(NamedTuple):
  """A progress bar: `advance(amount)`, and a context in which it is hidden."""

  advance: Callable[[float], None]
  hidden: Callable[[], AbstractContextManager[None]]


def is_watched() -> bool:
  """Returns whether standard error is a terminal."""
  return sys.stderr is not None and sys.stderr.isatty()


def say(sentence: str) -> None:
  """Prints a line on standard error, if that is open."""
  if sys.stderr is not None:
    line = f'specdec: {visible_text.visible_lines(sentence)}'
    with contextlib.suppress(OSError):
      print(line, file=sys.stderr, flush=True)


def show(text: str = '', *, end: str = '\n') -> None:
  """Prints a text on standard output, if there is one, as
  `visible_text.for_stream` returns it."""
  if sys.stdout is not None:
    text = visible_text.for_stream(text, sys.stdout)
    print(text, end=end, flush=True)


def console(*, is_stderr: bool = False, color: str = 'auto') -> Any:
  """Returns a `rich` console without markup; `color` is 'auto', 'always' or
  'never'."""
  purpose = 'output in a terminal'
  rich = require('rich.console', extra='models', purpose=purpose)
  settings: dict[str, Any] = {
    'auto': {'highlight': False},
    'always': {'force_terminal': True, 'color_system': 'standard'},
    'never': {'highlight': False, 'no_color': True},
  }
  return rich.Console(
    stderr=is_stderr, markup=False, emoji=False, **settings[color]
  )


def _period() -> float:
  """Returns the seconds between two lines: SPECDEC_PROGRESS in the environment,
  or 10; 0 disables them. ValueError if it is not a number."""
  text = os.environ.get('SPECDEC_PROGRESS', '10')
  try:
    seconds = float(text)
  except ValueError:
    seconds = math.nan
  if not 0 <= seconds <= threading.TIMEOUT_MAX:
    raise ValueError(
      f'SPECDEC_PROGRESS should be seconds, or 0 for no lines, got {text!r}'
    )
  return seconds or threading.TIMEOUT_MAX


@contextlib.contextmanager
def _lines(
  tell: Callable[[], str], first_after: float | None = None
) -> Iterator[None]:
  """Prints what `tell` returns every `_period` seconds while the block runs;
  the first line after `first_after`, if that is not None."""
  every = _period()
  is_over = threading.Event()

  def work() -> None:
    pause = every if first_after is None else first_after
    while not is_over.wait(pause):
      say(tell())
      pause = every

  thread = threading.Thread(target=work, daemon=True)
  thread.start()
  try:
    yield
  finally:
    is_over.set()
    thread.join()


@contextlib.contextmanager
def waiting(
  message: str, *, notice_after: float | None = None
) -> Iterator[None]:
  """Shows `message` and a spinner on a terminal while the block runs; elsewhere
  prints `_lines` with the seconds so far, the first after `notice_after`."""
  if is_watched():
    screen = console(is_stderr=True)
    with screen.status(screen.render_str(visible_text.visible(message))):
      yield
    return
  started = time.monotonic()
  passed = lambda: f'{message} ... {time.monotonic() - started:.0f} s'
  with _lines(passed, notice_after):
    yield


def _task_line(task: Any) -> str:
  """Returns the progress of a task of rich as a line."""
  line = f'{task.completed:.0f} of {task.total}'
  left = task.time_remaining
  if left is not None:
    line += f', {datetime.timedelta(seconds=left)} left'
  return f'{task.description}: {line}'


@contextlib.contextmanager
def bar(message: str, total: int, *, is_shown: bool = True) -> Iterator[Bar]:
  """Yields a bar with the time left, or `_lines` if there is no terminal."""
  if not is_shown:
    yield Bar(lambda amount: None, contextlib.nullcontext)
    return
  # flax requires it, and imports it.
  from rich import progress

  tasks = progress.Progress(
    progress.SpinnerColumn(),
    progress.TextColumn('{task.description}', markup=False),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeElapsedColumn(),
    progress.TimeRemainingColumn(),
    console=console(is_stderr=True),
    # Steps may take minutes, and the speed is estimated from two of them.
    speed_estimate_period=600,
    transient=True,
    # Otherwise rich would print redirected standard output to the terminal.
    redirect_stdout=False,
    redirect_stderr=False,
  )
  task = tasks.add_task(visible_text.visible(message), total=total)
  advance = lambda amount: tasks.update(task, advance=amount)
  if not is_watched():
    with _lines(lambda: _task_line(tasks.tasks[0])):
      yield Bar(advance, contextlib.nullcontext)
    return

  @contextlib.contextmanager
  def hidden() -> Iterator[None]:
    tasks.stop()
    yield
    tasks.start()

  with tasks:
    yield Bar(advance, hidden)


def interruptible(
  function: Callable[[], _Result], *, seconds: float = math.inf
) -> _Result:
  """Calls a long-running function in a thread, so that an interrupt is raised
  at once, or a TimeoutError after `seconds`. The function keeps running: see
  `leave_unfinished_work`."""
  # Python raises an interrupt only between its own instructions.
  future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

  def work() -> None:
    try:
      future.set_result(function())
    except BaseException as error:  # Raised by `future.result`.
      future.set_exception(error)

  # Python does not wait for a daemon thread at its end.
  threading.Thread(target=work, daemon=True, name=THREAD).start()
  deadline = time.monotonic() + seconds
  while not concurrent.futures.wait([future], min(0.5, seconds)).done:
    if time.monotonic() > deadline:
      raise TimeoutError
  return future.result()


def leave_unfinished_work(status: int) -> None:
  """Ends the process if an `interruptible` call is still running."""
  # Python would wait for the call at its end, or destroy what it uses.
  if any(thread.name == THREAD for thread in threading.enumerate()):
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    os._exit(status)
