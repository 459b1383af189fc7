"""Several processes that decode or train together, one per host. All read the
data and run the same programs; the first one writes, except for arrays that are
sharded over processes, which all write."""

import argparse
import contextlib
import errno
import functools
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from specdec_jax.files.paths import user_path
from specdec_jax.launch import failures, numbers, progress

_Result = TypeVar('_Result')
# Timeout for all processes to start, and the time until a notice.
_JOIN_SECONDS = 120
_NOTICE_SECONDS = 5
# How often processes check whether another one has failed, how long a failed
# process waits until they know, and the key of its message.
_LOOK_SECONDS = 2
_LEAVE_SECONDS = 10
_FAILED = 'specdec/failed'
# Numbers the calls of `is_ending`.
_CALLS = itertools.count(1)
# The longest path, on Linux and in buckets.
_MAX_TEXT = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument_group('processes').add_argument
  add(
    '--multiprocess',
    action='store_true',
    help='join the other processes of this job: automatically on a TPU slice '
    'or a cluster, elsewhere with the next three flags',
  )
  add(
    '--coordinator_address',
    metavar='HOST:PORT',
    type=_address,
    help='address of process 0: a free port of its host',
  )
  add(
    '--process_count',
    type=numbers.positive_int,
    help='number of processes of the job',
  )
  add(
    '--process_index',
    type=numbers.count,
    help='index of this process, from 0',
  )


class Meeting(NamedTuple):
  """How the processes of a job find each other; jax determines what is None."""

  coordinator_address: str | None
  process_count: int | None
  process_index: int | None


def from_args(args: argparse.Namespace) -> Meeting | None:
  """Returns the meeting of the flags of `add_arguments`; None for a single
  process. ValueError if only a part of it is given."""
  meeting = Meeting(*(getattr(args, name) for name in Meeting._fields))
  num_given = sum(value is not None for value in meeting)
  if 0 < num_given < len(meeting):
    raise ValueError(f'--{", --".join(Meeting._fields)} belong together')
  return meeting if num_given or args.multiprocess else None


def _address(text: str) -> str:
  host, colon, port = text.rpartition(':')
  is_port = port.isdecimal() and 0 < int(port) < 2**16
  if not (host and colon and is_port):
    raise argparse.ArgumentTypeError(f'must be HOST:PORT, got {text}')
  return text


@contextlib.contextmanager
def joined(meeting: Meeting | None) -> Iterator[None]:
  """Connects this process with the others, if any, while the block runs. All
  end with the status of the first that fails. ValueError if they cannot join.
  """
  if meeting is None:
    yield
    return
  if getattr(jax.config, 'jax_platforms', None) == 'cpu':
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  _join(meeting)
  # The thread that acquires `ending` decides how this process ends.
  ending, is_over = threading.Lock(), threading.Event()
  # While this thread lives, `progress.leave_unfinished_work` ends a failed
  # process, whose collectives may never finish.
  watch = threading.Thread(
    target=_follow, args=(ending, is_over), name=progress.THREAD, daemon=True
  )
  watch.start()
  try:
    if jax.default_backend() == 'cpu':
      # Cached programs may have collectives in another order, and hang.
      jax.config.update('jax_enable_compilation_cache', False)
    yield
  except BaseException as error:
    if not ending.acquire(blocking=False):
      threading.Event().wait()  # Until `_follow` has ended the process.
    _, status = failures.explain(error)
    _leave(f'{jax.process_index()} {status}')
    raise
  is_over.set()
  watch.join()
  jax.distributed.shutdown()


def _follow(ending: threading.Lock, is_over: threading.Event) -> None:
  """Ends this process when another one has failed."""
  client: Any = distributed.global_state.client
  while not is_over.wait(_LOOK_SECONDS):
    try:
      index, status = client.key_value_try_get(_FAILED).split()
    except RuntimeError:  # No process has failed.
      continue
    if not ending.acquire(blocking=False):
      threading.Event().wait()
    progress.say(f'process {index} of this job has failed; see its own message')
    _leave()
    os._exit(int(status))


def _leave(failure: str | None = None) -> None:
  """Notifies the other processes of a failure, and waits until they know."""
  # If process 0 ended earlier, jax would abort the others.
  client: Any = distributed.global_state.client
  with contextlib.suppress(RuntimeError):  # Another process was first.
    if failure:
      client.key_value_set(_FAILED, failure)
  with contextlib.suppress(RuntimeError):  # A process was killed.
    client.wait_at_barrier(_FAILED, _LEAVE_SECONDS * 1000)
    jax.distributed.shutdown()


def _join(meeting: Meeting) -> None:
  """Waits for all processes, for `_JOIN_SECONDS` at most."""
  address, count, index = meeting
  # jax's own timeout ends the process with a stack trace of C++, and it ignores
  # interrupts until then.
  peers = 'the other processes'
  if count is not None:
    peers = f'{count - 1} other process{"es" if count > 2 else ""}'
  place = f' at {address}' if address else ''
  if address and index == 0:
    _check_free(int(address.rpartition(':')[2]))
  join = functools.partial(
    jax.distributed.initialize,
    *(address, count, index),
    initialization_timeout=2 * _JOIN_SECONDS,
  )
  message = f'waiting up to {_JOIN_SECONDS} s for {peers}{place}'
  try:
    with progress.waiting(message, notice_after=_NOTICE_SECONDS):
      progress.interruptible(join, seconds=_JOIN_SECONDS)
  except TimeoutError as error:
    # An error that is worth a retry: machines may start late.
    raise ConnectionError(
      failures.AWAY,
      f'{peers} and this process have not met{place} within {_JOIN_SECONDS} '
      's: start all of them, each with an address of process 0 that it reaches',
    ) from error
  except (RuntimeError, ValueError) as error:
    raise ValueError(f'cannot join {peers}{place}: {error}') from error


def _check_free(port: int) -> None:
  """Raises ValueError for a port that is in use, with which jax crashes."""
  try:
    socket.create_server(
      ('::', port),
      family=socket.AF_INET6,
      dualstack_ipv6=socket.has_dualstack_ipv6(),
    ).close()
  except OSError as error:
    if error.errno == errno.EADDRINUSE:
      raise ValueError(
        f'--coordinator_address: port {port} of this host is taken: choose '
        'another'
      ) from error


def is_first() -> bool:
  """Returns whether this is the process that writes."""
  return jax.process_index() == 0


def is_ending() -> bool:
  """Tells whether one of several processes has got SIGTERM, as before a machine
  is taken away: the same in all of them, at the same call. They all have to
  call it equally often, wherever they could stop. False in a single process,
  which SIGTERM ends."""
  # jax takes the signal: its handler alone would let the process run on. It
  # names a call that no process has reached yet, counted from 1.
  if distributed.global_state.preemption_sync_manager is None:
    return False
  return multihost_utils.reached_preemption_sync_point(next(_CALLS))


def number_of_first(number: int) -> int:
  """Returns the first process's number, in all processes."""
  return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def array_of_first(array: np.ndarray) -> np.ndarray:
  """Returns the first process's array, of one shape in all, in all of them."""
  return np.asarray(multihost_utils.broadcast_one_to_all(array))


def ask_first(function: Callable[[], _Result]) -> _Result:
  """Calls a function in the first process, and returns its result there; the
  other processes get True or False, the truth of that result.

  An error of the first process is raised in all: there as it is, elsewhere as
  ValueError, or as ConnectionError for a server that does not answer.
  """
  result: Any = None
  error: Exception | None = None
  if is_first():
    try:
      result = function()
    except (ValueError, OSError) as raised:
      error = raised
  failed = -2 if failures.is_away(error) else -1
  # One number is sent: -2 or -1 for errors, else whether the result is true.
  answer = number_of_first(failed if error else int(bool(result)))
  if error:
    raise error
  if answer < 0:
    reason = 'the first process stopped; see its own message'
    if answer == -1:
      raise ValueError(reason)
    raise ConnectionError(failures.AWAY, reason)
  is_true: Any = bool(answer)
  return result if is_first() else is_true


@contextlib.contextmanager
def entered_by_first(
  context: contextlib.AbstractContextManager[Path],
) -> Iterator[Path]:
  """Enters a context that gives a path in the first process only; all processes
  get the path. At the end all wait until the first one has left it."""
  with contextlib.ExitStack() as stack:
    entered: list[Path] = []
    ask_first(lambda: entered.append(stack.enter_context(context)))
    # Only arrays of a fixed size can be sent.
    text = ''.join(map(str, entered)).encode().ljust(_MAX_TEXT, b'\0')
    sent = array_of_first(np.frombuffer(text, np.uint8)).tobytes()
    yield user_path(sent.rstrip(b'\0').decode())
    number_of_first(0)  # Waits until all have written.
    ask_first(stack.close)
