"""The corpora of Debian's archive: what each is made of.

- `debian_ende`: English to German. Package descriptions by Description-md5,
  LibreOffice's message catalogues, and its help by element id, in sentences
  where the two sides have equally many.
- `debian_synopsis`: a package's long description, and its synopsis as summary.
- `debian_lm`: English descriptions as plain text.
- `debian_en`: English sentences without a translation, of descriptions and of
  manuals, for a target to translate (`specdec data rewrite`).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from experiments.corpora import (
  archive,
  catalogues,
  cleaning,
  deb,
  descriptions,
  documents,
  help_pages,
  splitting,
)
from experiments.corpora.archive import Archive
from experiments.corpora.descriptions import Description

Example = dict[str, str]
# An example, or why it is none, after its origin.
Outcome = tuple[str, Example | str]
_HELP = {
  'en': ('libreoffice-help-en-us', 'en-US'),
  'de': ('libreoffice-help-de', 'de'),
}
_L10N = 'libreoffice-l10n-de'
# What catalogues call the program, and the program calls itself.
_PRODUCT = '%PRODUCTNAME', 'LibreOffice'
_FEWEST_DOCUMENT_WORDS = 8
# English manuals in HTML.
_MANUALS = (
  'apache2-doc',
  'bind9-doc',
  'cmake-doc',
  'debian-reference-en',
  'developers-reference',
  'git-doc',
  'lilypond-doc-html',
  'linux-doc-6.1',
  'octave-doc',
  'postgresql-doc-15',
  'python-django-doc',
  'python-sqlalchemy-doc',
  'python3.11-doc',
  'qtbase5-doc-html',
  'sqlite3-doc',
)
_SENTENCE_WORDS = 3, 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """Examples by split, and what became of the others.

  Attributes:
    splits: examples by split, each with its group.
    counts: of candidates by origin, and of what was left out by reason.
  """

  splits: Mapping[str, list[Example]]
  counts: Mapping[str, Any]


def packages(corpora: Iterable[str]) -> tuple[str, ...]:
  """Lists the packages, besides the indices, that some corpora need."""
  corpora = set(corpora)
  manuals = _MANUALS if 'debian_en' in corpora else ()
  needs_pairs = corpora & {'debian_ende', 'debian_en'}
  return (*(archive.PACKAGES if needs_pairs else ()), *manuals)


def translation(files: Archive) -> Iterator[Outcome]:
  """Yields `debian_ende`: fields `inputs`, `targets`."""
  origins = {
    'descriptions': _description_pairs(files),
    'messages': _message_pairs(files),
    'help': _help_pairs(files),
  }
  for origin, pairs in origins.items():
    for group, *sides in pairs:
      english, german = (cleaning.normalise(side) for side in sides)
      for source, target in cleaning.aligned_sentences(english, german):
        example = {'inputs': source, 'targets': target, 'group': group}
        yield origin, cleaning.obstacle(source, target) or example


def summary(files: Archive) -> Iterator[Outcome]:
  """Yields `debian_synopsis`: fields `inputs`, the document, and `targets`."""
  for description in _descriptions(files, 'en'):
    document = cleaning.normalise(descriptions.long_text(description))
    synopsis = cleaning.normalise(description.synopsis)
    outcome: Example | str
    if cleaning.num_words(document) < _FEWEST_DOCUMENT_WORDS:
      outcome = 'short'
    elif not cleaning.num_words(synopsis):
      outcome = 'empty'
    else:
      group = files.group(description.package)
      outcome = {'inputs': document, 'targets': synopsis, 'group': group}
    yield 'descriptions', outcome


def plain_text(files: Archive) -> Iterator[Outcome]:
  """Yields `debian_lm`: field `text`, synopsis and paragraphs of a description.

  Packages of one source share paragraphs; each is kept where it comes first.
  """
  seen: set[str] = set()
  for description in _descriptions(files, 'en'):
    parts = []
    for entries in ((description.synopsis,), *description.paragraphs):
      part = cleaning.normalise(' '.join(entries))
      # Punctuation parts a synopsis, which has none, from what follows.
      part += '' if part.endswith(('.', ':', '!', '?')) else '.'
      if part not in seen:
        seen.add(part)
        parts.append(part)
    text = ' '.join(parts)
    is_short = cleaning.num_words(text) < _FEWEST_DOCUMENT_WORDS
    example = {'text': text, 'group': files.group(description.package)}
    yield 'descriptions', 'short' if is_short else example


def untranslated(files: Archive) -> Iterator[Outcome]:
  """Yields `debian_en`: field `inputs`, and the same as `targets`, to be
  replaced.

  A sentence that is in `debian_ende`, in whatever split, is left out.
  """
  pairs = build('debian_ende', files).splits.values()
  seen = {example['inputs'] for split in pairs for example in split}
  for origin, group, text in _english_texts(files):
    for sentence in cleaning.sentences(cleaning.normalise(text)):
      if sentence in seen:
        yield origin, 'repeated'
      elif not cleaning.is_english(sentence, *_SENTENCE_WORDS):
        yield origin, 'no English sentence'
      else:
        seen.add(sentence)
        yield origin, {'inputs': sentence, 'targets': sentence, 'group': group}


# What makes each, and the field that no two splits share.
CORPORA: Mapping[str, tuple[Callable[[Archive], Iterator[Outcome]], str]] = {
  'debian_ende': (translation, 'inputs'),
  'debian_synopsis': (summary, 'inputs'),
  'debian_lm': (plain_text, 'text'),
  'debian_en': (untranslated, 'inputs'),
}
# Built unless told otherwise: manuals are 150 MB to download.
DEFAULT = ('debian_ende', 'debian_synopsis', 'debian_lm')


def build(name: str, files: Archive) -> Corpus:
  """Makes a corpus of `CORPORA`."""
  outcomes, key = CORPORA[name]
  candidates: Counter[str] = Counter()
  removed: Counter[str] = Counter()

  def examples() -> Iterator[Example]:
    for origin, outcome in outcomes(files):
      candidates[origin] += 1
      if isinstance(outcome, str):
        removed[outcome] += 1
      else:
        yield outcome

  splits, repeated = splitting.divide(examples(), key=key)
  removed.update(repeated)
  return Corpus(
    splits=splits,
    counts={
      'candidates': dict(sorted(candidates.items())),
      'removed': dict(sorted(removed.items())),
    },
  )


def _english_texts(files: Archive) -> Iterator[tuple[str, str, str]]:
  """Yields origin, group and text of all that is there in English alone."""
  for description in _descriptions(files, 'en'):
    group = files.group(description.package)
    for entries in ((description.synopsis,), *description.paragraphs):
      yield from (('descriptions', group, text) for text in entries)
  for package in _MANUALS:
    for path, content in deb.files(files.debs[package], '.html'):
      page = content.decode('utf-8', errors='replace')
      for text in documents.paragraphs(page):
        yield package, f'{package}/{path}', text


def _descriptions(files: Archive, language: str) -> Iterator[Description]:
  """Yields the descriptions of an index; each text once, under its first
  package."""
  seen = set()
  for found in descriptions.descriptions(
    files.translations[language], language
  ):
    if found.md5 not in seen:
      seen.add(found.md5)
      yield found


def _description_pairs(files: Archive) -> Iterator[tuple[str, str, str]]:
  """Yields group and texts of every description that has a translation."""
  english = {d.md5: d for d in _descriptions(files, 'en')}
  for german in _descriptions(files, 'de'):
    if source := english.get(german.md5):
      group = files.group(german.package)
      for texts in descriptions.text_pairs(source, german):
        yield group, *texts


def _message_pairs(files: Archive) -> Iterator[tuple[str, str, str]]:
  """Yields group and texts of every message; a group is a catalogue."""
  for path, content in sorted(deb.files(files.debs[_L10N], '.mo')):
    group = f'{_L10N}/{path.rpartition("/")[2]}'
    for pair in catalogues.pairs(path, content):
      english, german = (
        catalogues.without_accelerator(side.replace(*_PRODUCT)) for side in pair
      )
      yield group, english, german


def _help_pairs(files: Archive) -> Iterator[tuple[str, str, str]]:
  """Yields group and texts of every element of the help; a group is a page."""
  english, german = (dict(_help_pages(files, side)) for side in _HELP)
  for key in sorted(english.keys() & german.keys()):
    translations = help_pages.texts(german[key])
    for element, text in help_pages.texts(english[key]).items():
      if translated := translations.get(element):
        yield f'libreoffice-help/{key}', text, translated


def _help_pages(files: Archive, side: str) -> Iterator[tuple[str, str]]:
  """Yields pages by the name that they have in every language."""
  package, language = _HELP[side]
  for path, content in deb.files(files.debs[package], '.html'):
    if key := help_pages.page_key(path, language):
      try:
        yield key, content.decode('utf-8')
      except UnicodeDecodeError as error:
        raise ValueError(f'{path} is damaged: {error}') from error
