"""Vocabularies in the files that stand beside a model's parameters."""

import dataclasses
import json
import os
from pathlib import Path

from specdec_jax.checkpoints import huggingface, settings
from specdec_jax.files.paths import user_path
from specdec_jax.text import sentencepiece_vocabulary
from specdec_jax.text.sentencepiece_vocabulary import (
  SPACE,
  SentencePieceVocabulary,
)
from specdec_jax.text.vocabularies import SENTINEL, AnyVocabulary

SENTENCEPIECE = 'spiece.model'
TOKENIZER = 'tokenizer.json'
_SETTINGS = 'tokenizer_config.json'
_GENERATION = 'generation_config.json'
_T5_EOS_IDS = (1,)
# All files that `write` may write.
WRITTEN = (SENTENCEPIECE, TOKENIZER, _SETTINGS, _GENERATION)


def is_in(folder: str | os.PathLike[str]) -> bool:
  """Tells whether a folder has a vocabulary."""
  path = user_path(folder)
  return (path / SENTENCEPIECE).is_file() or (path / TOKENIZER).is_file()


def read(
  path: str | os.PathLike[str],
  *,
  extra_ids: int | None = None,
  num_rows: int | None = None,
) -> AnyVocabulary:
  """Reads a SentencePiece model, or what a folder has in tokenizer.json or else
  in spiece.model.

  The arguments are those of `sentencepiece_vocabulary.load`, but None first
  takes the extra ids that tokenizer_config.json states. ValueError if there is
  no vocabulary, or it is broken; ImportError without the package that reads it.
  """
  path = user_path(path)
  if not path.is_dir():
    return _read_sentencepiece(path, extra_ids, num_rows)
  # As in transformers: tokens may have been added that only the former has.
  if (path / TOKENIZER).is_file():
    return huggingface.read_vocabulary(path)
  if not (path / SENTENCEPIECE).is_file():
    raise ValueError(
      f'{path} has no vocabulary: expected {TOKENIZER} or {SENTENCEPIECE} in '
      'it, or the path of another (--vocabulary)'
    )
  found = _read_sentencepiece(path / SENTENCEPIECE, extra_ids, num_rows)
  _check_added(path, found)
  return _with_eos_ids(path, found)


def _read_sentencepiece(
  model: Path, extra_ids: int | None, num_rows: int | None
) -> SentencePieceVocabulary:
  values = settings.read_if_any(model.parent / _SETTINGS)
  if extra_ids is None and values.has('extra_ids'):
    most = sentencepiece_vocabulary.MAX_SENTINELS
    extra_ids = values.count('extra_ids', least=0, most=most)
  return sentencepiece_vocabulary.load(
    model, extra_ids=extra_ids, num_rows=num_rows
  )


def _check_added(folder: Path, vocabulary: SentencePieceVocabulary) -> None:
  """Raises ValueError for added tokens: SentencePiece would split them."""
  added = huggingface.added_tokens(
    folder, huggingface.tokenizer_settings(folder)
  )
  processor = vocabulary.processor
  for text in added:
    names = text, f'{SPACE}{text}'
    is_known = text == '<unk>' or any(
      processor.piece_to_id(name) != processor.unk_id() for name in names
    )
    if not (is_known or text.startswith(SENTINEL)):
      raise ValueError(
        f'{folder} has an added token {text!r} that {SENTENCEPIECE} has not: '
        f'write {TOKENIZER} by save_pretrained of the tokenizer in transformers'
      )


def _with_eos_ids(
  folder: Path, vocabulary: SentencePieceVocabulary
) -> SentencePieceVocabulary:
  """Adds the end ids that the folder's JSON files state beside its own."""
  own, stated = vocabulary.eos_ids, huggingface.read_eos_ids(folder)
  if not stated:
    return vocabulary
  if not set(own) <= set(stated) or max(stated) >= vocabulary.vocab_size:
    raise ValueError(
      f'{folder}: eos_token_id is {list(stated)}, and {SENTENCEPIECE} of '
      f'{vocabulary.vocab_size} tokens ends texts with {list(own)}'
    )
  others = tuple(token_id for token_id in stated if token_id not in own)
  return dataclasses.replace(vocabulary, eos_ids=own + others)


def write(folder: str | os.PathLike[str], vocabulary: AnyVocabulary) -> None:
  """Writes a vocabulary into a folder, from which `read` reads it."""
  folder = user_path(folder)
  if isinstance(vocabulary, SentencePieceVocabulary):
    (folder / SENTENCEPIECE).write_bytes(vocabulary.model)
    config: dict[str, object] = {
      'tokenizer_class': 'T5Tokenizer',
      'extra_ids': vocabulary.extra_ids,
      **vocabulary.roles,
    }
    if vocabulary.eos_ids not in ((), _T5_EOS_IDS):
      # MADLAD-400's, say; else what config.json says of T5 is right.
      eos_ids = list(vocabulary.eos_ids)
      _write_json(folder / _GENERATION, {'eos_token_id': eos_ids})
  else:
    text = vocabulary.tokenizer.to_str()
    (folder / TOKENIZER).write_text(text, encoding='utf-8')
    template: object = vocabulary.chat_template
    if vocabulary.tool_template is not None:
      named = {'default': template, 'tool_use': vocabulary.tool_template}
      template = [{'name': k, 'template': v} for k, v in named.items() if v]
    config = {**vocabulary.roles, 'chat_template': template}
    eos_ids = list(vocabulary.eos_ids)
    _write_json(folder / _GENERATION, {'eos_token_id': eos_ids})
  _write_json(folder / _SETTINGS, config)


def _write_json(path: Path, value: dict[str, object]) -> None:
  text = json.dumps(value, indent=2, ensure_ascii=False) + '\n'
  path.write_text(text, encoding='utf-8')
