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
  """The packages, besides the indices, that some corpora need."""
  corpora = set(corpora)
  manuals = _MANUALS if 'debian_en' in corpora else ()
  needs_pairs = corpora & {'debian_ende', 'debian_en'}
  return (*(archive.PACKAGES if needs_pairs else ()), *manuals)


def translation(files: Archive) -> Corpus:
  """`debian_ende`: fields `inputs`, `targets`."""
  origins = {
    'descriptions': _description_pairs(files),
    'messages': _message_pairs(files),
    'help': _help_pairs(files),
  }
  removed: Counter[str] = Counter()
  candidates: Counter[str] = Counter()

  def examples() -> Iterator[Example]:
    for origin, pairs in origins.items():
      for group, *sides in pairs:
        english, german = (cleaning.normalise(side) for side in sides)
        for source, target in cleaning.aligned_sentences(english, german):
          candidates[origin] += 1
          if reason := cleaning.obstacle(source, target):
            removed[reason] += 1
          else:
            yield {'inputs': source, 'targets': target, 'group': group}

  splits, repeated = splitting.divide(examples(), key='inputs')
  return _corpus(splits, candidates, removed, repeated)


def summary(files: Archive) -> Corpus:
  """`debian_synopsis`: fields `inputs`, the document, and `targets`."""
  removed: Counter[str] = Counter()
  candidates: Counter[str] = Counter()

  def examples() -> Iterator[Example]:
    for description in _descriptions(files, 'en'):
      candidates['descriptions'] += 1
      document = cleaning.normalise(descriptions.long_text(description))
      synopsis = cleaning.normalise(description.synopsis)
      if cleaning.num_words(document) < _FEWEST_DOCUMENT_WORDS:
        removed['short'] += 1
      elif not cleaning.num_words(synopsis):
        removed['empty'] += 1
      else:
        group = files.group(description.package)
        yield {'inputs': document, 'targets': synopsis, 'group': group}

  splits, repeated = splitting.divide(examples(), key='inputs')
  return _corpus(splits, candidates, removed, repeated)


def plain_text(files: Archive) -> Corpus:
  """`debian_lm`: field `text`, synopsis and paragraphs of a description.

  Packages of one source share paragraphs; each is kept where it comes first.
  """
  removed: Counter[str] = Counter()
  candidates: Counter[str] = Counter()
  seen: set[str] = set()

  def examples() -> Iterator[Example]:
    for description in _descriptions(files, 'en'):
      candidates['descriptions'] += 1
      parts = []
      for entries in ((description.synopsis,), *description.paragraphs):
        part = cleaning.normalise(' '.join(entries))
        # Punctuation parts a synopsis, which has none, from what follows.
        part += '' if part.endswith(('.', ':', '!', '?')) else '.'
        if part not in seen:
          seen.add(part)
          parts.append(part)
      text = ' '.join(parts)
      if cleaning.num_words(text) < _FEWEST_DOCUMENT_WORDS:
        removed['short'] += 1
      else:
        group = files.group(description.package)
        yield {'text': text, 'group': group}

  splits, repeated = splitting.divide(examples(), key='text')
  return _corpus(splits, candidates, removed, repeated)


def untranslated(files: Archive) -> Corpus:
  """`debian_en`: field `inputs`, and the same as `targets`, to be replaced.

  A sentence that is in `debian_ende`, in whatever split, is left out.
  """
  removed: Counter[str] = Counter()
  candidates: Counter[str] = Counter()
  pairs = translation(files).splits.values()
  seen = {example['inputs'] for split in pairs for example in split}

  def texts() -> Iterator[tuple[str, str, str]]:
    for description in _descriptions(files, 'en'):
      group = files.group(description.package)
      for entries in ((description.synopsis,), *description.paragraphs):
        yield from (('descriptions', group, text) for text in entries)
    for package in _MANUALS:
      for path, content in deb.files(files.debs[package], '.html'):
        page = content.decode('utf-8', errors='replace')
        for text in documents.paragraphs(page):
          yield package, f'{package}/{path}', text

  def examples() -> Iterator[Example]:
    for origin, group, text in texts():
      for sentence in cleaning.sentences(cleaning.normalise(text)):
        candidates[origin] += 1
        if sentence in seen:
          removed['repeated'] += 1
        elif not cleaning.is_english(sentence, *_SENTENCE_WORDS):
          removed['no English sentence'] += 1
        else:
          seen.add(sentence)
          yield {'inputs': sentence, 'targets': sentence, 'group': group}

  splits, repeated = splitting.divide(examples(), key='inputs')
  return _corpus(splits, candidates, removed, repeated)


CORPORA: Mapping[str, Callable[[Archive], Corpus]] = {
  'debian_ende': translation,
  'debian_synopsis': summary,
  'debian_lm': plain_text,
  'debian_en': untranslated,
}
# Built unless told otherwise: manuals are 150 MB to download.
DEFAULT = ('debian_ende', 'debian_synopsis', 'debian_lm')


def _corpus(
  splits: Mapping[str, list[Example]],
  candidates: Mapping[str, int],
  *removed: Mapping[str, int],
) -> Corpus:
  reasons: Counter[str] = Counter()
  for counts in removed:
    reasons.update(counts)
  return Corpus(
    splits=splits,
    counts={
      'candidates': dict(sorted(candidates.items())),
      'removed': dict(sorted(reasons.items())),
    },
  )


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
  """Group and texts of every description that has a translation."""
  english = {d.md5: d for d in _descriptions(files, 'en')}
  for german in _descriptions(files, 'de'):
    if source := english.get(german.md5):
      group = files.group(german.package)
      for texts in descriptions.text_pairs(source, german):
        yield group, *texts


def _message_pairs(files: Archive) -> Iterator[tuple[str, str, str]]:
  """Group and texts of every message; a group is a catalogue."""
  for path, content in sorted(deb.files(files.debs[_L10N], '.mo')):
    group = f'{_L10N}/{path.rpartition("/")[2]}'
    for pair in catalogues.pairs(path, content):
      english, german = (
        catalogues.without_accelerator(side.replace(*_PRODUCT)) for side in pair
      )
      yield group, english, german


def _help_pairs(files: Archive) -> Iterator[tuple[str, str, str]]:
  """Group and texts of every element of the help; a group is a page."""
  english, german = (dict(_help_pages(files, side)) for side in _HELP)
  for key in sorted(english.keys() & german.keys()):
    translations = help_pages.texts(german[key])
    for element, text in help_pages.texts(english[key]).items():
      if translated := translations.get(element):
        yield f'libreoffice-help/{key}', text, translated


def _help_pages(files: Archive, side: str) -> Iterator[tuple[str, str]]:
  """Pages by the name that they have in every language."""
  package, language = _HELP[side]
  for path, content in deb.files(files.debs[package], '.html'):
    if key := help_pages.page_key(path, language):
      try:
        yield key, content.decode('utf-8')
      except UnicodeDecodeError as error:
        raise ValueError(f'{path} is damaged: {error}') from error
