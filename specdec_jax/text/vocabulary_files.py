"""Vocabularies in the files of a model's folder."""

import json
import os
import re
from pathlib import Path

from specdec_jax.files.paths import user_path
from specdec_jax.text import (
  ends,
  generation_config,
  huggingface_tokenizer,
  sentencepiece_vocabulary,
)
from specdec_jax.text.sentencepiece_vocabulary import (
  SPACE,
  SentencePieceVocabulary,
)
from specdec_jax.text.vocabularies import (
  SENTINEL,
  AnyVocabulary,
  Vocabulary,
)

SENTENCEPIECE = 'spiece.model'
TOKENIZER = 'tokenizer.json'
_SETTINGS = 'tokenizer_config.json'
_SENTINEL = re.compile(re.escape(SENTINEL) + r'(\d{1,5})>')
_GENERATION = 'generation_config.json'
# Files of tokenizers that are not supported here.
_UNSUPPORTED = ('tokenizer.model', 'vocab.json', 'merges.txt', 'vocab.txt')
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
  may_have_sentinels: bool = True,
) -> AnyVocabulary:
  """Reads a SentencePiece model, or the tokenizer.json or else the spiece.model
  of a folder.

  Args:
    path: of the model or the folder.
    extra_ids: the number of sentinels after the pieces of a SentencePiece
      model; by default the one in the settings of the folder's tokenizer.
    num_rows: the number of embeddings, from which the number of sentinels
      follows if the settings lack it; see `sentencepiece_vocabulary.load`.
    may_have_sentinels: whether there can be sentinels if the settings do not
      say so.

  Raises:
    ValueError: if there is no vocabulary, it is broken, or the number of its
      sentinels is unknown.
    ImportError: without the package that reads it.
  """
  path = user_path(path)
  is_folder = path.is_dir()
  folder = path if is_folder else path.parent
  # As in transformers, tokenizer.json comes first: it may have added tokens.
  if is_folder and (folder / TOKENIZER).is_file():
    return huggingface_tokenizer.read_vocabulary(folder)
  model = path / SENTENCEPIECE if is_folder else path
  if is_folder and not model.is_file():
    raise missing(path)
  if extra_ids is None:
    extra_ids = _stated_sentinels(folder)
  if extra_ids is None and not may_have_sentinels:
    extra_ids = 0
  vocabulary = sentencepiece_vocabulary.load(
    model, extra_ids=extra_ids, num_rows=num_rows
  )
  if not is_folder:
    return vocabulary
  _check_added(folder, vocabulary)
  return ends.with_ends(
    vocabulary, generation_config.read_eos_ids(folder), folder
  )


def missing(path: Path) -> ValueError:
  """Returns the error for a model at `path` without a supported vocabulary."""
  folder = path if path.is_dir() else path.parent
  other_files = [name for name in _UNSUPPORTED if (folder / name).is_file()]
  advice = 'pass one (--vocabulary, or VOCABULARY in gin files)'
  if not other_files:
    return ValueError(
      f'{path} has no vocabulary: put {TOKENIZER} or {SENTENCEPIECE} beside '
      f'it, or {advice}'
    )
  return ValueError(
    f'{path} has no supported vocabulary: it has '
    f'{" and ".join(other_files)}. Write {TOKENIZER} with save_pretrained of '
    f'the tokenizer in transformers, or {advice}'
  )


def _stated_sentinels(folder: Path) -> int | None:
  """Returns the number of sentinels in the settings of a folder's tokenizer,
  which state or list them; None if they do neither."""
  values = huggingface_tokenizer.tokenizer_settings(folder)
  numbers = sorted(
    int(match[1])
    for text in huggingface_tokenizer.added_tokens(folder, values)
    if (match := _SENTINEL.fullmatch(text))
  )
  if values.has('extra_ids'):
    most = sentencepiece_vocabulary.MAX_SENTINELS
    num_sentinels = values.count('extra_ids', least=0, most=most)
    if numbers and numbers[-1] >= num_sentinels:
      values.refuse('extra_ids', f'more: there is {SENTINEL}{numbers[-1]}>')
    return num_sentinels
  if not numbers:
    return None
  if numbers != [*range(len(numbers))]:
    raise ValueError(
      f'{values.path or folder}: of the sentinels {SENTINEL}0> to '
      f'{SENTINEL}{numbers[-1]}> it states {len(numbers)}: put '
      '{"extra_ids": N} into tokenizer_config.json'
    )
  return len(numbers)


def _check_added(folder: Path, vocabulary: SentencePieceVocabulary) -> None:
  """Raises ValueError for added tokens that SentencePiece would split, or whose
  ids differ from those in the settings of the tokenizer."""
  values = huggingface_tokenizer.tokenizer_settings(folder)
  stated_ids = huggingface_tokenizer.added_ids(folder, values)
  for text in huggingface_tokenizer.added_tokens(folder, values):
    token_id = vocabulary.token_to_id(text)
    if token_id is None:
      token_id = vocabulary.token_to_id(f'{SPACE}{text}')
    if token_id is None and text == '<unk>':
      continue
    if token_id is None:
      raise ValueError(
        f'{folder} has an added token {text!r} that {SENTENCEPIECE} lacks: '
        f'write {TOKENIZER} by save_pretrained of the tokenizer in transformers'
      )
    if stated_ids.get(text, token_id) != token_id:
      raise ValueError(
        f'{folder}: {text!r} has the id {stated_ids[text]} by the settings of '
        f'the tokenizer, and {token_id} by {SENTENCEPIECE}'
      )


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
      # Such as MADLAD-400's; otherwise T5's default in config.json is right.
      eos_ids = list(vocabulary.eos_ids)
      _write_json(folder / _GENERATION, {'eos_token_id': eos_ids})
  elif isinstance(vocabulary, Vocabulary):
    text = vocabulary.tokenizer.to_str()
    (folder / TOKENIZER).write_text(text, encoding='utf-8')
    template: object = vocabulary.chat_template
    if vocabulary.tool_template is not None:
      named = {'default': template, 'tool_use': vocabulary.tool_template}
      template = [{'name': k, 'template': v} for k, v in named.items() if v]
    config = {**vocabulary.roles, 'chat_template': template}
    eos_ids = list(vocabulary.eos_ids)
    _write_json(folder / _GENERATION, {'eos_token_id': eos_ids})
  else:
    raise TypeError(f'a {type(vocabulary).__name__} has no file format')
  _write_json(folder / _SETTINGS, config)


def _write_json(path: Path, value: dict[str, object]) -> None:
  text = json.dumps(value, indent=2, ensure_ascii=False) + '\n'
  path.write_text(text, encoding='utf-8')
