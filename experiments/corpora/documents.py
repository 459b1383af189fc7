"""Manuals: the paragraphs of HTML pages."""

from collections.abc import Iterator
from html.parser import HTMLParser

_TEXT_TAGS = frozenset(['p', 'li', 'dd', 'blockquote'])
# What is no running text, and what ends a paragraph.
_SKIPPED_TAGS = frozenset(['script', 'style', 'pre', 'table', 'nav', 'head'])
_BLOCK_TAGS = _TEXT_TAGS | _SKIPPED_TAGS | {'div', 'dl', 'ul', 'ol', 'dt', 'h1'}


def paragraphs(page: str) -> Iterator[str]:
  """Yields the paragraphs and list entries of an HTML page, in its order."""
  reader = _Reader()
  reader.feed(page)
  reader.close()
  yield from (text for parts in reader.found if (text := ''.join(parts)))


class _Reader(HTMLParser):
  """Collects what stands in paragraphs, outside of code and tables."""

  def __init__(self) -> None:
    super().__init__(convert_charrefs=True)
    self.found: list[list[str]] = []
    self._is_open = False
    self._skipped: list[str] = []

  def handle_starttag(self, tag: str, attrs: object) -> None:
    if tag in _SKIPPED_TAGS:
      self._skipped.append(tag)
    if tag in _BLOCK_TAGS:
      self._is_open = tag in _TEXT_TAGS and not self._skipped
      if self._is_open:
        self.found.append([])
    elif tag == 'br' and self._is_open:
      self.found[-1].append(' ')

  def handle_endtag(self, tag: str) -> None:
    if tag in self._skipped:
      # Tags that were left open end here, too.
      del self._skipped[self._skipped.index(tag) :]
    if tag in _BLOCK_TAGS:
      self._is_open = False

  def handle_data(self, data: str) -> None:
    if self._is_open:
      self.found[-1].append(data)
