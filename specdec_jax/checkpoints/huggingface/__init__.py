"""Models in folders as Hugging Face lays them out, and its hub."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specdec_jax.checkpoints import safetensors_folder, settings
from specdec_jax.checkpoints.huggingface import eagle, gemma, llama, t5, t5gemma
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.files.require import require
from specdec_jax.models import families
from specdec_jax.models.families import AnyConfig, Config
from specdec_jax.text import vocabularies
from specdec_jax.text.vocabularies import Vocabulary

CONFIG = 'config.json'
# What is downloaded of a repository.
_DOWNLOADED = ['*.json', '*.safetensors', '*.jinja', 'spiece.model']
# Networks by the names that model.json has for them. Each module has
# MODEL_TYPES, values of `model_type` in config.json; `read_config`, from
# config.json and a dtype to the sizes; `config_json`, back; `parameters_of`,
# every parameter under both names; and `needed`, those to read. One may have
# WITHOUT_EFFECT, further keys of config.json that change nothing in it.
_NETWORKS: dict[str, Any] = {
  'llama': llama,
  't5': t5,
  'gemma': gemma,
  't5gemma': t5gemma,
  'eagle': eagle,
}
# Keys of config.json that change nothing that a network computes: how files
# were made, how to train, what to generate by default, and how to run. Readers
# ask for all others that they know.
WITHOUT_EFFECT = frozenset((
  'architectures', 'dtype', 'torch_dtype', 'transformers_version',
  'transformers.js_config', 'name_or_path', '_name_or_path', '_commit_hash',
  'is_llama_config', 'attention_dropout', 'classifier_dropout',
  'initializer_factor', 'initializer_range', 'gradient_checkpointing',
  'finetuning_task', 'id2label', 'label2id', 'num_labels', 'problem_type',
  'prefix', 'task_specific_params', 'tokenizer_class', 'bos_token_id',
  'eos_token_id', 'pad_token_id', 'sep_token_id', 'forced_bos_token_id',
  'forced_eos_token_id', 'bad_words_ids', 'begin_suppress_tokens',
  'diversity_penalty', 'do_sample', 'early_stopping',
  'encoder_no_repeat_ngram_size', 'exponential_decay_length_penalty',
  'length_penalty', 'max_length', 'min_length', 'no_repeat_ngram_size',
  'num_beam_groups', 'num_beams', 'num_return_sequences',
  'remove_invalid_values', 'repetition_penalty', 'suppress_tokens',
  'temperature', 'top_k', 'top_p', 'typical_p', '_attn_implementation',
  '_attn_implementation_autoset', '_flash_attn_2_enabled',
  'chunk_size_feed_forward', 'n_positions', 'output_attentions',
  'output_hidden_states', 'output_past', 'output_scores', 'pretraining_tp',
  'return_dict', 'return_dict_in_generate', 'tf_legacy_loss', 'torchscript',
  'use_bfloat16', 'use_cache',
))  # fmt: skip


def read_config(folder: Path, *, dtype: jnp.dtype = jnp.float32) -> Config:
  """The sizes that a folder's config.json states; raises ValueError if it is
  missing or broken, has a key that is not known or describes a network that
  `models` does not compute, or its weights are quantised."""
  values = settings.read(folder / CONFIG)
  network = _network_stated(values)
  for key in ('quantization_config', 'compression_config'):
    if values.has(key):
      values.refuse(key, 'null: quantised weights are not supported')
  config = network.read_config(values, dtype)
  own: frozenset[str] = getattr(network, 'WITHOUT_EFFECT', frozenset())
  values.refuse_others(WITHOUT_EFFECT | own)
  return config


def _network_stated(values: Settings) -> Any:
  """The network that config.json says it is of."""
  if eagle.is_stated(values):
    return eagle
  kind = values.text('model_type')
  networks = {name: n for n in _NETWORKS.values() for name in n.MODEL_TYPES}
  if kind not in networks:
    raise ValueError(
      f'{values.path} describes a model of type {kind!r}; supported are '
      f'{", ".join(networks)}'
    )
  return networks[kind]


def read_params(folder: Path, config: Config) -> dict[str, Any]:
  """The tree of our network in a folder's files, in the config's dtype; see
  `safetensors_folder` for the errors."""
  network = _network_of(config)
  tensors = safetensors_folder.open_tensors(
    folder, num_layers=sum(families.num_layers(config))
  )
  needed, parameters = network.needed(folder, config, tensors)
  params = safetensors_folder.read_params(
    folder, needed, parameters, dtype=config.dtype
  )
  return network.from_file(config, params) if network is eagle else params


def save(folder: Path, config: AnyConfig, params: dict[str, Any]) -> None:
  """Writes a folder that this module and transformers read, over what is in it;
  tensors keep the dtype of `params`. Raises ValueError if a parameter is
  missing or of another shape, or transformers has no such network."""
  network = _network_of(config)
  parameters = network.parameters_of(config)
  if network is eagle:
    params = network.to_file(config, params)
  dtype = safetensors_folder.write_params(folder, params, parameters)
  text = json.dumps(network.config_json(config, dtype), indent=2) + '\n'
  (folder / CONFIG).write_text(text, encoding='utf-8')


def _network_of(config: AnyConfig) -> Any:
  network = _NETWORKS.get(families.of(config).name)
  if network is None:
    raise ValueError(f'Hugging Face has no {families.of(config).name}')
  return network


def read_vocabulary(folder: Path) -> Vocabulary:
  """The vocabulary of a folder: tokenizer.json and what stands beside it.

  End-of-text ids are those of `read_eos_ids`, else the tokenizer's own end
  token. Raises ValueError if tokenizer.json is missing or broken, and
  ImportError without the tokenizers package.
  """
  path = folder / 'tokenizer.json'
  if not path.is_file():
    raise ValueError(f'{folder} has no tokenizer.json')
  tokenizers = vocabularies.import_tokenizers()
  with vocabularies.package_errors(f'{path} cannot be read'):
    tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
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
  """End-of-text ids that generation_config.json states, else config.json."""
  for name in ('generation_config.json', CONFIG):
    values = settings.read_if_any(folder / name)
    if ids := values.ids('eos_token_id'):
      return tuple(ids)
    # Of an encoder-decoder or of a model that also sees.
    for section in ('decoder', 'text_config'):
      if ids := values.at(section).ids('eos_token_id'):
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


def download(repository: str) -> Path:
  """The folder of a model of the Hugging Face hub, downloaded unless cached:
  `organisation/name`, or `organisation/name@revision` with a branch, tag or
  commit. Raises ValueError if the name is malformed or the download fails, and
  ImportError without the huggingface_hub package."""
  name, at, revision = repository.partition('@')
  is_name = name.count('/') == 1 and all(name.split('/'))
  if not is_name or bool(at) != bool(revision):
    raise ValueError(
      f'hf:{repository} does not name a repository; write hf:organisation/name '
      'or hf:organisation/name@revision'
    )
  hub = require('huggingface_hub', extra='models', purpose='an hf: name')
  try:
    folder = hub.snapshot_download(
      name, revision=revision or None, allow_patterns=_DOWNLOADED
    )
  except Exception as error:  # The network stack raises many kinds.
    raise ValueError(
      f'hf:{repository} could not be downloaded ({type(error).__name__}: '
      f'{error}). Without a network, give the path of a folder that holds it'
    ) from error
  return Path(folder)
