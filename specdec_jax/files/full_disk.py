"""A full disk, said in one way whoever finds it."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

# A full device, a quota, a limit on the size of files.
_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def named(path: str | os.PathLike[str], *, needed: int = 0) -> Iterator[None]:
  """Makes one OSError of whatever the block raises where no space is left.

  tensorstore, Orbax and safetensors have exceptions of their own for it, and
  Orbax prints tracebacks of its threads besides: with `needed`, what cannot fit
  is not begun.

  Args:
    path: what is written, and what the error names.
    needed: bytes that are about to be written; 0 where that is not known.

  Raises:
    OSError: ENOSPC, EDQUOT or EFBIG, with `path` as its file name.
  """
  amounts = ''
  if needed:
    free = shutil.disk_usage(_existing(Path(path))).free
    amounts = f' ({needed:,} bytes to write, {free:,} free)'
    if free < needed:
      reason = os.strerror(errno.ENOSPC) + amounts
      raise OSError(errno.ENOSPC, reason, str(path))
  try:
    yield
  except Exception as error:
    number = _number_of(error)
    if number is None:
      raise
    reason = getattr(error, 'strerror', None) or os.strerror(number)
    raise OSError(number, reason + amounts, str(path)) from error


def size_of(tree: Any) -> int:
  """Bytes of the arrays of a tree."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _existing(path: Path) -> Path:
  """The path itself, or the nearest folder above it that exists."""
  return next(p for p in (path, *path.absolute().parents) if p.exists())


def _number_of(error: Exception) -> int | None:
  """Which of the numbers an exception is about, if any."""
  if isinstance(error, OSError):
    return error.errno if error.errno in _NUMBERS else None
  text = str(error)
  return next((n for n in _NUMBERS if os.strerror(n) in text), None)
