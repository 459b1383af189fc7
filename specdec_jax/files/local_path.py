"""The door that every path of a user passes."""

import os
import re
from pathlib import Path

# As a text, and as what `Path` makes of it.
_ELSEWHERE = re.compile(r'[a-z][a-z0-9+.-]+:/')


def local_path(path: str | os.PathLike[str]) -> Path:
  """A path of this machine's file systems, with `~` expanded.

  Raises:
    ValueError: if it is that of a bucket, such as `gs://bucket/folder`, or
      another URL: nothing here reads or writes those, and as a path it would be
      a local folder `gs:`.
  """
  if _ELSEWHERE.match(str(path)):
    raise ValueError(
      f'{path} is not on a local disk: give a local path, and copy from it or '
      'to it (gcloud storage cp -r)'
    )
  return Path(path).expanduser()
