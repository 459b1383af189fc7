"""SentencePiece vocabularies, T5's among them."""

import dataclasses
import functools
import io
import itertools
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from specdec_jax.files.paths import user_path
from specdec_jax.files.require import require
from specdec_jax.text import ends, vocabularies

SPACE = '\N{LOWER ONE EIGHTH BLOCK}'
_USER_DEFINED = 4  # Of the enumeration ModelProto.SentencePiece.Type.
_T5_SENTINELS = 100
_PADDING = 128  # Of which T5X's embeddings have a multiple of rows.
# More than any known model has, and quickly built.
MAX_SENTINELS = 10_000
# Of vocabularies that are trained here.
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
_FEWEST_IDS = 300  # Bytes, the three ids above, and some characters.
# Of the text's characters; the others are spelled in bytes.
_CHARACTER_COVERAGE = 0.9999
_LONGEST_LINE = 16_384  # Bytes; longer lines would be left out, silently.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceVocabulary:
  """A SentencePiece model, read as T5 reads it, with the interface of
  `vocabularies.Vocabulary`: a `sentencepiece.SentencePieceProcessor` of the
  `model`, which is as its file holds it, and of `extra_ids` sentinels
  `<extra_id_0>`, ... that follow its pieces."""

  processor: Any
  model: bytes
  extra_ids: int = 0
  eos_ids: tuple[int, ...] = (1,)
  chat_template: str | None = None
  tool_template: str | None = None

  @property
  def vocab_size(self) -> int:
    """Returns the bound of ids. A model's own V can be larger: padding."""
    return self.processor.get_piece_size()

  @property
  def roles(self) -> dict[str, str]:
    """Names the piece that ends a text, such as `</s>`, as `eos_token`."""
    if not self.eos_ids:
      return {}
    return {'eos_token': self.processor.id_to_piece(self.eos_ids[0])}

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """Lists the ids that are no text: padding and end."""
    return frozenset(filter(self.processor.is_control, range(self.vocab_size)))

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Encodes a text, with the end id last if special tokens are to be added.
    Sentinels in it are recognised; runs of white space count as one space."""
    # T5's inputs end in EOS and begin with no token of their own.
    ids = self.processor.encode(text)
    return [*ids, *self.eos_ids[:1]] if add_special_tokens else ids

  encode_chat = vocabularies.encode_chat
  pieces = vocabularies.text_pieces

  def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Decodes token ids; ids beyond the vocabulary are unknown tokens. Padding
    and end tokens have no text, or their names with `keep_special`."""
    unknown = self.processor.unk_id()
    ids = [int(i) if 0 <= i < self.vocab_size else unknown for i in ids]
    if not keep_special:
      return self.processor.decode(ids)
    text = ''
    for is_control, group in itertools.groupby(ids, self.processor.is_control):
      run = list(group)
      pieces = self.processor.id_to_piece(run)
      # In the middle of a text, pieces keep their first space.
      space = ' ' * (bool(text) and pieces[0].startswith(SPACE))
      text += (
        ''.join(pieces) if is_control else space + self.processor.decode(run)
      )
    return text

  def token_to_id(self, token: str) -> int | None:
    """Returns the id of a piece; None if there is none."""
    token_id = self.processor.piece_to_id(token)
    return None if self.processor.is_unknown(token_id) else token_id

  def id_to_text(self, token_id: int) -> str:
    """Returns a printable piece."""
    if not 0 <= token_id < self.vocab_size:
      return f'<id {int(token_id)}>'
    return self.processor.id_to_piece(int(token_id)).replace(SPACE, ' ')

  def tokens(self) -> list[str]:
    """Lists the piece of every id below `vocab_size`."""
    return [self.processor.id_to_piece(i) for i in range(self.vocab_size)]


def load(
  path: str | os.PathLike[str],
  *,
  extra_ids: int | None = None,
  num_rows: int | None = None,
) -> SentencePieceVocabulary:
  """Reads a SentencePiece model, such as spiece.model.

  `extra_ids` sentinels follow the pieces, unless the model has its own: T5's
  32,000 pieces and 100 sentinels are 32,100 ids, `<extra_id_0>` the last of
  them. None means the one of 100 and 0 with which the ids, padded to a multiple
  of 128 or not, fill the `num_rows` of the embeddings, and 100 without these.

  Raises ValueError if the file is no SentencePiece model, if there are too many
  sentinels, or if `num_rows` does not tell how many there are; ImportError
  without the sentencepiece package.
  """
  model = user_path(path).read_bytes()
  if (extra_ids or 0) > MAX_SENTINELS:
    raise ValueError(
      f'{extra_ids} sentinels cannot follow the pieces of {path}: there can be '
      f'up to {MAX_SENTINELS}'
    )
  try:
    return _parsed(model, extra_ids, num_rows)
  # UnicodeDecodeError if a piece, or one in the error's message, is not text.
  except (RuntimeError, UnicodeDecodeError) as error:
    raise ValueError(
      f'{path} is no SentencePiece model, or is truncated'
    ) from error
  except ValueError as error:
    raise ValueError(f'{path} {error}') from error


# Target and draft model mostly have the same file.
@functools.lru_cache(maxsize=1)
def _parsed(
  model: bytes, extra_ids: int | None, num_rows: int | None
) -> SentencePieceVocabulary:
  purpose = 'a SentencePiece vocabulary'
  sentencepiece = require('sentencepiece', extra='models', purpose=purpose)
  processor = sentencepiece.SentencePieceProcessor()
  processor.LoadFromSerializedProto(model)
  # mT5's model has its sentinels already.
  if not processor.is_unknown(processor.piece_to_id(_sentinel(0))):
    extra_ids = 0
  elif extra_ids is None:
    extra_ids = _num_sentinels(processor.get_piece_size(), num_rows)
  processor.LoadFromSerializedProto(model + _sentinels(extra_ids))
  processor.id_to_piece(list(range(processor.get_piece_size())))
  eos_id = processor.eos_id()
  vocabulary = SentencePieceVocabulary(
    processor=processor,
    model=model,
    extra_ids=extra_ids,
    eos_ids=() if eos_id < 0 else (eos_id,),
  )
  return ends.with_ends(vocabulary, (), 'the model')


def train(texts: Iterable[str], *, size: int) -> bytes:
  """Trains a vocabulary; returns the content of a .model file.

  A unigram model (Kudo 2018, https://arxiv.org/abs/1804.10959) with T5's ids:
  pad 0, eos 1, unk 2, and no bos. Every text comes back as it was, its blanks
  apart. The same texts, a line each, give the same vocabulary. `size` is V with
  all special ids; ValueError if the texts are too short for it.
  """
  purpose = 'training a vocabulary'
  sentencepiece = require('sentencepiece', extra='data', purpose=purpose)
  if size < _FEWEST_IDS:
    raise ValueError(
      f'a vocabulary needs {_FEWEST_IDS} ids or more, got {size}'
    )
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts),
      model_writer=model,
      model_type='unigram',
      vocab_size=size,
      character_coverage=_CHARACTER_COVERAGE,
      # Unlike T5's it spells rare characters in bytes, and normalises nothing.
      byte_fallback=True,
      normalization_rule_name='identity',
      split_digits=True,
      max_sentence_length=_LONGEST_LINE,
      pad_id=PAD_ID,
      eos_id=EOS_ID,
      unk_id=UNK_ID,
      bos_id=-1,
      # More threads would add up in another order.
      num_threads=1,
      minloglevel=2,
    )
  except (RuntimeError, OSError) as error:
    reason = str(error).strip().rpartition('] ')[2]  # Behind its own place.
    raise ValueError(
      f'no vocabulary of {size} can be trained on this text: {reason}'
    ) from error
  return model.getvalue()


def _num_sentinels(num_pieces: int, num_rows: int | None) -> int:
  """Returns how many sentinels follow the pieces of a model without its own;
  raises ValueError if its embeddings do not tell, such as umT5's with 300."""
  # T5's 32,000 pieces have 32,128 rows, with sentinels and padding. A model
  # with as many rows as pieces, 8,192 say, has no sentinels.
  if num_rows is None:
    return _T5_SENTINELS
  candidates = (_T5_SENTINELS, 0)
  for extra_ids in candidates:
    if num_pieces + extra_ids == num_rows:
      return extra_ids
  fitting = [
    extra_ids
    for extra_ids in candidates
    if -(-(num_pieces + extra_ids) // _PADDING) * _PADDING == num_rows
  ]
  if len(fitting) == 1:
    return fitting[0]
  raise ValueError(
    f'has {num_pieces} pieces for {num_rows} embeddings, which does not tell '
    f'how many sentinels ({vocabularies.SENTINEL}0>, ...) there are: put '
    '{"extra_ids": N} into tokenizer_config.json beside it'
  )


def _sentinels(extra_ids: int) -> bytes:
  """Makes the pieces to append to a serialised model, the last sentinel first,
  as SeqIO adds them (https://github.com/google/seqio, vocabularies.py)."""
  # A repeated field of a protocol buffer may be continued after its end.
  # Written by hand, since the package's own messages need protobuf, whose
  # import takes a quarter of a second: field 1 (piece) is the name, field 2
  # (0x15) a float32 score and field 3 (0x18) the type. Lengths stand before
  # field 1.
  field = lambda value: bytes([1 << 3 | 2, len(value)]) + value
  rest = b'\x15' + struct.pack('<f', 0.0) + b'\x18' + bytes([_USER_DEFINED])
  return b''.join(
    field(field(_sentinel(i).encode()) + rest)
    for i in reversed(range(extra_ids))
  )


def _sentinel(i: int) -> str:
  return f'{SPACE}{vocabularies.SENTINEL}{i}>'
