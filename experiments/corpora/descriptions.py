"""Package descriptions: Debian's Packages and Translation indices."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from debian import deb822

_BULLET = re.compile(r'[*+o-]\s+(?=\S)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
  """What a package says of itself.

  Attributes:
    package: its name.
    md5: of the English description, by which translations are found.
    synopsis: the first line.
    paragraphs: of the rest; each is a tuple of its text, or of its list's
      entries.
  """

  package: str
  md5: str
  synopsis: str
  paragraphs: tuple[tuple[str, ...], ...]


def descriptions(path: Path, language: str) -> Iterator[Description]:
  """Yields the descriptions of a Translation index, in its order; `language` is
  the index's, such as 'de'. ValueError if it is not UTF-8."""
  text_field = f'Description-{language}'
  for stanza in stanzas(path, ('Package', 'Description-md5', text_field)):
    if len(stanza) == 3:
      synopsis, *rest = stanza[text_field].split('\n')
      yield Description(
        package=stanza['Package'],
        md5=stanza['Description-md5'],
        synopsis=synopsis,
        paragraphs=tuple(_paragraphs(rest)),
      )


def stanzas(path: Path, fields: Sequence[str]) -> Iterator[deb822.Packages]:
  """Yields the stanzas of an index with some of their fields."""
  try:
    with path.open('rb') as file:
      # Without the package python-apt, which belongs to the system's Python.
      yield from deb822.Packages.iter_paragraphs(
        file, fields=fields, use_apt_pkg=False
      )
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is damaged: {error}') from error


def text_pairs(
  english: Description, german: Description
) -> Iterator[tuple[str, str]]:
  """Yields texts of one description that translate each other.

  The synopses; and, where the paragraphs agree in number, the paragraphs, by
  entry where they are lists of as many entries.
  """
  yield english.synopsis, german.synopsis
  if len(english.paragraphs) == len(german.paragraphs):
    for source, target in zip(
      english.paragraphs, german.paragraphs, strict=True
    ):
      if len(source) == len(target):
        yield from zip(source, target, strict=True)
      else:
        yield ' '.join(source), ' '.join(target)


def long_text(description: Description) -> str:
  """Joins the text after the synopsis, lists included, on one line."""
  return ' '.join(' '.join(entries) for entries in description.paragraphs)


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[str, ...]]:
  """Yields paragraphs between lines of a single dot, by entry if they are
  lists.

  A list's entries begin with a bullet; what is indented further continues one.
  """
  entries: list[str] = []
  for line in [*lines, '.']:
    text = line.strip()
    if text == '.':
      if entries:
        yield tuple(entries)
      entries = []
    elif bullet := _BULLET.match(text):
      entries.append(text[bullet.end() :])
    elif entries:
      entries[-1] += f' {text}'
    elif text:
      entries.append(text)
