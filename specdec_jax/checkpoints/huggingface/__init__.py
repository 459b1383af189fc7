"""Models in folders of Hugging Face's layout, and on its hub."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.checkpoints import safetensors_folder
from specdec_jax.checkpoints.huggingface import (
  assistant,
  block,
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
  """A network in these folders, and the module of this folder that reads it.

  Attributes:
    module: has `MODEL_TYPES`, the values of `model_type` in config.json;
      `WITHOUT_EFFECT`, further keys there that do not affect the network;
      `read_config` and `config_json`, from config.json to the config and back;
      `parameters_of`, the parameters of a config; and `needed`, the tensors of
      a folder to read, and their parameters.
    from_file: converts parameters whose values differ in files.
    to_file: the reverse.
  """

  module: ModuleType
  from_file: _Convert = lambda config, params: params
  to_file: _Convert = lambda config, params: params


# Networks by their names in model.json.
_NETWORKS = {
  'llama': _Network(llama),
  't5': _Network(t5),
  'gemma': _Network(gemma),
  'gemma4': _Network(gemma4),
  't5gemma': _Network(t5gemma),
  'assistant': _Network(assistant),
  'eagle': _Network(eagle, eagle.from_file, eagle.to_file),
  'block_drafter': _Network(block, block.from_file, block.to_file),
}
# Keys of config.json that do not affect the network's output: settings of
# training, of generation and of the runtime, and facts about the files.
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
  """Returns the config of a folder's config.json; ValueError if the file is
  missing or broken, has an unknown key, such as `quantization_config`, or
  describes a network that `models` lacks."""
  values = settings.read(folder / CONFIG)
  network = _module_for(values)
  config = network.read_config(values, dtype)
  values.refuse_others(WITHOUT_EFFECT | network.WITHOUT_EFFECT)
  return config


def _module_for(values: Settings) -> ModuleType:
  """Returns the module that reads the network of a config.json."""
  if block.is_block_drafter(values):
    return block
  if eagle.is_eagle(values):
    return eagle
  model_type = values.text('model_type')
  modules = {}
  for network in _NETWORKS.values():
    for name in network.module.MODEL_TYPES:
      modules[name] = network.module
  if model_type not in modules:
    values.refuse('model_type', f'one of {", ".join(modules)}')
  return modules[model_type]


def read_params(folder: Path, config: Config) -> Weights:
  """Reads the parameters in a folder as our tree, in the config's dtype; for
  errors see `safetensors_folder.read_params`."""
  network = _network_of(config)
  tensors = safetensors_folder.open_tensors(folder, config)
  needed, parameters = network.module.needed(folder, config, tensors)
  params = safetensors_folder.read_params(
    folder, needed, parameters, dtype=config.dtype
  )
  return network.from_file(config, params)


def save(folder: Path, config: AnyConfig, params: Weights) -> None:
  """Writes a folder for this module and transformers, replacing earlier files;
  tensors keep their dtypes. Raises ValueError if a parameter is missing or of
  another shape, or transformers lacks the network."""
  network = _network_of(config)
  dtype = safetensors_folder.write_params(
    folder,
    network.to_file(config, params),
    network.module.parameters_of(config),
  )
  config_values = network.module.config_json(config, dtype)
  files = {CONFIG: config_values}
  # If this file exists, transformers ignores the ids in config.json.
  if generation := settings.read_if_any(folder / GENERATION_CONFIG).values:
    ids = {key: config_values[key] for key in _IDS if key in config_values}
    files = {GENERATION_CONFIG: {**ids, **generation}} | files
  for name, values in files.items():
    text = json.dumps(values, indent=2) + '\n'
    (folder / name).write_text(text, encoding='utf-8')


def _network_of(config: AnyConfig) -> _Network:
  network = _NETWORKS.get(families.of(config).name)
  if network is None:
    raise ValueError(f'Hugging Face has no {families.of(config).name}')
  return network
