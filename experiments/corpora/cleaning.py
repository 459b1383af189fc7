"""What becomes of a text before it is an example, and which pairs are kept."""

import re
import unicodedata
from collections import Counter

# Neither text nor spacing: controls, soft hyphens, zero-width and direction
# marks. Controls that `str.split` takes for whitespace are left to it.
_INVISIBLE = re.compile(
  '[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e'
  '\u2060-\u206f\ufeff]'
)
_WORD = re.compile(r"[^\W\d_][\w'’-]*")
_LETTER = re.compile(r'[^\W\d_]')
# A sentence ends after two letters, digits or brackets and a mark; so neither
# "e.g. The" nor "z. B. Debian" is taken apart.
_SENTENCE_END = re.compile(
  r'(?<=[\w)"“”»\]][\w)"“”»\]][.!?])\s+(?=[("„“«]?[A-ZÄÖÜ])'
)
# `%1`, `%PRODUCTNAME`, `$(ARG1)`, `${name}`, `#VALUE#`, `{0}`.
_PLACEHOLDER = re.compile(
  r'%[A-Z_]{2,}%?|%[0-9]+|%[sdiuf]\b|\$\(\w+\)|\$\{?\w+\}?|\{\d+\}|#\w+#'
)

# The most frequent words of each language that the other does not have.
_ENGLISH = re.compile(
  r'\b(?:the|and|of|to|is|for|with|this|that|you|from|by|are|or|be|it)\b',
  re.IGNORECASE,
)
_GERMAN = re.compile(
  r'\b(?:der|die|das|und|ist|für|mit|von|ein|eine|den|dem|des|sie|zu|auf|nicht|'
  r'oder|wird|werden)\b',
  re.IGNORECASE,
)
_FEWEST_WORDS = 6  # Of a text whose language is judged.
# (German characters + 10) / (English characters + 10).
_LENGTH_RATIO = (0.4, 2.5)


def normalise(text: str) -> str:
  """Puts a text in NFC, without invisible characters, every space one blank."""
  text = unicodedata.normalize('NFC', text)
  return ' '.join(_INVISIBLE.sub('', text).split())


def num_words(text: str) -> int:
  """Counts the words that begin with a letter."""
  return len(_WORD.findall(text))


def obstacle(english: str, german: str) -> str | None:
  """Says why a pair is no translation worth learning; None if it is one.

  The filters are few and crude on purpose:

  - `empty`: a side without a letter, or with U+FFFD.
  - `identical`: both sides are the same text.
  - `placeholders`: `%1`, `$(ARG1)` and their like are not the same.
  - `length_ratio`: (characters + 10) of German over English is not within
    0.4 and 2.5.
  - `language`: a side of six words or more has more frequent words of the
    other language than of its own.
  """
  for text in (english, german):
    if not _LETTER.search(text) or '\N{REPLACEMENT CHARACTER}' in text:
      return 'empty'
  if english == german:
    return 'identical'
  if _placeholders(english) != _placeholders(german):
    return 'placeholders'
  low, high = _LENGTH_RATIO
  if not low <= (len(german) + 10) / (len(english) + 10) <= high:
    return 'length_ratio'
  if _is_of(english, _GERMAN, _ENGLISH) or _is_of(german, _ENGLISH, _GERMAN):
    return 'language'
  return None


def sentences(text: str) -> list[str]:
  """Splits a paragraph into sentences."""
  return _SENTENCE_END.split(text)


def is_english(text: str, fewest_words: int, most_words: int) -> bool:
  """Tells whether a text is an English sentence of so many words, rather than
  code, numbers or another language: nine characters in ten are letters or
  blanks."""
  num_letters = sum(c.isalpha() or c == ' ' for c in text)
  return (
    fewest_words <= num_words(text) <= most_words
    and num_letters >= 0.9 * len(text)
    and text.isascii()
    and not _is_of(text, _GERMAN, _ENGLISH)
  )


def aligned_sentences(english: str, german: str) -> list[tuple[str, str]]:
  """Makes sentence pairs of a pair of paragraphs; the paragraphs themselves if
  their sentences do not agree in number."""
  sides = _SENTENCE_END.split(english), _SENTENCE_END.split(german)
  if len(sides[0]) != len(sides[1]):
    return [(english, german)]
  return list(zip(*sides, strict=True))


def _placeholders(text: str) -> Counter[str]:
  return Counter(_PLACEHOLDER.findall(text))


def _is_of(text: str, language: re.Pattern, own: re.Pattern) -> bool:
  """Tells whether a text is of `language` rather than of its own."""
  if num_words(text) < _FEWEST_WORDS:
    return False
  return len(language.findall(text)) > len(own.findall(text))
