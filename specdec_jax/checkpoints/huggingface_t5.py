"""T5 1.0, T5 1.1, FLAN-T5 and mT5 from Hugging Face folders, and back."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import safetensors_folder, settings
from specdec_jax.checkpoints.huggingface_config import read_settings
from specdec_jax.checkpoints.name_maps_t5 import SUPERFLUOUS, t5_parameters
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.models.t5 import T5Config
from specdec_jax.text import vocabulary_files
from specdec_jax.text.vocabularies import AnyVocabulary

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
# What transformers derives from them, unless config.json says otherwise.
_DENSE = {
  'relu': 'relu',
  'gated-gelu': 'gelu_new',
  'gated-silu': 'silu',
  'gated-relu': 'relu',
}
# Ids that decoding takes for granted.
_START_AND_PADDING = ('decoder_start_token_id', 'pad_token_id')


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
  vocabulary = vocabulary_files.read(folder, num_rows=config.vocab_size)
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
  values = read_settings(folder, MODEL_TYPES)
  _check_supported(values)
  _check_ids(settings.read_if_any(Path(folder) / 'generation_config.json'))
  num_layers = values.count('num_layers', most=settings.MAX_LAYERS)
  return values.build(
    T5Config,
    vocab_size=values.count('vocab_size'),
    embed_dim=values.count('d_model'),
    num_encoder_layers=num_layers,
    num_decoder_layers=values.count(
      'num_decoder_layers', num_layers, most=settings.MAX_LAYERS
    ),
    num_heads=values.count('num_heads'),
    head_dim=values.count('d_kv'),
    mlp_dim=values.count('d_ff'),
    mlp_activations=_ACTIVATIONS[_feed_forward(values)],
    is_tied=_is_scaled(values),
    relpos_num_buckets=values.count('relative_attention_num_buckets', 32),
    relpos_max_distance=values.count(
      'relative_attention_max_distance', 128, most=settings.MAX_DISTANCE
    ),
    dropout_rate=values.number('dropout_rate', 0.0),
    dtype=dtype,
  )


def _feed_forward(values: Settings) -> str:
  is_mt5 = values.text('model_type') == 'mt5'
  return values.text('feed_forward_proj', 'gated-gelu' if is_mt5 else 'relu')


def _check_supported(values: Settings) -> None:
  """Raises ValueError for what would load and then compute something else."""
  _check_ids(values)
  projection = _feed_forward(values)
  if projection not in _ACTIVATIONS:
    values.refuse('feed_forward_proj', f'one of {", ".join(_ACTIVATIONS)}')
  if values.number('layer_norm_epsilon', _EPSILON) != _EPSILON:
    values.refuse('layer_norm_epsilon', str(_EPSILON))
  for key, expected in (
    ('is_encoder_decoder', True),
    ('is_gated_act', projection.startswith('gated')),
  ):
    if values.flag(key, expected) != expected:
      values.refuse(key, str(expected).lower())
  dense = _DENSE[projection]
  if values.text('dense_act_fn', dense) != dense:
    values.refuse('dense_act_fn', f'{dense}, that of {projection}')


def _check_ids(values: Settings) -> None:
  """Raises ValueError unless decoders start with 0, and 0 is padding."""
  for key in _START_AND_PADDING:
    if values.count(key, 0, least=0):
      values.refuse(key, '0, as T5 has it')


def _is_scaled(values: Settings) -> bool:
  """Whether logits are scaled, which in T5 goes with tied embeddings.

  transformers before 5 said so with tie_word_embeddings, which official files
  of T5 1.1 and FLAN-T5 have as false. From 5 on that is always true, and
  scale_decoder_outputs says it. No mT5 scales.
  """
  if values.text('model_type') == 'mt5':
    return False
  is_tied = values.flag('tie_word_embeddings', True)
  return values.flag('scale_decoder_outputs', is_tied)


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
  values = {
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
    json.dumps(values, indent=2) + '\n', encoding='utf-8'
  )
