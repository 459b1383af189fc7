"""Vocabularies of Hugging Face folders: tokenizer.json and its settings."""

import os
from pathlib import Path

from specdec_jax.checkpoints import settings
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.text import vocabularies
from specdec_jax.text.vocabularies import Vocabulary


def read_vocabulary(folder: str | os.PathLike[str]) -> Vocabulary:
  """The vocabulary of a folder: tokenizer.json and what stands beside it.

  End-of-text ids come from generation_config.json, else config.json, else from
  the tokenizer's own end token.

  Args:
    folder: with tokenizer.json.

  Raises:
    ValueError: if tokenizer.json is missing or broken.
    ImportError: if the tokenizers package is not installed.
  """
  folder = Path(folder)
  path = folder / 'tokenizer.json'
  if not path.is_file():
    raise ValueError(f'{folder} has no tokenizer.json')
  tokenizers = vocabularies.import_tokenizers()
  with vocabularies.package_errors(f'{path} cannot be read'):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # One saved during training would cut and pad texts as it did there.
    tokenizer.no_truncation()
    tokenizer.no_padding()
  values = settings.read_if_any(folder / 'tokenizer_config.json')
  eos_token = _token_text(values, 'eos_token')
  eos_ids = read_eos_ids(folder)
  if not eos_ids and eos_token is not None:
    eos_id = tokenizer.token_to_id(eos_token)
    eos_ids = () if eos_id is None else (eos_id,)
  return Vocabulary(
    tokenizer=tokenizer,
    eos_ids=eos_ids,
    bos_token=_token_text(values, 'bos_token'),
    eos_token=eos_token,
    chat_template=_read_chat_template(folder, values),
  )


def read_eos_ids(folder: Path) -> tuple[int, ...]:
  """End-of-text ids that generation_config.json states, else config.json.

  Raises:
    ValueError: if one of them is broken.
  """
  for name in ('generation_config.json', 'config.json'):
    values = settings.read_if_any(folder / name)
    if ids := values.ids('eos_token_id'):
      return tuple(ids)
  return ()


def _token_text(values: Settings, key: str) -> str | None:
  """A token that is written as its text, or as an object that has it."""
  if isinstance(values.values.get(key), dict):
    values, key = values.at(key), 'content'
  return values.text(key) if values.has(key) else None


def _read_chat_template(folder: Path, values: Settings) -> str | None:
  path = folder / 'chat_template.jinja'
  if path.is_file():
    try:
      return path.read_text(encoding='utf-8')
    except ValueError as error:
      raise ValueError(f'{path} is not UTF-8 text') from error
  key = 'chat_template'
  templates = values.values.get(key)
  if not isinstance(templates, list):
    return values.text(key) if values.has(key) else None
  for item in templates:
    if not isinstance(item, dict):
      values.refuse(key, 'a string or a list of objects')
    named = Settings(path=values.path, values=item, section=f'{key}.')
    if named.text('name') == 'default':
      return named.text('template')
  return None
