"""A process per system, of which one at a time decodes."""

import contextlib
import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from experiments.peers.systems import System


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
  """A system in a process of its own, so that no runtime's threads are in the
  way of another's.

  Attributes:
    name: of the system, its dtype included.
    version: see `System`.
    ways: drafters.
    ids: see `System`.
    eos_ids: see `System`.
  """

  name: str
  version: str
  ways: Sequence[str]
  ids: Sequence[list[int]]
  eos_ids: Sequence[int]
  connection: Connection
  process: multiprocessing.process.BaseProcess

  def decode(self, way: str, index: int) -> tuple[list[int], float]:
    """New tokens of a prompt, and the seconds they took, prefill included.

    Raises:
      ValueError: what went wrong in the process.
    """
    self.connection.send((way, index))
    return _received(self.connection, self.name)

  def close(self) -> None:
    with contextlib.suppress(OSError):  # It may have ended by an error.
      self.connection.send(None)
    self.process.join()


def start(name: str, make: Callable[..., System], *args: Any) -> Worker:
  """Starts a process, and waits until its system is ready.

  Args:
    name: of the system.
    make: a function of `systems`.
    *args: its arguments.

  Raises:
    ValueError: if the system cannot be had, with its reason.
  """
  # Forked copies of a runtime with threads hang.
  context = multiprocessing.get_context('spawn')
  here, there = context.Pipe()
  process = context.Process(target=_run, args=(there, make, args), daemon=True)
  process.start()
  there.close()
  facts = _received(here, name)
  return Worker(name=name, connection=here, process=process, **facts)


def _received(connection: Connection, name: str) -> Any:
  try:
    answer = connection.recv()
  except EOFError:
    answer = RuntimeError('its process ended')
  if isinstance(answer, Exception):
    raise ValueError(f'{name}: {answer!r}')
  return answer


def _run(
  connection: Connection, make: Callable[..., System], args: Sequence[Any]
) -> None:
  """What the process does: makes the system, then decodes as it is told."""
  try:
    system = make(*args)
    connection.send(
      {
        'version': system.version,
        'ways': tuple(system.ways),
        'ids': tuple(system.ids),
        'eos_ids': tuple(system.eos_ids),
      }
    )
    while (request := connection.recv()) is not None:
      way, index = request
      started = time.perf_counter()
      tokens = system.ways[way](index)
      connection.send((tokens, time.perf_counter() - started))
  except Exception as error:  # The parent says what it was.
    connection.send(RuntimeError(f'{type(error).__name__}: {error}'))
