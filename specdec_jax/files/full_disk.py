"""A full disk, said in one way whoever finds it."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from specdec_jax.files.paths import is_in_bucket

# A full device, a quota, a limit on the size of files.
_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def named(path: str | os.PathLike[str], arrays: object = ()) -> Iterator[None]:
  """Makes one OSError, with the path, of what the block raises where no space
  is left, or as `buckets.explained`; at once, if `arrays` cannot fit."""
  # tensorstore, Orbax and safetensors have exceptions of their own for it, and
  # Orbax prints tracebacks of its threads besides.
  if is_in_bucket(path):
    from specdec_jax.files import buckets

    with buckets.explained(path):
      yield
    return
  amounts = ''
  sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)]
  if needed := sum(sizes):
    # Asks the disk of the nearest folder that exists.
    above = (Path(path), *Path(path).absolute().parents)
    free = shutil.disk_usage(next(p for p in above if p.exists())).free
    amounts = f' ({needed:,} bytes to write, {free:,} free)'
    if free < needed:
      reason = os.strerror(errno.ENOSPC) + amounts
      raise OSError(errno.ENOSPC, reason, str(path))
  try:
    yield
  except Exception as error:
    # Not all errors have the number, but all the system's words for it.
    about = [n for n in _NUMBERS if os.strerror(n) in str(error)]
    if not about:
      raise
    reason = getattr(error, 'strerror', None) or os.strerror(about[0])
    raise OSError(about[0], reason + amounts, str(path)) from error
