"""Where a campaign's command writes: a folder on a disk, or in a bucket."""

import contextlib
import os
import pathlib
import shutil

from tests.files.server import Server


class Disk:
  """A folder on a disk."""

  def __init__(self, path: pathlib.Path):
    self.path = str(path)

  def times(self) -> dict[str, float]:
    """When each file below it was written, by its name, in seconds since the
    epoch."""
    found = {}
    # What is renamed meanwhile is passed over, by `walk` as well.
    for folder, _, names in os.walk(self.path):
      for path in (pathlib.Path(folder, name) for name in names):
        with contextlib.suppress(FileNotFoundError):
          found[path.relative_to(self.path).as_posix()] = path.stat().st_mtime
    return found

  def contents(self) -> dict[str, bytes]:
    folder = pathlib.Path(self.path)
    return {name: (folder / name).read_bytes() for name in self.times()}

  def put(self, source: pathlib.Path) -> None:
    """Copies what lies in a folder."""
    shutil.copytree(source, self.path, dirs_exist_ok=True)

  def remove(self) -> None:
    shutil.rmtree(self.path, ignore_errors=True)


class Bucket:
  """A folder in a bucket of a stand-in server."""

  def __init__(self, server: Server, path: str):
    self.server, self.path = server, path

  def times(self) -> dict[str, float]:
    return self.server.times(self.path)

  def contents(self) -> dict[str, bytes]:
    return self.server.objects(self.path)

  def put(self, source: pathlib.Path) -> None:
    self.server.upload(source, self.path)

  def remove(self) -> None:
    self.server.remove(self.path)
