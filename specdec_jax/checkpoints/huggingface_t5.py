"""T5 1.0, T5 1.1, FLAN-T5 and mT5 from Hugging Face folders, and back."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import safetensors_folder, vocabulary_files
from specdec_jax.checkpoints.huggingface_config import read_json
from specdec_jax.checkpoints.name_maps_t5 import SUPERFLUOUS, t5_parameters
from specdec_jax.data.vocabularies import AnyVocabulary
from specdec_jax.models.t5 import T5Config

MODEL_TYPES = ('t5', 'mt5')
_EPSILON = 1e-6
_EMBEDDINGS, _LOGITS = 'shared.weight', 'lm_head.weight'

# What both call gelu is its tanh approximation.
_ACTIVATIONS = {
  'relu': ('relu',),
  'gated-gelu': ('gelu', 'linear'),
  'gated-silu': ('silu', 'linear'),
  'gated-relu': ('relu', 'linear'),
}


def load_t5(
  folder: str | os.PathLike[str], *, dtype: jnp.dtype = jnp.float32
) -> tuple[T5Config, dict[str, Any], AnyVocabulary]:
  """Reads a model and its vocabulary from a folder.

  Args:
    folder: with config.json, safetensors, and spiece.model or tokenizer.json.
    dtype: of the parameters, activations and cache.

  Returns:
    Sizes, parameters for `models.t5.T5`, and the vocabulary.

  Raises:
    ValueError: if a file is missing or broken, or if the network is not one
      that `models.t5` computes.
  """
  config = read_config(folder, dtype=dtype)
  vocabulary = vocabulary_files.read(folder)
  return config, read_params(folder, config), vocabulary


def read_config(
  folder: str | os.PathLike[str], *, dtype: jnp.dtype = jnp.float32
) -> T5Config:
  """The sizes that a folder's config.json states.

  Args:
    folder: with config.json.
    dtype: of the parameters, activations and cache.

  Raises:
    ValueError: if config.json is missing or broken, or describes a network
      that `models.t5` does not compute.
  """
  path = Path(folder) / 'config.json'
  if not path.is_file():
    raise ValueError(f'{folder} has no config.json')
  settings = read_json(path)
  kind = settings.get('model_type')
  if kind not in MODEL_TYPES:
    raise ValueError(
      f'{path} describes a model of type {kind!r}; supported are '
      f'{", ".join(MODEL_TYPES)}'
    )

  def require(key: str, default: Any = None) -> int:
    value = settings.get(key, default)
    if type(value) is not int or value < 1:
      raise ValueError(f'{path}: {key} is {value!r}, expected a number')
    return value

  activations = settings.get('feed_forward_proj', 'relu')
  if activations not in _ACTIVATIONS:
    raise ValueError(
      f'{path}: feed_forward_proj is {activations!r}, expected one of '
      f'{", ".join(_ACTIVATIONS)}'
    )
  epsilon = settings.get('layer_norm_epsilon', _EPSILON)
  if epsilon != _EPSILON:
    raise ValueError(
      f'{path}: layer_norm_epsilon is {epsilon}, expected {_EPSILON}'
    )
  num_layers = require('num_layers')
  return T5Config(
    vocab_size=require('vocab_size'),
    embed_dim=require('d_model'),
    num_encoder_layers=num_layers,
    num_decoder_layers=(
      num_layers
      if settings.get('num_decoder_layers') is None
      else require('num_decoder_layers')
    ),
    num_heads=require('num_heads'),
    head_dim=require('d_kv'),
    mlp_dim=require('d_ff'),
    mlp_activations=_ACTIVATIONS[activations],
    is_tied=_is_scaled(settings),
    relpos_num_buckets=require('relative_attention_num_buckets', 32),
    relpos_max_distance=require('relative_attention_max_distance', 128),
    dropout_rate=float(settings.get('dropout_rate', 0.0)),
    dtype=dtype,
  )


def _is_scaled(settings: dict[str, Any]) -> bool:
  """Whether logits are scaled, which in T5 goes with tied embeddings.

  transformers before 5 said so with tie_word_embeddings, which official files
  of T5 1.1 and FLAN-T5 have as false. From 5 on that is always true, and
  scale_decoder_outputs says it. No mT5 scales.
  """
  if settings['model_type'] == 'mt5':
    return False
  is_tied = settings.get('tie_word_embeddings', True)
  return bool(settings.get('scale_decoder_outputs', is_tied))


def read_params(
  folder: str | os.PathLike[str], config: T5Config
) -> dict[str, Any]:
  """The parameters in a folder's safetensors, of one file or several.

  Args:
    folder: with model.safetensors, or its index and the files that it names.
    config: their sizes; parameters get its dtype.

  Returns:
    The tree of `models.t5.T5`.

  Raises:
    ValueError: if a file or a tensor is missing, or a tensor is unexpected, of
      another shape, not floating point, or not finite.
  """
  handles = safetensors_folder.open_tensors(
    folder, num_layers=config.num_encoder_layers + config.num_decoder_layers
  )
  needed = {k: v for k, v in handles.items() if k not in SUPERFLUOUS}
  parameters = t5_parameters(config)
  if config.is_tied and _LOGITS in needed:
    _check_tied(folder, needed)
    del needed[_LOGITS]
  if _LOGITS not in needed:
    # Tied but not scaled: the logits have a kernel with the same values.
    parameters = tuple(
      dataclasses.replace(p, huggingface=_EMBEDDINGS)
      if p.huggingface == _LOGITS
      else p
      for p in parameters
    )
  return safetensors_folder.read_params(
    folder, needed, parameters, dtype=config.dtype
  )


def _check_tied(
  folder: str | os.PathLike[str], handles: dict[str, Any]
) -> None:
  """Raises ValueError if the logits have weights of their own."""
  if _EMBEDDINGS not in handles:
    return  # Which is said elsewhere.
  first, second = (
    handles[name].get_tensor(name) for name in (_EMBEDDINGS, _LOGITS)
  )
  if not np.array_equal(first, second):
    raise ValueError(
      f'{folder}: logits are scaled, as with tied embeddings, but '
      f'{_EMBEDDINGS} and {_LOGITS} differ'
    )


def save_t5(
  folder: str | os.PathLike[str], config: T5Config, params: dict[str, Any]
) -> None:
  """Writes a folder that this module and transformers read.

  Args:
    folder: made if it does not exist; files in it are overwritten.
    config: sizes.
    params: the tree of `models.t5.T5`; tensors keep its dtype.

  Raises:
    ValueError: if a parameter is missing or of another shape, or the network
      is one that transformers does not compute.
  """
  proj = next(
    (k for k, v in _ACTIVATIONS.items() if v == config.mlp_activations), None
  )
  if proj is None:
    raise ValueError(
      f'Hugging Face has no T5 whose activations are {config.mlp_activations}'
    )
  parameters = t5_parameters(config)
  dtype = safetensors_folder.write_params(folder, params, parameters)
  settings = {
    'architectures': ['T5ForConditionalGeneration'],
    'model_type': 't5',
    'torch_dtype': dtype,
    'vocab_size': config.vocab_size,
    'd_model': config.embed_dim,
    'd_kv': config.head_dim,
    'd_ff': config.mlp_dim,
    'num_layers': config.num_encoder_layers,
    'num_decoder_layers': config.num_decoder_layers,
    'num_heads': config.num_heads,
    'relative_attention_num_buckets': config.relpos_num_buckets,
    'relative_attention_max_distance': config.relpos_max_distance,
    'dropout_rate': config.dropout_rate,
    'layer_norm_epsilon': _EPSILON,
    'feed_forward_proj': proj,
    'is_encoder_decoder': True,
    'scale_decoder_outputs': config.is_tied,
    'tie_word_embeddings': config.is_tied,
    'pad_token_id': 0,
    'eos_token_id': 1,
    'decoder_start_token_id': 0,
  }
  (Path(folder) / 'config.json').write_text(
    json.dumps(settings, indent=2) + '\n', encoding='utf-8'
  )
