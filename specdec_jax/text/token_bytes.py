"""The bytes that each token of a vocabulary adds to a text."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.text.sentencepiece_vocabulary import SentencePieceVocabulary
from specdec_jax.text.vocabularies import AnyVocabulary


def token_bytes(vocabulary: AnyVocabulary) -> list[bytes]:
  """The bytes that each token adds to a text, none for what is no text;
  ValueError if the vocabulary does not say how its tokens are spelled."""
  spell = _speller(vocabulary)
  special = vocabulary.special_ids
  return [
    b'' if i in special else spell(i, token)
    for i, token in enumerate(vocabulary.tokens())
  ]


def drops_first_space(
  vocabulary: AnyVocabulary, spelled: Sequence[bytes]
) -> bool:
  """Tells whether the space that begins the first token of a text is no part of
  the text, as in most SentencePiece vocabularies."""
  for i, text in enumerate(spelled):
    if text[:1] == b' ' and text[1:].isalpha():
      return not vocabulary.decode([i]).startswith(' ')
  return False


def _speller(vocabulary: AnyVocabulary) -> Callable[[int, str], bytes]:
  if isinstance(vocabulary, SentencePieceVocabulary):
    return _of_pieces({}, vocabulary.processor.is_byte)
  tokenizer: Any = getattr(vocabulary, 'tokenizer', None)
  # A tokenizer of another package need not say how it spells.
  stated = tokenizer.to_str() if hasattr(tokenizer, 'to_str') else '{}'
  parts = json.loads(stated)
  decoder = json.dumps(parts.get('decoder'))
  contents = [token['content'] for token in parts.get('added_tokens', ())]
  added = {content: content.encode() for content in contents}
  if '"ByteLevel"' in decoder:
    table = _byte_of_character()
    return lambda _, token: added.get(token) or bytes(table[c] for c in token)
  if '"ByteFallback"' in decoder:
    return _of_pieces(added, lambda _: True)
  if '"Metaspace"' in decoder:
    return _of_pieces(added, lambda _: False)
  raise ValueError(
    'a grammar needs to know how tokens are spelled, and this vocabulary has '
    'neither byte-level nor SentencePiece tokens'
  )


def _of_pieces(
  added: Mapping[str, bytes], may_be_byte: Callable[[int], bool]
) -> Callable[[int, str], bytes]:
  """How SentencePiece's tokens are spelled. Only where `may_be_byte(id)` is a
  token such as `<0x0A>` a byte; elsewhere it is text."""

  def spell(token_id: int, token: str) -> bytes:
    looks_like_byte = len(token) == 6 and token.startswith('<0x')
    if looks_like_byte and token.endswith('>') and may_be_byte(token_id):
      return bytes([int(token[3:5], 16)])
    if token == '<unk>' or token.startswith(('<extra_id_', '▁<extra_id_')):
      return b''
    return added.get(token) or token.replace('▁', ' ').encode()

  return spell


def _byte_of_character() -> Mapping[str, int]:
  """The bytes that byte-level vocabularies write as characters: those that can
  be seen as themselves, the others from U+0100 on."""
  seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [i for i in range(256) if i not in seen]
  return {chr(i): i for i in seen} | {
    chr(256 + n): i for n, i in enumerate(others)
  }
