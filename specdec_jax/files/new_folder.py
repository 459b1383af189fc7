"""Folders that appear complete or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from specdec_jax.files import full_disk
from specdec_jax.files.local_path import local_path


@contextlib.contextmanager
def new_folder(
  final: str | os.PathLike[str], *, overwrite: bool = False
) -> Iterator[Path]:
  """Yields a new folder beside `final`, which gets that name at the end.

  If the work fails or is interrupted, what was begun is removed and `final` is
  as before. A killed process leaves a folder `final.tmp-PID`, which T5X's and
  our readers know for an unfinished one.

  Args:
    final: the name; folders above it are made.
    overwrite: whether a folder of that name is replaced.

  Raises:
    ValueError: if there is one and it is not to be replaced.
    OSError: that names `final`, if there is no space left for it.
  """
  final = local_path(final)
  if final.exists() and not overwrite:
    raise ValueError(f'{final} already exists')
  begun = final.with_name(f'{final.name}.tmp-{os.getpid()}')
  replaced = final.with_name(f'{final.name}.tmp-{os.getpid()}-replaced')
  shutil.rmtree(begun, ignore_errors=True)
  try:
    with full_disk.named(final):
      begun.mkdir(parents=True)
      yield begun
    if final.exists():
      final.rename(replaced)
    begun.rename(final)
  finally:
    if replaced.exists() and not final.exists():
      replaced.rename(final)
    shutil.rmtree(begun, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
