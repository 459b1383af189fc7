"""Paths that users give: local ones, and those of buckets."""

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from specdec_jax.files.require import require

# Imported only for paths of buckets, since it takes one and a half seconds.
if TYPE_CHECKING:
  from specdec_jax.files.buckets import BucketPath, Ranges

# Matches gs:// and `gs:/`, to which `Path` shortens it.
_BUCKET = re.compile(r'gs:/+')
_ELSEWHERE = re.compile(r'[a-z][a-z0-9+.-]+:/', re.IGNORECASE)


def user_path(path: str | os.PathLike[str]) -> Path:
  """Returns a local path with `~` expanded, or for `gs://` a
  `buckets.BucketPath`. Sends no request.

  ValueError for other URLs, which would be local folders such as `s3:`, for
  `gs://` without a bucket, and for an unknown home folder; ImportError without
  the packages for buckets.
  """
  # `Path('gs://b/x')` is `gs:/b/x`, which is accepted as well.
  text = str(path)
  match = _BUCKET.match(text)
  if match:
    text = f'gs://{text[match.end() :]}'
    if text.rstrip('/') == 'gs:':
      raise ValueError('gs:// names no bucket: write gs://BUCKET/FOLDER')
    require('etils.epath', extra='gcs', purpose=text)
    require('gcsfs', extra='gcs', purpose=text)
    from specdec_jax.files import buckets

    return buckets.BucketPath(text)
  if _ELSEWHERE.match(text):
    raise ValueError(
      f'{path} is neither on a local disk nor in a bucket of gs://: copy it to '
      'one of them'
    )
  try:
    return Path(path).expanduser()
  except RuntimeError as error:
    raise ValueError(
      f'{path}: there is no such home folder; give the full path'
    ) from error


def local_path(path: str | os.PathLike[str]) -> Path:
  """Returns `user_path(path)`, on a disk; ValueError for one in a bucket."""
  if is_in_bucket(path) or _BUCKET.match(str(path)):
    raise ValueError(
      f'{path} is not on a local disk: give a local path, and copy from it or '
      'to it (gcloud storage cp -r)'
    )
  return user_path(path)


def is_in_bucket(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path of `user_path` is in a bucket."""
  return str(path).startswith('gs://')


def in_bucket(path: Path) -> 'BucketPath | None':
  """Returns a path of `user_path` if it is in a bucket, else None."""
  return cast('BucketPath', path) if is_in_bucket(path) else None


def remove_tree(folder: Path, *, ignore_errors: bool = True) -> None:
  """Removes a folder and everything in it, if it exists; OSError if it cannot
  be removed and is in a bucket, or errors are not ignored."""
  if (remote := in_bucket(folder)) is not None:
    remote.rmtree(missing_ok=True)
  else:
    shutil.rmtree(folder, ignore_errors=ignore_errors)


def mapped(path: Path) -> 'np.ndarray | Ranges':
  """Returns the bytes of a file, uint8, which are read when sliced: a memory
  map, or in a bucket `Ranges`. OSError if it cannot be read."""
  if (remote := in_bucket(path)) is not None:
    from specdec_jax.files import buckets

    return buckets.Ranges(remote)
  if not path.stat().st_size:  # An empty file cannot be mapped.
    return np.empty(0, np.uint8)
  return np.memmap(path, dtype=np.uint8, mode='r')
