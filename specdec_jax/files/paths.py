"""What every path of a user goes through."""

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from specdec_jax.files.require import require

# Importing it takes a second and a half, which local paths are spared.
if TYPE_CHECKING:
  from specdec_jax.files.buckets import BucketPath, Ranges

# Matches gs:// and `gs:/`, which `Path` makes of it.
_BUCKET = re.compile(r'gs:/+')
_ELSEWHERE = re.compile(r'[a-z][a-z0-9+.-]+:/', re.IGNORECASE)


def user_path(path: str | os.PathLike[str]) -> Path:
  """Returns a path of this machine's file systems, with `~` expanded, or, if it
  begins with `gs://`, of a bucket (`buckets.BucketPath`). Asks no server.

  Raises ValueError if it is the URL of something else, which as a path would be
  a local folder such as `s3:`, names no bucket, or begins with a home folder
  that is not known; ImportError without the packages for a bucket.
  """
  # `Path('gs://b/x')` is `gs:/b/x`: however it was made, it is of a bucket.
  text = str(path)
  if found := _BUCKET.match(text):
    text = f'gs://{text[found.end() :]}'
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
      f'{path}: no home folder of that name is known; give the whole path'
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
  """Tells whether a path of `user_path` is of a bucket."""
  return str(path).startswith('gs://')


def in_bucket(path: Path) -> 'BucketPath | None':
  """Returns a path of `user_path` as a bucket's; None for a local one."""
  return cast('BucketPath', path) if is_in_bucket(path) else None


def remove_tree(folder: Path, *, ignore_errors: bool = True) -> None:
  """Removes a folder and all below it, if it is there; OSError if it cannot be
  removed and is in a bucket, or errors are not ignored."""
  if (remote := in_bucket(folder)) is not None:
    remote.rmtree(missing_ok=True)
  else:
    shutil.rmtree(folder, ignore_errors=ignore_errors)


def mapped(path: Path) -> 'np.ndarray | Ranges':
  """Returns the bytes of a file, uint8, which `[start:stop]` reads as needed: a
  mapped array, or, in a bucket, `Ranges`. OSError if it cannot be read."""
  if (remote := in_bucket(path)) is not None:
    from specdec_jax.files import buckets

    return buckets.Ranges(remote)
  if not path.stat().st_size:  # An empty file cannot be mapped.
    return np.empty(0, np.uint8)
  return np.memmap(path, dtype=np.uint8, mode='r')
