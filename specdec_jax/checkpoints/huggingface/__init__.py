"""Models in folders as Hugging Face lays them out, and its hub."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.checkpoints import safetensors_folder
from specdec_jax.checkpoints.huggingface import (
  assistant,
  eagle,
  gemma,
  gemma4,
  llama,
  t5,
  t5gemma,
)
from specdec_jax.files import settings
from specdec_jax.files.settings import Settings
from specdec_jax.models import families
from specdec_jax.models.families import AnyConfig, Config
from specdec_jax.models.products import Weights
from specdec_jax.text import generation_config
from specdec_jax.text.generation_config import CONFIG, GENERATION_CONFIG

_IDS = ('bos_token_id', 'decoder_start_token_id', 'pad_token_id')
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
# Keys of config.json that change nothing that a network computes: how files
# were made, how to train, what to generate by default, and how to run.
WITHOUT_EFFECT = frozenset(generation_config.NAMES) | frozenset((
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
  if generation := settings.read_if_any(folder / GENERATION_CONFIG).values:
    ids = {key: stated[key] for key in _IDS if key in stated}
    files = {GENERATION_CONFIG: {**ids, **generation}} | files
  for name, values in files.items():
    text = json.dumps(values, indent=2) + '\n'
    (folder / name).write_text(text, encoding='utf-8')


def _network_of(config: AnyConfig) -> _Network:
  network = _NETWORKS.get(families.of(config).name)
  if network is None:
    raise ValueError(f'Hugging Face has no {families.of(config).name}')
  return network
