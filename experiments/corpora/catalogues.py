"""Message catalogues: the .mo files of GNU gettext, as pairs of strings."""

import re
import struct
from collections.abc import Iterator

import polib

# An accelerator's mark stands before its letter: `~File`, `Hori_zontal`,
# `&Open`. `Black & White`, `~` alone and names such as `FILTER_NAME` stay.
_TILDE = re.compile(r'[~&](?=\w)')
_UNDERSCORE = re.compile(r'_(?=[^\W_])')
_NAME = re.compile(r'\b[A-Z0-9]+_[A-Z0-9]+\b|\w_\w*\(')
_MARKUP = re.compile(r'</?[A-Za-z][^>]*>')


def pairs(name: str, content: bytes) -> Iterator[tuple[str, str]]:
  """Yields messages and their translations, in the catalogue's order.

  Plurals are pairs of their own; messages with markup are left out. `name` is
  the file's, for the ValueError of a damaged one.
  """
  try:
    catalogue = polib.mofile(content)
  except (OSError, struct.error, UnicodeDecodeError, IndexError) as error:
    raise ValueError(f'the catalogue {name} is damaged: {error}') from error
  for entry in catalogue:
    sources, targets = [entry.msgid], [entry.msgstr]
    if entry.msgid_plural:
      # German has gettext's two forms, one and many.
      sources.append(entry.msgid_plural)
      targets = list(entry.msgstr_plural.values())
    for source, target in zip(sources, targets, strict=False):
      if not (_MARKUP.search(source) or _MARKUP.search(target)):
        yield source, target


def without_accelerator(text: str) -> str:
  """Removes the mark before a label's keyboard accelerator."""
  text = _TILDE.sub('', text)
  if text.count('_') == 1 and not _NAME.search(text):
    text = _UNDERSCORE.sub('', text)
  return text
