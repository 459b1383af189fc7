"""Paths of Google Cloud Storage: etils' epath, over gcsfs.

Imported when the first such path is met (`paths.user_path`). An object appears,
on all hosts at once, when it is complete, and is replaced whole: what is
written here in one call needs no partial file and no rename. Folders are
prefixes of names, which exist as long as an object is below them.
"""

import asyncio
import contextlib
import errno
import fnmatch
import functools
import glob
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

# epath would take TensorFlow if installed, which may not know gs://.
os.environ.setdefault('EPATH_USE_TF', 'false')

import aiohttp
import fsspec
import google.auth.exceptions
import requests
from etils import epath
from gcsfs.retry import HttpError

# Listings are not cached, since other hosts may write.
for _protocol in ('gs', 'gcs'):
  _settings = fsspec.config.conf.setdefault(_protocol, {})
  _settings.setdefault('use_listings_cache', False)
if 'GCSFS_DEBUG' not in os.environ:
  # gcsfs prints the stack of every error that it raises.
  logging.getLogger('gcsfs').setLevel(logging.CRITICAL)
  # Orbax's threads do as well.
  logging.getLogger('absl').addFilter(
    lambda record: '_SignalingThread.run()' not in str(record.msg)
  )

_EPath: Any = type(epath.Path('gs://bucket'))
_UNANSWERED = (
  aiohttp.ClientError,
  asyncio.TimeoutError,
  ConnectionError,
  requests.exceptions.RequestException,
)
# Statuses on which gcsfs repeats a request.
_BUSY = ('408', '429', '500', '501', '502', '503', '504')
# Words in errors of gcsfs and tensorstore.
_FORBIDDEN = ('Forbidden', 'PERMISSION_DENIED', 'UNAUTHENTICATED')
_ABSENT = ('DEADLINE_EXCEEDED', 'UNAVAILABLE', 'retry attempts failed')


class BucketPath(_EPath):
  """A `gs://` path, with the methods of `pathlib.Path` that this package calls.

  gcsfs retries a request that fails, six times in about half a minute. Errors
  are OSErrors that name the path: FileNotFoundError (also for a missing
  bucket), PermissionError, and ConnectionError if the server is down or busy.
  """

  @property
  def bucket(self) -> str:
    return self.parts[2]

  @property
  def key(self) -> str:
    """The name in the bucket; empty for the bucket itself."""
    return '/'.join(self.parts[3:])

  def resolve(self) -> Self:
    return self

  # There are no links, no working directory and no home.
  absolute = expanduser = resolve

  def exists(self) -> bool:
    return self._type() is not None

  def is_file(self) -> bool:
    return self._type() == 'file'

  def is_dir(self) -> bool:
    """Returns whether an object is below it; True for a bucket."""
    return self._type() == 'directory'

  def _type(self) -> str | None:
    with _asking(self) as files, _ignored_missing(True):
      return files.info(str(self))['type'] if self.key else 'directory'
    return None

  def checksums(self) -> dict[str, str]:
    """Returns the server's checksum of each object here and below, by name."""
    with _asking(self) as files:
      objects = files.find(str(self), detail=True)
    return {name: info['crc32c'] for name, info in objects.items()}

  def iterdir(self) -> Iterator[Self]:
    """Yields the children of a folder; none if there is no such folder."""
    names: list[str] = []
    with _asking(self) as files, _ignored_missing(True):
      names = files.ls(str(self), detail=False)
    children = [type(self)(f'gs://{name}') for name in names]
    # An object whose name ends in a slash is the folder itself.
    yield from (path for path in children if path != self)

  def glob(self, pattern: str) -> Iterator[Self]:
    """Yields the children whose names match a pattern."""
    if '/' in pattern:
      raise NotImplementedError(f'{pattern} of more than a name')
    for path in self.iterdir():
      if fnmatch.fnmatchcase(path.name, pattern):
        yield path

  def read_bytes(self) -> bytes:
    with _asking(self) as files:
      return files.cat_file(str(self))

  def read_text(self, encoding: str | None = None) -> str:
    return self.open('r', encoding).read()

  def open(
    self,
    mode: str = 'r',
    encoding: str | None = None,
    newline: str | None = None,
  ) -> IO[Any]:
    """Opens a copy of the object to read; `write_bytes` writes."""
    if mode not in ('r', 'rb'):
      raise NotImplementedError(f'{self} cannot be opened with {mode!r}')
    data = io.BytesIO(self.read_bytes())
    if mode == 'rb':
      return data
    return io.TextIOWrapper(data, encoding=encoding or 'utf-8', newline=newline)

  def write_bytes(self, data: bytes) -> int:
    with _asking(self) as files:
      files.pipe_file(str(self), data)
    return len(data)

  def write_text(self, data: str, encoding: str | None = None) -> int:
    return self.write_bytes(data.encode(encoding or 'utf-8'))

  def create(self, text: str) -> bool:
    """Writes a text if the object does not exist; returns whether it did."""
    try:
      with _asking(self) as files:
        files.pipe_file(str(self), text.encode(), mode='create')
    except FileExistsError:
      return False
    return True

  def upload(self, source: Path) -> None:
    """Uploads a local file."""
    with _asking(self) as files:
      files.put_file(str(source), str(self))

  def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
    """Does nothing: folders need not be made, and buckets are not."""
    with _asking(self):
      pass

  def unlink(self, missing_ok: bool = False) -> None:
    with _asking(self) as files, _ignored_missing(missing_ok):
      files.rm_file(str(self))

  def rmtree(self, missing_ok: bool = False) -> None:
    """Removes the folder and everything in it."""
    if not self.key:
      raise ValueError(f'{self} is a whole bucket, which is not removed')
    with _asking(self) as files, _ignored_missing(missing_ok):
      # gcsfs interprets names as patterns.
      files.rm(glob.escape(str(self)), recursive=True)

  def rename(self, target: os.PathLike[str]) -> Self:
    """Moves every object below it, one after another."""
    # The server cannot rename: gs://b/old/x is copied to gs://b/new/x.
    with _asking(self) as files:
      for name in files.find(str(self)):
        rest = f'gs://{name}'.removeprefix(str(self))
        files.cp_file(f'gs://{name}', f'{target}{rest}')
    self.rmtree()
    return type(self)(target)


def _ignored_missing(is_ignored: bool) -> contextlib.AbstractContextManager:
  ignored = (FileNotFoundError,) if is_ignored else ()
  return contextlib.suppress(*ignored)


class Ranges:
  """The bytes of an object by `[start:stop]`, uint8, each read on request."""

  def __init__(self, path: BucketPath):
    self.path = path
    # The size is needed for slices that count from the end.
    with _asking(path) as files:
      self.size = int(files.info(str(path))['size'])

  def __getitem__(self, part: slice) -> np.ndarray:
    start, stop, _ = part.indices(self.size)
    with _asking(self.path) as files:
      data = files.cat_file(str(self.path), start=start, end=max(start, stop))
    return np.frombuffer(data, np.uint8)


@contextlib.contextmanager
def _asking(path: BucketPath) -> Iterator[Any]:
  """Yields the file system of gcsfs, after checking that the bucket exists."""
  with explained(path):
    _find_bucket(path.bucket)
    yield fsspec.filesystem('gcs')


@functools.cache
def _find_bucket(bucket: str) -> None:
  """Raises FileNotFoundError if there is no such bucket."""
  # gcsfs does not distinguish a missing bucket from a missing object.
  try:
    fsspec.filesystem('gcs').ls(f'gs://{bucket}', detail=False, max_results=1)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      errno.ENOENT, 'there is no bucket of this name', f'gs://{bucket}'
    ) from error


@contextlib.contextmanager
def explained(path: object) -> Iterator[None]:
  """Turns errors of a server into those of `refusal`; others pass through."""
  try:
    yield
  except Exception as error:
    # An error with a file name is local, or already explained.
    if isinstance(error, OSError) and error.filename:
      raise
    explanation = refusal(error, str(path))
    if explanation is None:
      raise
    raise explanation from error


def refusal(error: Exception, path: str) -> OSError | None:
  """Converts an error that gcsfs, Orbax or tensorstore raise because of a
  server to an OSError with a sentence and the path; None for other errors."""
  # gcsfs raises these without a path.
  if isinstance(error, FileExistsError):
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
  if isinstance(error, FileNotFoundError):
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
  # Keep the first sentence: tensorstore's errors have pages.
  reason = ' '.join(str(error).split(' [')[0].split()) or type(error).__name__
  code = str(getattr(error, 'code', ''))
  if (
    code in ('401', '403')
    or any(word in reason for word in _FORBIDDEN)
    or isinstance(error, google.auth.exceptions.GoogleAuthError)
  ):
    message = (
      'no permission: grant this account a role of the bucket, or sign in with '
      f'another (gcloud auth application-default login); {reason}'
    )
    return PermissionError(errno.EACCES, message, path)
  if (
    isinstance(error, _UNANSWERED)
    or code in _BUSY
    or any(word in reason for word in _ABSENT)
  ):
    message = (
      'the server of the bucket does not answer after several attempts: run '
      f'the command again later ({reason})'
    )
    return ConnectionError(errno.EHOSTUNREACH, message, path)
  if isinstance(error, OSError | HttpError):
    return OSError(errno.EIO, f'the server says {reason}', path)
  return None
