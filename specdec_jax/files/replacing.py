"""Files and folders that take their place only when they are complete.

Local ones are written beside their place, and renamed. A bucket has no rename
of folders, and its objects appear when they are complete: a folder is written
in its place, and last what says that it is whole.
"""

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from specdec_jax.files import full_disk
from specdec_jax.files.paths import (
  in_bucket,
  is_in_bucket,
  remove_tree,
  user_path,
)

# Part of the name of an incomplete file.
PARTIAL = '.partial-'
# Lies in an incomplete folder of a bucket.
_BEGUN = 'specdec-begun'


@contextlib.contextmanager
def file(
  path: str | os.PathLike[str],
  *,
  on_failure: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
  """Yields where to write a file, on a local disk, which gets the name `path`
  at the end, flushed to the disk. A link stays a link, and a file that is
  replaced hands on its mode.

  A killed process leaves `path.partial-*` behind, or, for one of a bucket, a
  temporary folder. If the work fails, what was written is removed, or left and
  told to `on_failure`. Raises ValueError if the file cannot be written; with
  `on_failure` OSError.
  """
  path = user_path(path)
  if is_in_bucket(path):
    final, folder = path, tempfile.mkdtemp(prefix='specdec-')
    begun = Path(folder) / path.name
    refused: Path = path
  else:
    final, folder = Path(os.path.realpath(path)), None
    # Processes on several hosts may have the same number.
    unique = f'{os.getpid()}-{uuid.uuid4().hex[:8]}'
    begun = final.with_name(f'{final.name}{PARTIAL}{unique}')
    refused = begun
  # Who keeps parts of a file also writes elsewhere, and may fail there.
  with contextlib.nullcontext() if on_failure else _explained(path, refused):
    try:
      yield begun
      _put(begun, final)
    except BaseException:
      if on_failure and begun.exists() and begun.stat().st_size:
        on_failure(begun)
        folder = None
      else:
        begun.unlink(missing_ok=True)
      raise
    finally:
      if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
  """Writes a file that appears complete or not at all."""
  with file(path) as begun:
    begun.write_text(text, encoding='utf-8', newline='\n')


def create_text(path: Path, text: str) -> bool:
  """Writes as `write_text`, but in a bucket, where others may write as well,
  only if the object does not exist. Returns whether it wrote."""
  if (remote := in_bucket(path)) is not None:
    return remote.create(text)
  write_text(path, text)
  return True


def _flush(path: Path) -> None:
  """Waits until a file is on its disk: a crash could leave its name alone."""
  with path.open('rb') as written:
    os.fsync(written.fileno())


def _put(begun: Path, final: Path) -> None:
  """Gives a file that is complete its place."""
  if (remote := in_bucket(final)) is not None:
    remote.upload(begun)
    return
  _flush(begun)
  if final.exists():
    shutil.copymode(final, begun)
  begun.replace(final)


@contextlib.contextmanager
def new_folder(
  final: str | os.PathLike[str], *, overwrite: bool = False
) -> Iterator[Path]:
  """Yields a new folder beside `final`, which gets that name at the end, with
  all folders above it, flushed to the disk. A link stays a link. If the work
  fails or is interrupted, `final` is as before. ValueError if it is there and
  not empty, at the beginning or the end, unless `overwrite`; an OSError that
  names it if it cannot be written.

  A killed process leaves `final.tmp-PID-...`, which T5X's and our readers know
  for an unfinished one; in a bucket, a folder that `is_begun`, and that is
  replaced. There it yields `final` itself, emptied: the block has to write last
  that by which readers know a whole one.
  """
  final = user_path(final)
  if not overwrite and _is_taken(final):
    raise ValueError(f'{final} already exists')
  if is_in_bucket(final):
    with full_disk.named(final), _in_place(final):
      yield final
    return
  final = Path(os.path.realpath(final))
  name = f'{final.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}'
  begun, replaced = (final.with_name(name + x) for x in ('', '-replaced'))
  try:
    with full_disk.named(final):
      begun.mkdir(parents=True)
      yield begun
      for path in filter(Path.is_file, begun.rglob('*')):
        _flush(path)
    # Two renames: folders cannot be exchanged in one. If the second fails, or
    # the process is interrupted, the old one goes back.
    if not overwrite and _is_taken(final):
      raise ValueError(f'{final} was written meanwhile, and stays as it is')
    if final.exists():
      final.rename(replaced)
    begun.rename(final)
  finally:
    if replaced.exists() and not final.exists():
      replaced.rename(final)
    shutil.rmtree(begun, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_taken(final: Path) -> bool:
  """Tells whether a path is anything but an empty or a begun folder."""
  if final.is_dir():
    return any(final.iterdir()) and not is_begun(final)
  return final.exists()


def is_begun(folder: Path) -> bool:
  """Tells whether a killed process left this folder of a bucket."""
  return is_in_bucket(folder) and (folder / _BEGUN).is_file()


@contextlib.contextmanager
def _in_place(final: Path, mark: str = '') -> Iterator[None]:
  """Runs the block in a folder of a bucket that holds only the mark of a write
  that has begun; if it fails, removes what it wrote. A file `mark` of an older
  folder is deleted first, since readers take it to mean that all is there."""
  begun = final / _BEGUN
  begun.write_bytes(b'')
  try:
    for child in sorted(final.iterdir(), key=lambda each: each.name != mark):
      if child.is_dir():
        remove_tree(child)
      elif child != begun:
        child.unlink()
    yield
    begun.unlink()
  except GeneratorExit:
    raise  # Collected, maybe in the client's own loop: it gets no request.
  except BaseException:
    with contextlib.suppress(OSError):  # The first error explains it.
      remove_tree(final)
    raise


@contextlib.contextmanager
def folder(
  path: str | os.PathLike[str], mark: str, *, overwrite: bool
) -> Iterator[Path]:
  """Makes a folder as `new_folder`, but replaces only an empty one and, if
  `overwrite`, one with a file `mark`; ValueError if `path` is taken, or cannot
  be written. One of a bucket is written in a temporary folder, and uploaded,
  `mark` last."""
  path = user_path(path)
  # A folder with a mark was written by a command like this one.
  if path.exists():
    if not path.is_dir():
      raise ValueError(f'{path} is not a folder')
    if any(path.iterdir()):
      is_whole = (path / mark).exists()
      if not (is_whole or is_begun(path)):
        raise ValueError(f'{path} holds something else: choose another folder')
      if is_whole and not overwrite:
        raise ValueError(f'{path} exists: add --overwrite to replace it')
  if (remote := in_bucket(path)) is not None:
    with tempfile.TemporaryDirectory(prefix='specdec-') as name:
      yield Path(name)
      # Uploads the mark last: readers take a folder with its mark for complete.
      begun = [each for each in Path(name).iterdir() if each.name != mark]
      with _in_place(path, mark):
        for each in (*begun, Path(name, mark)):
          (remote / each.name).upload(each)
    return
  final = Path(os.path.realpath(path))
  with _explained(path, final), new_folder(final, overwrite=overwrite) as new:
    yield new


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str], begun: Path) -> Iterator[None]:
  """Says what an OSError means for `path`, if writing `begun` raised it."""
  try:
    yield
  except OSError as error:
    if not str(error.filename or begun).startswith(str(begun)):
      raise
    reason = error.strerror or error
    raise ValueError(f'cannot write {path}: {reason}') from error
