"""Models in folders as Hugging Face lays them out, and its hub."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.checkpoints import safetensors_folder, settings
from specdec_jax.checkpoints.huggingface import (
  assistant,
  eagle,
  gemma,
  gemma4,
  llama,
  t5,
  t5gemma,
)
from specdec_jax.checkpoints.settings import Json, Settings
from specdec_jax.files.require import require
from specdec_jax.models import families
from specdec_jax.models.families import AnyConfig, Config
from specdec_jax.models.products import Weights
from specdec_jax.text import ends, vocabularies
from specdec_jax.text.vocabularies import Vocabulary

CONFIG = 'config.json'
_GENERATION = 'generation_config.json'
_IDS = ('bos_token_id', 'decoder_start_token_id', 'pad_token_id')
# Files of a repository that are downloaded.
_DOWNLOADED = ['*.json', '*.safetensors', '*.jinja', 'spiece.model']
_Convert = Callable[[Any, Weights], Weights]


class _Network(NamedTuple):
  """A network in these folders, by a module of this folder.

  Attributes:
    module: has `MODEL_TYPES`, values of `model_type` in config.json;
      `WITHOUT_EFFECT`, further keys there that change nothing in the network;
      `read_config` and `config_json`, from config.json to the sizes and back;
      `parameters_of` the sizes, under both names; and `needed`, what to read of
      a folder's tensors, and their parameters.
    from_file: converts parameters whose values differ in files.
    to_file: the reverse.
  """

  module: ModuleType
  from_file: _Convert = lambda config, params: params
  to_file: _Convert = lambda config, params: params


# By their names in model.json.
_NETWORKS = {
  'llama': _Network(llama),
  't5': _Network(t5),
  'gemma': _Network(gemma),
  'gemma4': _Network(gemma4),
  't5gemma': _Network(t5gemma),
  'assistant': _Network(assistant),
  'eagle': _Network(eagle, eagle.from_file, eagle.to_file),
}
# Settings of generation_config.json, or without one of config.json, that change
# even greedy text, with the values that do not; `stated` returns them.
HONOURED: Json = {
  'bad_words_ids': None,
  'begin_suppress_tokens': None,
  'encoder_no_repeat_ngram_size': 0,
  'encoder_repetition_penalty': 1.0,
  'forced_bos_token_id': None,
  'forced_decoder_ids': None,
  'forced_eos_token_id': None,
  'min_length': 0,
  'min_new_tokens': 0,
  'no_repeat_ngram_size': 0,
  'repetition_penalty': 1.0,
  'sequence_bias': None,
  'suppress_tokens': None,
}
# Likewise settings that transformers honours, and that here cause a warning.
NOT_HONOURED: Json = {
  'exponential_decay_length_penalty': None,
  'guidance_scale': 1.0,
  'penalty_alpha': 0.0,
  'watermarking_config': None,
}
# What `read_stops` reads.
STOPS: Json = {'stop_strings': None}
# Keys of config.json that change nothing that a network computes: how files
# were made, how to train, what to generate by default, and how to run.
WITHOUT_EFFECT = frozenset(HONOURED | NOT_HONOURED | STOPS) | frozenset((
  'architectures', 'dtype', 'torch_dtype', 'transformers_version',
  'transformers.js_config', 'name_or_path', '_name_or_path', '_commit_hash',
  'is_llama_config', 'attention_dropout', 'classifier_dropout',
  'initializer_factor', 'initializer_range', 'gradient_checkpointing',
  'finetuning_task', 'id2label', 'label2id', 'num_labels', 'problem_type',
  'prefix', 'task_specific_params', 'tokenizer_class', 'bos_token_id',
  'eos_token_id', 'pad_token_id', 'sep_token_id', 'diversity_penalty',
  'do_sample', 'early_stopping', 'length_penalty', 'max_length',
  'num_beam_groups', 'num_beams', 'num_return_sequences',
  'remove_invalid_values', 'temperature', 'top_k', 'top_p', 'typical_p',
  '_attn_implementation', '_attn_implementation_autoset',
  '_flash_attn_2_enabled', 'chunk_size_feed_forward', 'n_positions',
  'output_attentions', 'output_hidden_states', 'output_past', 'output_scores',
  'pretraining_tp', 'return_dict', 'return_dict_in_generate', 'tf_legacy_loss',
  'torchscript', 'use_bfloat16', 'use_cache',
))  # fmt: skip

_ADDED = 'added_tokens_decoder'
# Roles of tokens, in the order in which transformers adds them.
_ROLES = (
  'bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token',
  'mask_token',
)  # fmt: skip


def read_config(folder: Path, *, dtype: jnp.dtype = jnp.float32) -> AnyConfig:
  """Returns the sizes that a folder's config.json states; raises ValueError if
  it is missing or broken, has a key that is not known, such as that of packed
  weights, or describes a network that `models` does not compute."""
  values = settings.read(folder / CONFIG)
  network = _network_stated(values)
  config = network.read_config(values, dtype)
  values.refuse_others(WITHOUT_EFFECT | network.WITHOUT_EFFECT)
  return config


def _network_stated(values: Settings) -> ModuleType:
  """Returns the network that config.json says it is of."""
  if eagle.is_stated(values):
    return eagle
  kind = values.text('model_type')
  modules = [network.module for network in _NETWORKS.values()]
  networks = {name: each for each in modules for name in each.MODEL_TYPES}
  if kind not in networks:
    values.refuse('model_type', f'one of {", ".join(networks)}')
  return networks[kind]


def read_params(folder: Path, config: Config) -> Weights:
  """Returns the tree of our network in a folder's files, in the config's dtype;
  see `safetensors_folder` for the errors."""
  network = _network_of(config)
  tensors = safetensors_folder.open_tensors(folder, config)
  needed, parameters = network.module.needed(folder, config, tensors)
  params = safetensors_folder.read_params(
    folder, needed, parameters, dtype=config.dtype
  )
  return network.from_file(config, params)


def save(folder: Path, config: AnyConfig, params: Weights) -> None:
  """Writes a folder that this module and transformers read, over what is in it;
  tensors keep the dtype of `params`. Raises ValueError if a parameter is
  missing or of another shape, or transformers has no such network."""
  network = _network_of(config)
  dtype = safetensors_folder.write_params(
    folder,
    network.to_file(config, params),
    network.module.parameters_of(config),
  )
  stated = network.module.config_json(config, dtype)
  files = {CONFIG: stated}
  # Where this file is, transformers heeds no ids of config.json.
  if generation := settings.read_if_any(folder / _GENERATION).values:
    ids = {key: stated[key] for key in _IDS if key in stated}
    files = {_GENERATION: {**ids, **generation}} | files
  for name, values in files.items():
    text = json.dumps(values, indent=2) + '\n'
    (folder / name).write_text(text, encoding='utf-8')


def _network_of(config: AnyConfig) -> _Network:
  network = _NETWORKS.get(families.of(config).name)
  if network is None:
    raise ValueError(f'Hugging Face has no {families.of(config).name}')
  return network


def read_vocabulary(folder: Path) -> Vocabulary:
  """Returns the vocabulary in a folder's tokenizer.json.

  Its token ids are those of transformers' `TokenizersBackend`, with the tokens
  that `added_tokens` adds; they can differ for models whose tokenizer
  transformers builds by its class instead. Texts end with the tokenizer's own
  end token, the ids of `read_eos_ids`, and those of `ends.with_ends`. Raises
  ValueError if tokenizer.json is missing or broken, and ImportError without the
  tokenizers package.
  """
  path = folder / 'tokenizer.json'
  if not path.is_file():
    raise ValueError(f'{folder} has no {path.name}: name another vocabulary')
  tokenizers = vocabularies.import_tokenizers()
  with vocabularies.package_errors(f'{path} cannot be read'):
    tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    # A tokenizer that was saved during training would cut and pad texts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
  values = tokenizer_settings(folder)
  added = added_tokens(folder, values)
  with vocabularies.package_errors(f'the added tokens of {folder}'):
    there = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    new = [token for text, token in added.items() if text not in there]
    # Added in one call, as each call takes time.
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


def read_eos_ids(folder: Path) -> tuple[int, ...]:
  """Reads the EOS ids of generation_config.json, or else of config.json."""
  # An empty list in the first file counts as none.
  for name in (_GENERATION, CONFIG):
    values = settings.read_if_any(folder / name)
    if ids := values.ids('eos_token_id'):
      return tuple(ids)
    # Where an encoder-decoder, or a model that also sees, states them.
    for section in ('decoder', 'text_config'):
      if ids := values.at(section).ids('eos_token_id'):
        return tuple(ids)
  return ()


def read_stops(folder: Path) -> list[str]:
  """Reads the strings that end texts from the file that `stated` reads."""
  path, found = stated(folder, STOPS)
  values, [key] = Settings(path=path, values=found), STOPS
  if isinstance(found.get(key), str):
    return [values.text(key)]
  return [*filter(None, values.texts(key, []))]


def stated(folder: Path, known: Json = HONOURED) -> tuple[str, dict[str, Any]]:
  """Reads a folder's generation settings: the file they are in, and those among
  the names of `known` whose value is not the neutral one that `known` gives."""
  values = settings.read_if_any(folder / _GENERATION)
  places = [values]
  if not values.values:
    values = settings.read_if_any(folder / CONFIG)
    places = [values, values.at('decoder'), values.at('text_config')]
  # If several places state a key, the first counts.
  settings_stated = {
    key: place.values[key]
    for place in reversed(places)
    for key, neutral in known.items()
    if place.values.get(key) not in (None, neutral, [], {})
  }
  # In transformers this one replaces `min_length`, also where it is 0.
  if any(place.values.get('min_new_tokens') is not None for place in places):
    settings_stated.pop('min_length', None)
  return values.path, settings_stated


def tokenizer_settings(folder: Path) -> Settings:
  """Reads tokenizer_config.json. Where it has no added tokens, as in folders of
  earlier transformers, special_tokens_map.json overrides it."""
  values = settings.read_if_any(folder / 'tokenizer_config.json')
  special = settings.read_if_any(folder / 'special_tokens_map.json')
  if values.has(_ADDED) or not special.values:
    return values
  both = {**values.values, **special.values}
  return Settings(path=f'{values.path} or {special.path}', values=both)


def added_ids(folder: Path, values: Settings) -> dict[str, int]:
  """Returns the ids that `tokenizer_settings` or added_tokens.json state, by
  the texts of the tokens."""
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
  """Returns arguments of `tokenizers.AddedToken` for the tokens that
  `tokenizer_settings` and added_tokens.json state, by their texts. The order is
  that in which transformers adds them, as it decides their ids."""
  by_id = _added_by_id(folder, values)
  found = {token['content']: token for _, token in sorted(by_id.items())}
  for place in _places_of_roles(values).values():
    token = _token(*place)
    found.setdefault(token['content'], token)['special'] = True
  # Transformers 5 has the first name, under which there can be roles, too.
  for key in ('extra_special_tokens', 'additional_special_tokens'):
    listed = values.values.get(key)
    if not (isinstance(listed, list) and listed):
      continue
    by_index = {str(i): token for i, token in enumerate(listed)}
    listing = Settings(path=values.path, values=by_index, section=f'{key}.')
    for token in (_token(listing, i) for i in by_index):
      found.setdefault(token['content'], token).setdefault('special', True)
    break
  return found


def _places_of_roles(values: Settings) -> dict[str, tuple[Settings, str]]:
  """Returns where each token is stated, by its name in chat templates."""
  # Names such as `image_token` may be anywhere at the top, or grouped below.
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
  # As transformers writes them, in files before the tokenizer's settings.
  names = {
    'default': 'chat_template.jinja',
    'tool_use': 'additional_chat_templates/tool_use.jinja',
  }
  found = {}
  for name, file in names.items():
    path = folder / file
    if path.is_file():
      try:
        found[name] = path.read_text(encoding='utf-8')
      except ValueError as error:
        raise ValueError(f'{path} is not UTF-8 text') from error
  if found:
    return found
  key = 'chat_template'
  templates = values.values.get(key)
  if not isinstance(templates, list):
    return {'default': values.text(key)} if values.has(key) else {}
  for item in templates:
    if not isinstance(item, dict):
      values.refuse(key, 'a string or a list of objects')
    named = Settings(path=values.path, values=item, section=f'{key}.')
    name = named.text('name')
    found[name] = named.text('template')
  return found


def download(repository: str) -> Path:
  """Returns the folder of a model of the Hugging Face hub, downloaded unless
  cached: `organisation/name`, or `organisation/name@revision` with a branch,
  tag or commit. Raises ValueError if the name is malformed or the download
  fails, and ImportError without the huggingface_hub package."""
  # `organisation/name@main`; a name without `@` is of the newest commit.
  found = re.fullmatch(r'([^/@]+/[^/@]+)(?:@(.+))?', repository)
  if not found:
    raise ValueError(
      f'hf:{repository}: write hf:organisation/name or '
      'hf:organisation/name@revision'
    )
  hub = require('huggingface_hub', extra='models', purpose='an hf: name')
  try:
    folder = hub.snapshot_download(
      found[1],
      revision=found[2],
      allow_patterns=_DOWNLOADED,
      # Mistral's own copy of the same weights.
      ignore_patterns=['consolidated*'],
    )
  except Exception as error:  # The network stack raises many kinds.
    raise ValueError(
      f'hf:{repository} could not be downloaded ({type(error).__name__}: '
      f'{error}). Without a network, give the path of a folder that holds it'
    ) from error
  return Path(folder)
