"""Outputs that take their place only when they are complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from specdec_jax.files.local_path import local_path


@contextlib.contextmanager
def folder(path: Path, mark: str, *, overwrite: bool) -> Iterator[Path]:
  """A folder to fill, which takes the place of `path` when all went well.

  Args:
    path: of the folder.
    mark: a file that a folder must have to be replaced.
    overwrite: whether it may be.

  Raises:
    ValueError: if `path` is taken, or cannot be written.
  """
  _check_free(path, mark, overwrite=overwrite)
  path = local_path(path).absolute()
  partial = path.with_name(f'.{path.name}.partial-{os.getpid()}')
  try:
    partial.mkdir(parents=True)
    yield partial
    _take_place(partial, path)
  except OSError as error:
    _blame(error, path, partial)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
  """A file to write, which takes the place of `path` when all went well.

  Raises:
    ValueError: if it cannot be written.
  """
  path = local_path(path).absolute()
  partial = path.with_name(f'.{path.name}.partial-{os.getpid()}')
  try:
    yield partial
    partial.replace(path)
  except OSError as error:
    _blame(error, path, partial)
  finally:
    partial.unlink(missing_ok=True)


def _blame(error: OSError, path: Path, partial: Path) -> NoReturn:
  """Says that `path` cannot be written, if writing it is what failed."""
  name = str(error.filename or partial)
  if not name.startswith((str(partial), str(path))):
    raise error  # Something could not be read.
  reason = error.strerror or error
  raise ValueError(
    f'cannot write {path}: {reason}; what was there is unchanged'
  ) from error


def _take_place(partial: Path, path: Path) -> None:
  """Moves a folder to `path`, and what was there away, then out."""
  if not path.exists():
    partial.rename(path)
    return
  former = path.with_name(f'.{path.name}.former-{os.getpid()}')
  path.rename(former)
  try:
    partial.rename(path)
  except OSError:
    former.rename(path)
    raise
  shutil.rmtree(former)


def _check_free(path: Path, mark: str, *, overwrite: bool) -> None:
  if not path.exists():
    return
  if not path.is_dir():
    raise ValueError(f'{path} is not a folder')
  if not any(path.iterdir()):
    return
  if not (path / mark).exists():
    raise ValueError(f'{path} holds something else: choose another folder')
  if not overwrite:
    raise ValueError(f'{path} exists: add --overwrite to replace it')
