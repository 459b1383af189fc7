"""Files and folders that take their place only when they are complete."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from specdec_jax.files import full_disk
from specdec_jax.files.local_path import local_path

# In the name of a file that is not complete. Processes of several hosts may
# have the same number.
PARTIAL = '.partial-'


@contextlib.contextmanager
def file(
  path: str | os.PathLike[str],
  *,
  on_failure: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
  """Yields where to write a file, which gets the name `path` at the end.

  It is flushed to the disk first. A link stays a link, and a file that is
  replaced hands on its mode. A killed process leaves `path.partial-*` behind.
  If the work fails, `on_failure` is told where that is which was written
  before; without it, it is removed.

  Raises:
    ValueError: if the file cannot be written. With `on_failure` an OSError is
      not changed, since who keeps parts of a file writes elsewhere meanwhile.
  """
  final = Path(os.path.realpath(local_path(path)))
  unique = f'{os.getpid()}-{uuid.uuid4().hex[:8]}'
  begun = final.with_name(f'{final.name}{PARTIAL}{unique}')
  explained = (
    contextlib.nullcontext() if on_failure else _explained(path, begun)
  )
  with explained:
    try:
      yield begun
      with begun.open('r+b') as written:
        os.fsync(written.fileno())
      if final.exists():
        shutil.copymode(final, begun)
      begun.replace(final)
    except BaseException:
      if on_failure and begun.exists() and begun.stat().st_size:
        on_failure(begun)
      else:
        begun.unlink(missing_ok=True)
      raise


@contextlib.contextmanager
def new_folder(
  final: str | os.PathLike[str], *, overwrite: bool = False
) -> Iterator[Path]:
  """Yields a new folder beside `final`, which gets that name at the end.

  If the work fails or is interrupted, what was begun is removed and `final` is
  as before. A killed process leaves a folder `final.tmp-PID`, which T5X's and
  our readers know for an unfinished one. Folders above `final` are made.

  Raises:
    ValueError: if there is a folder of that name, unless `overwrite`.
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


@contextlib.contextmanager
def folder(
  path: str | os.PathLike[str], mark: str, *, overwrite: bool
) -> Iterator[Path]:
  """As `new_folder`, but replaces only an empty folder and, if `overwrite`, one
  with a file `mark`; ValueError if `path` is taken, or cannot be written."""
  path = local_path(path)
  if path.exists():
    if not path.is_dir():
      raise ValueError(f'{path} is not a folder')
    if any(path.iterdir()):
      if not (path / mark).exists():
        raise ValueError(f'{path} holds something else: choose another folder')
      if not overwrite:
        raise ValueError(f'{path} exists: add --overwrite to replace it')
  final = path.absolute()
  with _explained(path, final), new_folder(final, overwrite=True) as begun:
    yield begun


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str], begun: Path) -> Iterator[None]:
  """Says what an OSError means for `path`, if writing `begun` is what failed,
  and not reading something."""
  try:
    yield
  except OSError as error:
    if not str(error.filename or begun).startswith(str(begun)):
      raise
    raise ValueError(
      f'cannot write {path}: {error.strerror or error}; what was there is '
      'unchanged'
    ) from error
