"""Binary packages: files of a .deb, read without installing it."""

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from debian import debfile


def files(path: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
  """Yields paths, without a leading './', and contents of a package's files
  that end in `suffix`, in the package's order; ValueError if it is damaged."""
  try:
    with debfile.DebFile(path) as package:
      tree = package.data.tgz()
      for member in tree:
        if member.isfile() and member.name.endswith(suffix):
          content = tree.extractfile(member).read()
          yield str(member.name).removeprefix('./'), content
  except (
    debfile.ArError,
    tarfile.TarError,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    OSError,
  ) as error:
    raise ValueError(f'{path} is damaged: {error}') from error
