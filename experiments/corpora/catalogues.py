"""Message catalogues: the .mo files of GNU gettext, as pairs of strings."""

import re
import struct
from collections.abc import Iterator

_MAGIC = 0x950412DE
_CONTEXT_END = '\x04'
# An accelerator's mark stands before its letter: `~File`, `Hori_zontal`,
# `&Open`. `Black & White`, `~` alone and names such as `FILTER_NAME` stay.
_TILDE = re.compile(r'[~&](?=\w)')
_UNDERSCORE = re.compile(r'_(?=[^\W_])')
_NAME = re.compile(r'\b[A-Z0-9]+_[A-Z0-9]+\b|\w_\w*\(')
_MARKUP = re.compile(r'</?[A-Za-z][^>]*>')


def pairs(name: str, content: bytes) -> Iterator[tuple[str, str]]:
  """Messages and their translations, plurals as pairs of their own.

  The format is in the manual of GNU gettext, "The Format of GNU MO Files".
  Contexts and the header are left out, as are messages with markup.

  Args:
    name: of the file, for errors.
    content: its bytes.

  Yields:
    Message and translation, in the catalogue's order.

  Raises:
    ValueError: if the file is no catalogue, or is damaged.
  """
  for message, translation in _entries(name, content):
    if not message:
      continue
    forms = message.rsplit(_CONTEXT_END, 1)[-1].split('\0')
    # German has gettext's two forms, one and many. Zip leaves out what a
    # catalogue has not translated.
    for source, target in zip(forms, translation.split('\0'), strict=False):
      if not (_MARKUP.search(source) or _MARKUP.search(target)):
        yield source, target


def without_accelerator(text: str) -> str:
  """A label without the mark before its keyboard accelerator."""
  text = _TILDE.sub('', text)
  if text.count('_') == 1 and not _NAME.search(text):
    text = _UNDERSCORE.sub('', text)
  return text


def _entries(name: str, content: bytes) -> Iterator[tuple[str, str]]:
  """Entries as they are stored."""
  try:
    for order in '<>':
      magic, _, count, sources, targets = struct.unpack_from(
        f'{order}5I', content
      )
      if magic == _MAGIC:
        break
    else:
      raise ValueError(f'{name} is not a message catalogue')
    for i in range(count):
      yield tuple(
        _string(content, *struct.unpack_from(f'{order}2I', content, at + 8 * i))
        for at in (sources, targets)
      )  # type: ignore[misc]
  except (struct.error, IndexError, UnicodeDecodeError) as error:
    raise ValueError(f'the catalogue {name} is damaged: {error}') from error


def _string(content: bytes, length: int, start: int) -> str:
  if start + length > len(content):
    raise IndexError(
      f'a string ends at byte {start + length} of {len(content)}'
    )
  return content[start : start + length].decode('utf-8')
