"""A command that is killed, and what a kill can leave of its files."""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.kills.places import Bucket, Disk

# Given the names of all files, and of those that this attempt wrote.
IsThere = Callable[[set[str], set[str]], bool]


class Campaign(NamedTuple):
  """What is killed.

  Attributes:
    argv: the command.
    place: the folder that it reads and writes.
    progress: how far it is, a number that changes.
    stages: what a kill can leave, and whether it is what there is; the first
      that is counts.
    contents: what a finished run left, by name, to be compared.
    kills_per_run: about so many times a run is killed while it writes.
    share_early: of the kills that fall anywhere, not soon after a write.
  """

  argv: list[str]
  place: Disk | Bucket
  progress: Callable[[], int]
  stages: Mapping[str, IsThere]
  contents: Callable[[], dict[str, str]]
  kills_per_run: int = 1
  share_early: float = 0.25

  def stage(self, since: float, is_early: bool) -> str:
    """Where a kill fell, of an attempt that began at a time, in seconds since
    the epoch, and that made no progress if `is_early`."""
    times = self.place.times()
    new = {name for name, time in times.items() if time >= since}
    for stage, is_there in self.stages.items():
      if is_there({*times}, new):
        return stage
    return 'before anything was written' if is_early else 'between two writes'


def is_any(part: str) -> IsThere:
  """Whether a file has this part in its name."""
  return lambda names, new: any(part in name for name in names)


def is_new(part: str) -> IsThere:
  """Whether a file that this attempt wrote has it."""
  return lambda names, new: any(part in name for name in new)


def digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


def files(place: Disk | Bucket, but: str = '$^') -> dict[str, str]:
  """All that lies there but for names with a pattern in them."""
  found = {}
  for name, data in place.contents().items():
    # Marks and config.gin have paths in them, and gin breaks its lines.
    data = data.replace(place.path.encode(), b'PLACE')
    # Those of a bucket are of the server's checksums.
    data = re.sub(rb'"digest of the [^"]*": "\w*"', b'DIGEST', data)
    if name.endswith('.gin'):
      data = re.sub(rb'\\?\s+', b'', data)
    if not re.search(but, name):
      found[name] = digest(data)
  return found
