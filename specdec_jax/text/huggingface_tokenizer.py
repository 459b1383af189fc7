"""The vocabulary in a Hugging Face folder: tokenizer.json, and the files that
add tokens and chat templates to it."""

from pathlib import Path

from specdec_jax.files import settings
from specdec_jax.files.settings import Json, Settings
from specdec_jax.text import ends, vocabularies
from specdec_jax.text.generation_config import read_eos_ids
from specdec_jax.text.vocabularies import Vocabulary

_ADDED = 'added_tokens_decoder'
# Roles of tokens, in the order in which transformers adds them.
_ROLES = (
  'bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token',
  'mask_token',
)  # fmt: skip


def read_vocabulary(folder: Path) -> Vocabulary:
  """Returns the vocabulary in a folder's tokenizer.json.

  Its token ids are those of transformers' `TokenizersBackend`, with the tokens
  of `added_tokens`; they can differ for models whose tokenizer has a class of
  its own in transformers. EOS are the tokenizer's EOS, the ids of
  `read_eos_ids`, and those of `ends.with_ends`. Raises ValueError if
  tokenizer.json is missing or broken, and ImportError without the tokenizers
  package.
  """
  path = folder / 'tokenizer.json'
  if not path.is_file():
    raise ValueError(f'{folder} has no {path.name}: pass another vocabulary')
  tokenizers = vocabularies.import_tokenizers()
  with vocabularies.package_errors(f'{path} cannot be read'):
    tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    # A tokenizer that was saved during training would cut and pad texts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
  values = tokenizer_settings(folder)
  added = added_tokens(folder, values)
  with vocabularies.package_errors(f'the added tokens of {folder}'):
    present = {
      token.content for token in tokenizer.get_added_tokens_decoder().values()
    }
    new = [token for text, token in added.items() if text not in present]
    # One call, since every call takes time.
    tokenizer.add_tokens([tokenizers.AddedToken(**token) for token in new])
  places = _places_of_roles(values)
  roles = {role: _token(*place)['content'] for role, place in places.items()}
  templates = _read_chat_templates(folder, values)
  eos_id = tokenizer.token_to_id(roles.get('eos_token', ''))
  vocabulary = Vocabulary(
    tokenizer=tokenizer,
    eos_ids=() if eos_id is None else (eos_id,),
    roles=roles,
    chat_template=templates.get('default'),
    tool_template=templates.get('tool_use'),
  )
  return ends.with_ends(vocabulary, read_eos_ids(folder), folder)


def tokenizer_settings(folder: Path) -> Settings:
  """Reads tokenizer_config.json. If it has no added tokens, as in folders of
  earlier transformers, special_tokens_map.json overrides it."""
  values = settings.read_if_any(folder / 'tokenizer_config.json')
  special = settings.read_if_any(folder / 'special_tokens_map.json')
  if values.has(_ADDED) or not special.values:
    return values
  both = {**values.values, **special.values}
  return Settings(path=f'{values.path} or {special.path}', values=both)


def added_ids(folder: Path, values: Settings) -> dict[str, int]:
  """Returns the ids of added tokens in `tokenizer_settings` or
  added_tokens.json, by their texts."""
  by_id = _added_by_id(folder, values)
  return {token['content']: token_id for token_id, token in by_id.items()}


def _added_by_id(folder: Path, values: Settings) -> dict[int, Json]:
  if not values.has(_ADDED):
    old = settings.read_if_any(folder / 'added_tokens.json')
    return {old.count(key, least=0): {'content': key} for key in old.values}
  stated = values.at(_ADDED)
  by_id = {}
  for key in stated.values:
    if not (key.isdecimal() and len(key) < 10):
      stated.refuse(key, 'token ids as keys')
    by_id[int(key)] = _token(stated, key)
  return by_id


def added_tokens(folder: Path, values: Settings) -> dict[str, Json]:
  """Returns the arguments of `tokenizers.AddedToken` for the added tokens in
  `tokenizer_settings` and added_tokens.json, by their texts, in the order in
  which transformers adds them, which decides their ids."""
  by_id = _added_by_id(folder, values)
  by_text = {token['content']: token for _, token in sorted(by_id.items())}
  for place in _places_of_roles(values).values():
    token = _token(*place)
    by_text.setdefault(token['content'], token)['special'] = True
  # transformers 5 uses the first key, which may also hold roles.
  for key in ('extra_special_tokens', 'additional_special_tokens'):
    listed = values.values.get(key)
    if not (isinstance(listed, list) and listed):
      continue
    by_index = {str(i): token for i, token in enumerate(listed)}
    listing = Settings(path=values.path, values=by_index, section=f'{key}.')
    for token in (_token(listing, i) for i in by_index):
      by_text.setdefault(token['content'], token).setdefault('special', True)
    break
  return by_text


def _places_of_roles(values: Settings) -> dict[str, tuple[Settings, str]]:
  """Returns the section and the key of every token with a role, by its name in
  chat templates."""
  # Names such as `image_token` may be top-level keys, or grouped in a section.
  places = {role: (values, role) for role in _ROLES if values.has(role)}
  for key, value in values.values.items():
    if key.endswith('_token') and isinstance(value, str):
      places.setdefault(key, (values, key))
  key = 'extra_special_tokens'
  if isinstance(values.values.get(key), dict):
    named = values.at(key)
    places |= {role: (named, role) for role in named.values}
  return places


def _token(values: Settings, key: str) -> Json:
  """Reads a token that is written as its text, or as an object with it."""
  if not isinstance(values.values.get(key), dict):
    return {'content': values.text(key)}
  values = values.at(key)
  flags = ('single_word', 'lstrip', 'rstrip', 'normalized', 'special')
  return {'content': values.text('content')} | {
    flag: values.flag(flag) for flag in flags if values.has(flag)
  }


def _read_chat_templates(folder: Path, values: Settings) -> dict[str, str]:
  """Reads chat templates by name: `default`, and others such as `tool_use`."""
  # As in transformers, files take precedence over the tokenizer's settings.
  names = {
    'default': 'chat_template.jinja',
    'tool_use': 'additional_chat_templates/tool_use.jinja',
  }
  by_name = {}
  for name, file in names.items():
    path = folder / file
    if path.is_file():
      try:
        by_name[name] = path.read_text(encoding='utf-8')
      except ValueError as error:
        raise ValueError(f'{path} is not UTF-8 text') from error
  if by_name:
    return by_name
  key = 'chat_template'
  templates = values.values.get(key)
  if not isinstance(templates, list):
    return {'default': values.text(key)} if values.has(key) else {}
  for item in templates:
    if not isinstance(item, dict):
      values.refuse(key, 'a string or a list of objects')
    named = Settings(path=values.path, values=item, section=f'{key}.')
    name = named.text('name')
    by_name[name] = named.text('template')
  return by_name
