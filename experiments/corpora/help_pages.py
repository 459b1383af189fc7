"""Help pages: the texts of LibreOffice's HTML by element id."""

import re
from html.parser import HTMLParser

# Paragraphs, headings and list entries that the translators worked on. What has
# no such id is navigation.
_TEXT_ID = re.compile(r'(?:par|hd)_id')
_TEXT_TAGS = frozenset(['p', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6'])
_SKIPPED_TAGS = frozenset(['script', 'style'])
_NESTING_TAGS = _SKIPPED_TAGS | {'span'}


def texts(page: str) -> dict[str, str]:
  """Reads the texts of a page's elements by id, in the page's order.

  Args:
    page: HTML. A page without any such element has no texts.
  """
  reader = _Reader()
  reader.feed(page)
  reader.close()
  return {
    key: text for key, parts in reader.found.items() if (text := ''.join(parts))
  }


def page_key(path: str, language: str) -> str | None:
  """Returns what a page is called in every language; None for other files.

  Args:
    path: in the package, such as `.../help/de/text/swriter/main.html`.
    language: as in that path.
  """
  _, found, key = path.partition(f'/help/{language}/')
  return key if found and key.startswith('text/') else None


class _Reader(HTMLParser):
  """Collects the texts of elements with an id, as far as a reader sees them.

  Where a text differs by platform or module, a page has every variant, hidden;
  the default one is taken.
  """

  def __init__(self) -> None:
    super().__init__(convert_charrefs=True)
    self.found: dict[str, list[str]] = {}
    self._key: str | None = None
    self._depth_of_skipped = 0  # Elements open inside what is left out.

  def handle_starttag(
    self, tag: str, attrs: list[tuple[str, str | None]]
  ) -> None:
    if self._depth_of_skipped and tag in _NESTING_TAGS:
      self._depth_of_skipped += 1
    elif tag in _SKIPPED_TAGS or _is_variant(tag, dict(attrs)):
      self._depth_of_skipped = 1
    elif tag == 'br' and self._key:
      self.found[self._key].append(' ')
    elif tag in _TEXT_TAGS:
      key = dict(attrs).get('id') or ''
      # An id that comes twice is a text shown twice.
      is_new = _TEXT_ID.match(key) and key not in self.found
      self._key = key if is_new else None
      if self._key:
        self.found[self._key] = []

  def handle_endtag(self, tag: str) -> None:
    if self._depth_of_skipped and tag in _NESTING_TAGS:
      self._depth_of_skipped -= 1
    elif tag in _TEXT_TAGS:
      self._key = None
      self._depth_of_skipped = 0

  def handle_data(self, data: str) -> None:
    if self._key and not self._depth_of_skipped:
      self.found[self._key].append(data)


def _is_variant(tag: str, attributes: dict[str, str | None]) -> bool:
  """Tells whether an element is shown on some platforms or in some modules
  only."""
  is_default = (attributes.get('id') or '').startswith('default')
  return tag == 'span' and 'hidden' in attributes and not is_default
