"""One writer at a time, by a lock that dies with the process that holds it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from specdec_jax.files.paths import is_in_bucket, user_path


@contextlib.contextmanager
def one_writer(lock: str | os.PathLike[str], what: object) -> Iterator[None]:
  """Runs the block unless another process is in it: ValueError, with `what` is
  written and by whom. In a bucket the block runs at once: two processes have to
  write the same objects there, each of them whole."""
  lock = user_path(lock)
  # Buckets have no lock that ends with its process.
  if is_in_bucket(lock):
    yield
    return
  lock.parent.mkdir(parents=True, exist_ok=True)
  # The kernel's lock (`flock`) on an open file, which is removed at the end: a
  # process that is killed leaves at most the file, which locks nobody out. The
  # file names its owner for another process's message.
  with _locked(lock, what) as file:
    try:
      # A full disk still locks. Unbuffered: closing would write it once more.
      owner = f'process {os.getpid()} on {os.uname().nodename}'
      with contextlib.suppress(OSError):
        os.write(file.fileno(), owner.encode())
      yield
    finally:
      # Removed while it is locked: see `_locked`.
      lock.unlink(missing_ok=True)


def _locked(lock: Path, what: object) -> IO[str]:
  """Returns the file, empty, open and locked."""
  import fcntl  # Not on Windows, where all else can be imported.

  while True:
    with contextlib.ExitStack() as stack:
      file = stack.enter_context(lock.open('a+', encoding='utf-8'))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        file.seek(0)
        owner = file.read() or 'another process'
        raise ValueError(
          f'{owner} is writing {what}: wait for it, stop it, or choose another '
          'place'
        ) from error
      # Its owner may have removed it since, and somebody made another.
      with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
          file.truncate(0)
          stack.pop_all()
          return file
