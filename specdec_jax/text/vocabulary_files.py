"""Vocabularies in the files that stand beside a model's parameters."""

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
# Of tokenizers that transformers makes in other ways.
_OTHERS = ('tokenizer.model', 'vocab.json', 'merges.txt', 'vocab.txt')
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
  """Reads a SentencePiece model, or what a folder has in tokenizer.json or else
  in spiece.model.

  Args:
    path: of the model or the folder.
    extra_ids: how many sentinels follow the pieces of a SentencePiece model;
      None for the number that the tokenizer's settings beside it state.
    num_rows: of the embeddings, which decide where nothing is stated; see
      `sentencepiece_vocabulary.load`.
    may_have_sentinels: whether there can be any where nothing is stated.

  Raises:
    ValueError: if there is no vocabulary, or it is broken, or the number of its
      sentinels is not known.
    ImportError: without the package that reads it.
  """
  path = user_path(path)
  is_folder = path.is_dir()
  folder = path if is_folder else path.parent
  # As in transformers: tokens may have been added that only this file has.
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
  """Makes the error for a model at `path` that has no vocabulary here."""
  folder = path if path.is_dir() else path.parent
  other_files = [name for name in _OTHERS if (folder / name).is_file()]
  naming = 'name one (--vocabulary, or VOCABULARY in gin files)'
  if not other_files:
    return ValueError(
      f'{path} has no vocabulary: put {TOKENIZER} or {SENTENCEPIECE} beside '
      f'it, or {naming}'
    )
  return ValueError(
    f'{path} has no vocabulary that is read here: it has '
    f'{" and ".join(other_files)}. Write {TOKENIZER} with save_pretrained of '
    f'the tokenizer in transformers, or {naming}'
  )


def _stated_sentinels(folder: Path) -> int | None:
  """Returns how many sentinels the tokenizer's settings in a folder state, as a
  number or one by one; None if they say nothing."""
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
  """Raises ValueError for added tokens that SentencePiece would split, or that
  have other ids than the settings of the tokenizer say."""
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
        f'{folder} has an added token {text!r} that {SENTENCEPIECE} has not: '
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
      # MADLAD-400's, say; else what config.json says of T5 is right.
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
