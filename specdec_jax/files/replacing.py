"""Files and folders that appear under their name only when they are complete.

Local ones are written under a temporary name, and renamed. In a bucket, folders
cannot be renamed, and objects appear when they are complete: a folder is
written in place, and the file that marks it as complete comes last.
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
# A file in an incomplete folder of a bucket.
_BEGUN = 'specdec-begun'


@contextlib.contextmanager
def file(
  path: str | os.PathLike[str],
  *,
  on_failure: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
  """Yields a local path to write; at the end the file is flushed and renamed to
  `path`, or uploaded. A link stays a link, and a replaced file keeps its mode.

  A killed process leaves `path.partial-*` behind, or for a bucket a temporary
  folder. If the block fails, the partial file is removed, or kept and passed to
  `on_failure`. ValueError if the file cannot be written; with `on_failure`
  OSError.
  """
  path = user_path(path)
  if is_in_bucket(path):
    final, folder = path, tempfile.mkdtemp(prefix='specdec-')
    begun = Path(folder) / path.name
    refused: Path = path
  else:
    final, folder = Path(os.path.realpath(path)), None
    # Processes on several hosts may have the same id.
    unique = f'{os.getpid()}-{uuid.uuid4().hex[:8]}'
    begun = final.with_name(f'{final.name}{PARTIAL}{unique}')
    refused = begun
  # With `on_failure` the block may fail for other reasons than this file.
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
  """Writes a file atomically."""
  with file(path) as begun:
    begun.write_text(text, encoding='utf-8', newline='\n')


def create_text(path: Path, text: str) -> bool:
  """Writes like `write_text`, but in a bucket only if the object does not
  exist, since others may write there. Returns whether it wrote."""
  if (remote := in_bucket(path)) is not None:
    return remote.create(text)
  write_text(path, text)
  return True


def _flush(path: Path) -> None:
  """Flushes a file to its disk: after a crash it might be empty otherwise."""
  with path.open('rb') as written:
    os.fsync(written.fileno())


def _put(begun: Path, final: Path) -> None:
  """Renames or uploads a complete file."""
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
  """Yields a new folder, which is flushed and renamed to `final` at the end.

  Parent folders are made, and a link stays a link. If the block fails or is
  interrupted, `final` is unchanged. ValueError if `final` exists and is not
  empty, at the beginning or the end, unless `overwrite`; OSError with its name
  if it cannot be written.

  A killed process leaves `final.tmp-PID-...`, which readers of T5X and of this
  package ignore; in a bucket a folder that `is_begun`, which is replaced. There
  `final` itself is yielded, emptied, and the block must write last the file
  that marks a complete folder.
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
    # Two renames, since folders cannot be exchanged. If the second fails, the
    # first is undone.
    if not overwrite and _is_taken(final):
      raise ValueError(f'{final} was written meanwhile, and is unchanged')
    if final.exists():
      final.rename(replaced)
    begun.rename(final)
  finally:
    if replaced.exists() and not final.exists():
      replaced.rename(final)
    shutil.rmtree(begun, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_taken(final: Path) -> bool:
  """Returns whether a path exists and is not an empty or a begun folder."""
  if final.is_dir():
    return any(final.iterdir()) and not is_begun(final)
  return final.exists()


def is_begun(folder: Path) -> bool:
  """Returns whether a killed process left this folder of a bucket."""
  return is_in_bucket(folder) and (folder / _BEGUN).is_file()


@contextlib.contextmanager
def _in_place(final: Path, mark: str = '') -> Iterator[None]:
  """Runs the block in an emptied folder of a bucket with a file that says that
  writing has begun; if the block fails, removes the folder. The file `mark`,
  which marks a complete folder, is removed before all other files."""
  begun = final / _BEGUN
  begun.write_bytes(b'')
  try:
    # `mark` first: False sorts before True.
    for child in sorted(final.iterdir(), key=lambda path: path.name != mark):
      if child.is_dir():
        remove_tree(child)
      elif child != begun:
        child.unlink()
    yield
    begun.unlink()
  except GeneratorExit:
    raise  # Garbage collection, where the client must not send requests.
  except BaseException:
    with contextlib.suppress(OSError):  # The first error explains it.
      remove_tree(final)
    raise


@contextlib.contextmanager
def folder(
  path: str | os.PathLike[str], mark: str, *, overwrite: bool
) -> Iterator[Path]:
  """Makes a folder like `new_folder`, but replaces only an empty one or, if
  `overwrite`, one with a file `mark`; ValueError if `path` is taken, or cannot
  be written. For a bucket, a temporary folder is uploaded, `mark` last."""
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
      # The mark comes last: it says that the folder is complete.
      sources = [file for file in Path(name).iterdir() if file.name != mark]
      with _in_place(path, mark):
        for source in (*sources, Path(name, mark)):
          (remote / source.name).upload(source)
    return
  final = Path(os.path.realpath(path))
  with _explained(path, final), new_folder(final, overwrite=overwrite) as new:
    yield new


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str], begun: Path) -> Iterator[None]:
  """Turns an OSError from writing `begun` into a ValueError about `path`."""
  try:
    yield
  except OSError as error:
    if not str(error.filename or begun).startswith(str(begun)):
      raise
    reason = error.strerror or error
    raise ValueError(f'cannot write {path}: {reason}') from error
