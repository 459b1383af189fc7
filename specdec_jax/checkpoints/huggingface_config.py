"""Which networks of Hugging Face are the one that `models.llama` computes."""

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specdec_jax.models.llama import LlamaConfig

_MODEL_TYPES = ('llama', 'mistral', 'qwen2')


def read_config(
  folder: str | os.PathLike[str], *, dtype: jnp.dtype = jnp.float32
) -> LlamaConfig:
  """The sizes that a folder's config.json states.

  Llama, Mistral and Qwen2 are one network: Mistral without its sliding window
  is Llama, Qwen2 has biases on queries, keys and values.

  Args:
    folder: with config.json.
    dtype: of the parameters, activations and cache.

  Raises:
    ValueError: if config.json is missing or broken, or describes a network with
      features that `models.llama` does not compute.
  """
  path = Path(folder) / 'config.json'
  if not path.is_file():
    raise ValueError(f'{folder} has no config.json')
  settings = read_json(path)
  kind = settings.get('model_type')
  if kind not in _MODEL_TYPES:
    raise ValueError(
      f'{path} describes a model of type {kind!r}; supported are '
      f'{", ".join(_MODEL_TYPES)}'
    )
  for reason in _unsupported(settings):
    raise ValueError(f'{path} describes a {kind} not supported: {reason}')

  def require(key: str) -> int:
    value = settings.get(key)
    if not isinstance(value, int) or value < 1:
      raise ValueError(f'{path}: {key} is {value!r}, expected a number')
    return value

  num_heads = require('num_attention_heads')
  embed_dim = require('hidden_size')
  num_kv_heads = settings.get('num_key_value_heads')
  return LlamaConfig(
    vocab_size=require('vocab_size'),
    embed_dim=embed_dim,
    num_layers=require('num_hidden_layers'),
    num_heads=num_heads,
    num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
    head_dim=settings.get('head_dim') or embed_dim // num_heads,
    mlp_dim=require('intermediate_size'),
    rope_base=float(_rope(settings).get('rope_theta', 10_000.0)),
    norm_epsilon=float(settings.get('rms_norm_eps', 1e-6)),
    max_positions=require('max_position_embeddings'),
    is_tied=bool(settings.get('tie_word_embeddings', False)),
    has_attention_bias=kind == 'qwen2',
    dtype=dtype,
  )


def _rope(settings: dict[str, Any]) -> dict[str, Any]:
  """Rotary settings; transformers 4 spreads them, 5 gathers them."""
  scattered = {
    key: settings[key]
    for key in ('rope_theta', 'partial_rotary_factor')
    if settings.get(key) is not None
  }
  scaling = settings.get('rope_scaling') or {}
  return scattered | scaling | (settings.get('rope_parameters') or {})


def _unsupported(settings: dict[str, Any]) -> list[str]:
  """Reasons why the network would not be computed as it was trained."""
  reasons = []
  rope = _rope(settings)
  scaling = rope.get('rope_type', rope.get('type', 'default'))
  if scaling != 'default':
    reasons.append(f'its rotary positions are scaled ({scaling})')
  if rope.get('partial_rotary_factor', 1.0) != 1.0:
    reasons.append('its rotary positions turn a part of each head')
  if settings.get('rope_interleaved'):
    reasons.append('its rotary positions pair neighbouring dimensions')
  activation = settings.get('hidden_act', 'silu')
  if activation != 'silu':
    reasons.append(f'its activation is {activation}, expected silu')
  if settings['model_type'] == 'llama' and settings.get('attention_bias'):
    reasons.append('its attention has biases')
  if settings.get('mlp_bias'):
    reasons.append('its feed-forward layers have biases')
  if settings.get('quantization_config'):
    reasons.append('its weights are quantised')
  window = settings.get('sliding_window')
  if settings['model_type'] == 'qwen2' and not settings.get(
    'use_sliding_window', False
  ):
    window = None
  max_positions = settings.get('max_position_embeddings', 0)
  if window is not None and window < max_positions:
    reasons.append(
      f'its attention slides over {window} of {max_positions} positions'
    )
  layer_types = set(settings.get('layer_types') or ()) - {'full_attention'}
  if layer_types:
    reasons.append(f'it has layers of {", ".join(sorted(layer_types))}')
  return reasons


def read_json(path: Path) -> dict[str, Any]:
  """A JSON object from a file; a broken one is a ValueError with its path."""
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is no JSON: {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} holds no JSON object')
  return value
