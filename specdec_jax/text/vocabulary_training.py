"""SentencePiece vocabularies, trained on text."""

import io
from collections.abc import Iterable

from specdec_jax.files.require import require

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
_FEWEST_IDS = 300  # Bytes, the three ids above, and some characters.
# Of the text's characters; the others are spelled in bytes.
_CHARACTER_COVERAGE = 0.9999
_LONGEST_LINE = 16_384  # Bytes; longer lines would be left out, silently.


def train(texts: Iterable[str], *, size: int) -> bytes:
  """Trains a vocabulary; the content of a .model file.

  A unigram model (Kudo 2018, https://arxiv.org/abs/1804.10959) with T5's ids:
  pad 0, eos 1, unk 2, and no bos. Unlike T5's it does not normalise, and spells
  rare characters in bytes, so that every text comes back as it was, its blanks
  apart. The same texts give the same vocabulary.

  Args:
    texts: what to train on, a line each.
    size: V, all special ids included.

  Raises:
    ImportError: if sentencepiece is missing.
    ValueError: if the text is too short for that many tokens.
  """
  sentencepiece = require(
    'sentencepiece', extra='data', purpose='training a vocabulary'
  )
  if size < _FEWEST_IDS:
    raise ValueError(
      f'a vocabulary needs at least {_FEWEST_IDS} ids, got {size}'
    )
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts),
      model_writer=model,
      model_type='unigram',
      vocab_size=size,
      character_coverage=_CHARACTER_COVERAGE,
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
