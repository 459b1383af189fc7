"""Vocabularies in the files that stand beside a model's parameters."""

import json
import os
from pathlib import Path
from typing import Any

from specdec_jax.checkpoints import huggingface
from specdec_jax.checkpoints.huggingface_config import read_json
from specdec_jax.data import sentencepiece_vocabulary
from specdec_jax.data.local_path import local_path
from specdec_jax.data.sentencepiece_vocabulary import SentencePieceVocabulary
from specdec_jax.data.vocabularies import AnyVocabulary

SENTENCEPIECE = 'spiece.model'
TOKENIZER = 'tokenizer.json'
_SETTINGS = 'tokenizer_config.json'
_GENERATION = 'generation_config.json'
# All files that `write` may write.
WRITTEN = (SENTENCEPIECE, TOKENIZER, _SETTINGS, _GENERATION)
_T5_EXTRA_IDS = 100


def is_in(folder: str | os.PathLike[str]) -> bool:
  """Whether a folder has a vocabulary."""
  return any((Path(folder) / n).is_file() for n in (SENTENCEPIECE, TOKENIZER))


def read(
  path: str | os.PathLike[str], *, extra_ids: int | None = None
) -> AnyVocabulary:
  """Reads a vocabulary.

  Args:
    path: of a SentencePiece model, or of a folder with spiece.model or
      tokenizer.json.
    extra_ids: how many sentinels follow the pieces of a SentencePiece model;
      None means what tokenizer_config.json says, else 100, as in T5.

  Raises:
    ValueError: if there is none, or it is broken.
    ImportError: if the package that reads it is not installed.
  """
  path = local_path(path)
  if path.is_dir() and not (path / SENTENCEPIECE).is_file():
    if not (path / TOKENIZER).is_file():
      raise ValueError(
        f'{path} has no vocabulary: expected {SENTENCEPIECE} or {TOKENIZER}'
      )
    return huggingface.read_vocabulary(path)
  model = path / SENTENCEPIECE if path.is_dir() else path
  settings_path = model.parent / _SETTINGS
  if extra_ids is None and settings_path.is_file():
    extra_ids = read_json(settings_path).get('extra_ids')
  if extra_ids is None:
    extra_ids = _T5_EXTRA_IDS
  if type(extra_ids) is not int or extra_ids < 0:
    raise ValueError(f'{settings_path}: extra_ids is {extra_ids!r}')
  return sentencepiece_vocabulary.load(model, extra_ids=extra_ids)


def write(folder: str | os.PathLike[str], vocabulary: AnyVocabulary) -> None:
  """Writes a vocabulary into a folder, from which `read` reads it."""
  folder = Path(folder)
  settings: dict[str, Any]
  if isinstance(vocabulary, SentencePieceVocabulary):
    (folder / SENTENCEPIECE).write_bytes(vocabulary.model)
    settings = {
      'tokenizer_class': 'T5Tokenizer',
      'extra_ids': vocabulary.extra_ids,
      'eos_token': vocabulary.eos_token,
    }
  else:
    (folder / TOKENIZER).write_text(
      vocabulary.tokenizer.to_str(), encoding='utf-8'
    )
    settings = {
      'bos_token': vocabulary.bos_token,
      'eos_token': vocabulary.eos_token,
      'chat_template': vocabulary.chat_template,
    }
    _write_json(
      folder / _GENERATION,
      {'eos_token_id': list(vocabulary.eos_ids)},
    )
  _write_json(folder / _SETTINGS, settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
  text = json.dumps(value, indent=2, ensure_ascii=False) + '\n'
  path.write_text(text, encoding='utf-8')
