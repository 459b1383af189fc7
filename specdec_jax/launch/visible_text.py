"""Escapes control characters in texts of models and files, so that a terminal
shows them instead of executing them.

Like `ls` and `git`, commands write such texts unchanged to a file or a pipe,
and escaped to a terminal. Messages on standard error are always escaped, since
they may contain names from files.
"""

import unicodedata
from typing import IO

# Control and format characters, surrogates, separators of lines and paragraphs.
_HIDDEN = ('Cc', 'Cf', 'Cs', 'Zl', 'Zp')
_PICTURES = {chr(code): chr(0x2400 + code) for code in range(0x20)}
_PICTURES |= {'\n': '⏎', '\t': '⇥', '\x7f': '␡'}


def visible(text: str, *, keep: str = '') -> str:
  """Replaces every character that would control the terminal.

  Control characters become control pictures; line breaks `⏎`, tabs `⇥`;
  characters that reorder text, lone surrogates, line separators and what XML
  forbids become `<U+XXXX>`. Characters in `keep` stay.
  """

  def shown(character: str) -> str:
    # Control characters, so that no token can control a terminal.
    if character in keep:
      return character
    if character in _PICTURES:
      return _PICTURES[character]
    code = ord(character)
    is_hidden = unicodedata.category(character) in _HIDDEN
    # Joiners and tags, which occur within emojis and Arabic words, stay.
    is_part = character in '\u200c\u200d' or 0xE0020 <= code <= 0xE007F
    if (is_hidden and not is_part) or code in (0xFFFE, 0xFFFF):
      return f'<U+{code:04X}>'
    return character

  return ''.join(map(shown, text))


def visible_lines(text: str) -> str:
  """Returns a text `visible`, with its line breaks and tabs."""
  return visible(text, keep='\n\t')


def for_stream(text: str, stream: IO[str]) -> str:
  """Returns a text as it is written to a stream: `visible_lines` on a terminal,
  elsewhere as it is."""
  return visible_lines(text) if stream.isatty() else text
