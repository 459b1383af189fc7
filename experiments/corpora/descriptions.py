"""Package descriptions: Debian's Packages and Translation indices."""

import dataclasses
import re
from collections.abc import Iterable, Iterator

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


def stanzas(
  lines: Iterable[str], fields: Iterable[str]
) -> Iterator[dict[str, list[str]]]:
  """Stanzas of an index, deb822(5), with some of their fields.

  Args:
    lines: of the index.
    fields: the fields that are wanted.

  Yields:
    Lines by field: the one with the name first, without the name.
  """
  fields = frozenset(fields)
  stanza: dict[str, list[str]] = {}
  current: list[str] | None = None
  for line in lines:
    line = line.rstrip('\n')
    if not line:
      if stanza:
        yield stanza
      stanza, current = {}, None
    elif line[0] == ' ':
      if current is not None:
        current.append(line[1:])
    else:
      name, _, value = line.partition(':')
      current = None
      if name in fields:
        stanza[name] = current = [value.strip()]
  if stanza:
    yield stanza


def descriptions(lines: Iterable[str], language: str) -> Iterator[Description]:
  """Descriptions of a Translation index, in its order.

  Args:
    lines: of the index.
    language: of the index, such as 'de'.
  """
  text_field = f'Description-{language}'
  fields = ('Package', 'Description-md5', text_field)
  for stanza in stanzas(lines, fields):
    if all(field in stanza for field in fields):
      synopsis, *rest = stanza[text_field]
      yield Description(
        package=stanza['Package'][0],
        md5=stanza['Description-md5'][0],
        synopsis=synopsis,
        paragraphs=tuple(_paragraphs(rest)),
      )


def text_pairs(
  english: Description, german: Description
) -> Iterator[tuple[str, str]]:
  """Texts of one description that translate each other.

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
  """The text after the synopsis, lists included, on one line."""
  return ' '.join(' '.join(entries) for entries in description.paragraphs)


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[str, ...]]:
  """Paragraphs between lines of a single dot, by entry if they are lists.

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
