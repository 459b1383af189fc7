"""Binary packages: files of a .deb, read without installing it."""

import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b'!<arch>\n'
_HEADER_SIZE = 60


def files(path: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
  """Names and contents of a package's files that end in `suffix`.

  The format is deb(5): an `ar` archive whose member `data.tar.*` is the tree.

  Args:
    path: the .deb.
    suffix: such as '.mo'.

  Yields:
    Paths without a leading './', in the package's order, and contents.

  Raises:
    ValueError: if the file is no package, or is damaged.
  """
  try:
    with tarfile.open(fileobj=io.BytesIO(_data(path))) as tree:
      for member in tree:
        if member.isfile() and member.name.endswith(suffix):
          file = tree.extractfile(member)
          assert file is not None  # It is a regular file.
          yield member.name.removeprefix('./'), file.read()
  except (
    tarfile.TarError,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    OSError,
  ) as error:
    raise ValueError(f'{path} is damaged: {error}') from error


def _data(path: Path) -> bytes:
  """The member `data.tar.*` of a package, still compressed."""
  content = path.read_bytes()
  if not content.startswith(_MAGIC):
    raise ValueError(f'{path} is not a Debian package')
  start = len(_MAGIC)
  while start + _HEADER_SIZE <= len(content):
    header = content[start : start + _HEADER_SIZE]
    start += _HEADER_SIZE
    try:
      size = int(header[48:58])
    except ValueError:
      raise ValueError(
        f'{path} is damaged: no member begins at byte {start - _HEADER_SIZE}'
      ) from None
    if start + size > len(content):
      raise ValueError(
        f'{path} is incomplete: it has {len(content)} bytes of at least '
        f'{start + size}'
      )
    if header.startswith(b'data.tar'):
      return content[start : start + size]
    start += size + size % 2  # Members begin at even offsets.
  raise ValueError(f'{path} is incomplete: it has no data.tar')
