"""Llama-type models from Hugging Face folders, and back."""

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specdec_jax.checkpoints import name_maps, safetensors_folder, settings
from specdec_jax.checkpoints.huggingface_config import read_config
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.files.require import require
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.text import vocabularies
from specdec_jax.text.vocabularies import Vocabulary

# What is downloaded of a repository.
_FILES = ['*.json', '*.safetensors', '*.jinja', 'spiece.model']


def load_llama(
  folder: str | os.PathLike[str], *, dtype: jnp.dtype = jnp.float32
) -> tuple[LlamaConfig, dict[str, Any], Vocabulary]:
  """Reads a model and its vocabulary from a folder.

  Args:
    folder: with config.json, safetensors and tokenizer.json.
    dtype: of the parameters, activations and cache.

  Returns:
    Sizes, parameters for `models.llama.Llama`, and the vocabulary.

  Raises:
    ValueError: if a file is missing or broken, or if the network is not the one
      that `models.llama` computes.
  """
  config = read_config(folder, dtype=dtype)
  vocabulary = read_vocabulary(folder)
  return config, read_params(folder, config), vocabulary


def read_params(
  folder: str | os.PathLike[str], config: LlamaConfig
) -> dict[str, Any]:
  """The parameters in a folder's safetensors, of one file or several.

  Args:
    folder: with model.safetensors, or model.safetensors.index.json and the
      files that it names.
    config: their sizes; parameters get its dtype.

  Returns:
    The tree of `models.llama.Llama`.

  Raises:
    ValueError: if a file or a tensor is missing, or a tensor is unexpected, of
      another shape, not floating point, or not finite.
  """
  handles = safetensors_folder.open_tensors(
    folder, num_layers=config.num_layers
  )
  for name in list(handles):
    if name.endswith('.inv_freq') or (
      config.is_tied and name == 'lm_head.weight'
    ):
      del handles[name]
  return safetensors_folder.read_params(
    folder, handles, name_maps.llama_parameters(config), dtype=config.dtype
  )


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
    # Saved after training, it cuts and pads every text as it did there.
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
  """What ends a text by generation_config.json, else by config.json.

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


def save_llama(
  folder: str | os.PathLike[str],
  config: LlamaConfig,
  params: dict[str, Any],
  *,
  tokenizer_json: str | None = None,
) -> None:
  """Writes a folder that this module and transformers read.

  Args:
    folder: made if it does not exist; files in it are overwritten.
    config: sizes.
    params: the tree of `models.llama.Llama`; tensors keep its dtype.
    tokenizer_json: text of tokenizer.json, or None to write none.

  Raises:
    ValueError: if a parameter is missing or of another shape.
  """
  folder = Path(folder)
  dtype = safetensors_folder.write_params(
    folder, params, name_maps.llama_parameters(config)
  )
  values = _config_json(config, dtype)
  (folder / 'config.json').write_text(
    json.dumps(values, indent=2) + '\n', encoding='utf-8'
  )
  if tokenizer_json is not None:
    (folder / 'tokenizer.json').write_text(tokenizer_json, encoding='utf-8')


def _config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
  """What config.json says of a model; biases make it a Qwen2."""
  kind = 'qwen2' if config.has_attention_bias else 'llama'
  return {
    'architectures': [f'{kind.capitalize()}ForCausalLM'],
    'model_type': kind,
    'torch_dtype': dtype,
    'vocab_size': config.vocab_size,
    'hidden_size': config.embed_dim,
    'intermediate_size': config.mlp_dim,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': config.norm_epsilon,
    'rope_theta': config.rope_base,
    'rope_scaling': None,
    'max_position_embeddings': config.max_positions,
    'tie_word_embeddings': config.is_tied,
  }


def download(repository: str) -> Path:
  """Downloads a model from the Hugging Face hub, or finds it in its cache.

  Args:
    repository: `organisation/name`, or `organisation/name@revision` with a
      branch, tag or commit.

  Returns:
    The folder with its files.

  Raises:
    ValueError: if the name is malformed or the download fails.
    ImportError: if the huggingface_hub package is not installed.
  """
  name, at, revision = repository.partition('@')
  is_name = name.count('/') == 1 and all(name.split('/'))
  if not is_name or bool(at) != bool(revision):
    raise ValueError(
      f'hf:{repository} does not name a repository; write hf:organisation/name '
      'or hf:organisation/name@revision'
    )
  huggingface_hub = require(
    'huggingface_hub', extra='models', purpose='an hf: name'
  )
  try:
    return Path(
      huggingface_hub.snapshot_download(
        name, revision=revision or None, allow_patterns=_FILES
      )
    )
  except Exception as error:  # Whatever the network stack beneath it raises.
    raise ValueError(
      f'hf:{repository} could not be downloaded ({type(error).__name__}: '
      f'{error}). Without a network, give the path of a folder that holds it'
    ) from error
