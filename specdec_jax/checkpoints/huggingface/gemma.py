"""Gemma 2 and Gemma 3 (text): the networks of `models.gemma.decoder`.

Keys and defaults are those of transformers 4 and 5.
"""

import dataclasses
import logging
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp

from specdec_jax.checkpoints import parameters, safetensors_folder
from specdec_jax.checkpoints.huggingface import llama
from specdec_jax.checkpoints.huggingface.llama import FULL, SLIDING
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.safetensors_folder import Needed, Tensors
from specdec_jax.files import settings
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models import attention
from specdec_jax.models.drafting.assistant import AssistantConfig
from specdec_jax.models.gemma.gemma4 import Gemma4Config
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.gemma.t5gemma import T5GemmaConfig

_Gemma = TypeVar(
  '_Gemma', GemmaConfig, T5GemmaConfig, Gemma4Config, AssistantConfig
)
_TEXT = 'gemma3_text'
MODEL_TYPES: tuple[str, ...] = ('gemma2', _TEXT, 'gemma3')
# By the names of our branches; those of layer N are below `model.layers.N`.
NAMES = llama.NAMES | {
  'post_self_attention_layer_norm': 'post_attention_layernorm',
  'pre_mlp_layer_norm': 'pre_feedforward_layernorm',
  'post_mlp_layer_norm': 'post_feedforward_layernorm',
}
_EMBEDDINGS, _LOGITS = 'model.embed_tokens.weight', 'lm_head.weight'
# Prefixes of the text model's tensors in a multimodal Gemma 3, in transformers
# 4 and 5, with the names of the logits; and prefixes of tensors that are left
# out.
_TEXT_BRANCHES = {
  'language_model.model.': 'language_model.lm_head.weight',
  'model.language_model.': _LOGITS,
}
_VISION = ('vision_tower.', 'multi_modal_projector.')
# Keys of the vision model, and facts about the file.
WITHOUT_EFFECT = frozenset((
  'vision_config', 'mm_tokens_per_image', 'boi_token_index', 'is_decoder',
  'eoi_token_index', 'image_token_index', 'cache_implementation', 'model_name',
  'unsloth_fixed', 'unsloth_version',
))  # fmt: skip
_GELU = 'gelu_pytorch_tanh'
# Every so many layers, one has no window.
_PERIOD_GEMMA_2, _PERIOD_GEMMA_3 = 2, 6
# Defaults of transformers.
_WINDOW = 4096
_GEMMA_2: Json = {
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 256,
  'vocab_size': 256_000,
  'max_position_embeddings': 8192,
  'attention_softcap': 50.0,
  'logits_softcap': 30.0,
}
_GEMMA_3 = _GEMMA_2 | {
  'vocab_size': 262_208,
  'max_position_embeddings': 131_072,
  'attention_softcap': 0.0,
  'logits_softcap': 0.0,
}


def read_config(values: Settings, dtype: jnp.dtype) -> GemmaConfig:
  """Returns the config of a config.json, of the text model alone if it is
  multimodal; ValueError for features that `models.gemma.decoder` lacks."""
  is_gemma_3 = values.text('model_type') != 'gemma2'
  text = values.at('text_config') if values.has('text_config') else values
  if text is not values:
    text.expect('model_type', _TEXT)
  for place in (values, text):
    place.expect('tie_word_embeddings', True, ', as Gemmas are')
  return values.build(
    GemmaConfig, **stack_fields(text, is_gemma_3=is_gemma_3), dtype=dtype
  )


def stack_fields(values: Settings, *, is_gemma_3: bool) -> Json:
  """Returns the fields of `GemmaConfig` for one stack, from its object in a
  config.json; raises ValueError as `read_config` does."""
  defaults = _GEMMA_3 if is_gemma_3 else _GEMMA_2
  for key in ('attention_bias', 'use_bidirectional_attention'):
    values.expect(key, False)
  for key in ('hidden_activation', 'hidden_act'):
    values.expect(key, _GELU)
  num_layers = values.count('num_hidden_layers', most=settings.MAX_LAYERS)
  cap = 'attn_logit_softcapping'
  attention_softcap = _softcap(values, cap, defaults['attention_softcap'])
  if is_gemma_3 and attention_softcap:
    values.refuse(cap, 'null: Gemma 3 has no attention softcap')
  return {
    **llama.counts(values, defaults, may_lack=()),
    'num_layers': num_layers,
    'query_pre_attn_scalar': values.count('query_pre_attn_scalar', 256),
    'windows': _windows(values, num_layers, is_gemma_3=is_gemma_3),
    'attention_softcap': attention_softcap,
    'logits_softcap': _softcap(
      values, 'final_logit_softcapping', defaults['logits_softcap']
    ),
    'has_qk_norm': is_gemma_3,
    'norm_epsilon': values.positive('rms_norm_eps', 1e-6),
    **(_rope_by_layer(values) if is_gemma_3 else _rope(values)),
  }


def _softcap(values: Settings, key: str, default: float) -> float:
  """Returns a softcap; 0 for null."""
  if key in values.values and not values.has(key):
    return 0.0
  return values.positive(key) if values.has(key) else default


def _windows(
  values: Settings, num_layers: int, *, is_gemma_3: bool
) -> tuple[int, ...]:
  """Returns the windows of the layers, up to where the pattern repeats."""
  window = values.count('sliding_window', _WINDOW)
  values.expect('sliding_window_size', window, ', as sliding_window is')
  period = _period(values, is_gemma_3=is_gemma_3)
  default_types = [
    SLIDING if (i + 1) % period else FULL for i in range(num_layers)
  ]
  types = values.texts('layer_types', default_types)
  if len(types) != num_layers or set(types) - {FULL, SLIDING}:
    values.refuse('layer_types', f'{num_layers} of {FULL} or {SLIDING}')
  return shortest_pattern(
    [window if layer_type == SLIDING else 0 for layer_type in types]
  )


def shortest_pattern(windows: list[int]) -> tuple[int, ...]:
  """Cuts the windows of all layers to one period of their pattern."""
  # [1, 1, 0, 1, 1, 0, 1] repeat after 3.
  repeats = lambda n: all(x == windows[i % n] for i, x in enumerate(windows))
  lengths = range(1, len(windows) + 1)
  return tuple(windows[: next(filter(repeats, lengths))])


def _period(values: Settings, *, is_gemma_3: bool) -> int:
  """Reads the period of layers without a window, for a file without
  `layer_types`; ValueError if transformers would use another period."""
  # transformers reads only the first key, and only for Gemma 3.
  default = _PERIOD_GEMMA_3 if is_gemma_3 else _PERIOD_GEMMA_2
  stated = {
    key: values.count(key, default)
    for key in ('sliding_window_pattern', '_sliding_window_pattern')
  }
  if not (is_gemma_3 or values.has('layer_types')):
    for key, period in stated.items():
      if period != default:
        values.refuse(key, f'{default}, as transformers has it')
  return stated['sliding_window_pattern']


def _rope(values: Settings) -> dict[str, float]:
  """Reads the RoPE fields of Gemma 2, the same for all layers."""
  for place in (values.at('rope_parameters'), values.at('rope_scaling')):
    if _rope_factor(place) != 1.0:
      place.refuse('factor', 'none: Gemma 2 has no RoPE scaling')
  base = llama.rope_base(values)
  return {'rope_base': base, 'local_rope_base': base}


def _rope_by_layer(values: Settings) -> dict[str, float]:
  """Reads the RoPE fields of Gemma 3, by type of layer."""
  place = values.at('rope_parameters')
  full, local = place.at(FULL), place.at(SLIDING)
  bases = {
    'rope_base': llama.base_in(full, values, 'rope_theta', 1e6),
    'local_rope_base': llama.base_in(
      local, values, 'rope_local_base_freq', 1e4
    ),
  }
  if _rope_factor(local) != 1.0:
    local.refuse('factor', 'none: sliding layers have no RoPE scaling')
  # As in transformers, rope_scaling overrides rope_parameters.
  factor = _rope_factor(full)
  scaling = values.at('rope_scaling')
  if scaling.values:
    factor = _rope_factor(scaling)
  return {**bases, 'rope_factor': factor}


def _rope_factor(place: Settings) -> float:
  """Reads the factor of linear RoPE scaling; ValueError for other types."""
  key = 'rope_type' if place.has('rope_type') else 'type'
  rope_type = place.text(key, 'default')
  if rope_type == 'linear':
    return place.positive('factor')
  if rope_type != 'default':
    place.refuse(key, 'default or linear')
  if place.positive('factor', 1.0) != 1.0:
    place.refuse('factor', 'rope_type linear beside it')
  return 1.0


def needed(folder: Path, config: GemmaConfig, tensors: Tensors) -> Needed:
  """Returns the tensors that the network needs, and its parameters."""
  # In a multimodal model the text model is below `language_model`.
  logits, branch = _LOGITS, 'model.'
  for prefix, logits_name in _TEXT_BRANCHES.items():
    if any(name.startswith(prefix) for name in tensors):
      branch, logits = prefix, logits_name
  wanted = tuple(
    dataclasses.replace(p, name=branch + p.name.removeprefix('model.'))
    for p in parameters_of(config)
  )
  embeddings = branch + _EMBEDDINGS.removeprefix('model.')
  used = safetensors_folder.without_copy(folder, tensors, logits, of=embeddings)
  if branch != 'model.':
    used = without_senses(folder, used, _VISION)
  return used, wanted


def without_senses(
  folder: Path, tensors: Tensors, prefixes: tuple[str, ...]
) -> Tensors:
  """Drops the tensors for images and sound, whose names begin with one of
  `prefixes`, perhaps after `model.`; logs a warning if there are any."""
  text_tensors = {
    name: file
    for name, file in tensors.items()
    if not name.removeprefix('model.').startswith(prefixes)
  }
  num_unread = len(tensors) - len(text_tensors)
  if num_unread:
    logging.getLogger('specdec_jax').warning(
      f'{folder}: {num_unread} tensors for images or sound are not read; '
      'the model takes text only'
    )
  return text_tensors


def parameters_of(config: GemmaConfig) -> tuple[Parameter, ...]:
  """Lists every parameter of a model of these sizes, by Hugging Face's name."""
  return parameters.named(config, NAMES, 'model.layers.{}')


def config_json(config: GemmaConfig, dtype: str) -> Json:
  """Returns a config.json; ValueError if transformers lacks the network."""
  model_type = _TEXT if config.has_qk_norm else 'gemma2'
  name = 'Gemma3' if config.has_qk_norm else 'Gemma2'
  rope: Json = {'rope_theta': config.rope_base}
  if config.has_qk_norm:
    rope['rope_local_base_freq'] = config.local_rope_base
    if config.rope_factor != 1.0:
      factor = {'rope_type': 'linear', 'factor': config.rope_factor}
      rope['rope_scaling'] = factor
  config_values = {
    'architectures': [f'{name}ForCausalLM'],
    'model_type': model_type,
    'torch_dtype': dtype,
    **stack_json(config),
    **rope,
    'tie_word_embeddings': True,
    'pad_token_id': 0,
    'eos_token_id': 1,
    'bos_token_id': 2,
  }
  read_back = read_config(
    Settings(path=model_type, values=config_values), config.dtype
  )
  check_written(config, read_back)
  return config_values


def stack_json(config: GemmaConfig) -> Json:
  """Returns the keys of config.json for one stack, without RoPE; ValueError if
  its windows differ in length."""
  # transformers has one length of windows, and the type of each layer.
  windows = attention.layer_windows(config)
  sizes = set(windows) - {0}
  if len(sizes) > 1:
    raise ValueError(f'Hugging Face has no Gemma with windows of {windows}')
  return {
    **llama.counts_json(config, config.num_layers),
    'hidden_activation': _GELU,
    'attention_bias': False,
    'query_pre_attn_scalar': config.query_pre_attn_scalar,
    'sliding_window': max(sizes, default=_WINDOW),
    'layer_types': [SLIDING if window else FULL for window in windows],
    'attn_logit_softcapping': config.attention_softcap or None,
    'final_logit_softcapping': config.logits_softcap or None,
  }


def check_written(config: _Gemma, read_back: _Gemma) -> None:
  """Raises ValueError if a config differs from the one read back from its
  config.json; windows are compared elsewhere."""
  # Fields that transformers cannot express come back changed.
  differing = [
    f'{field.name} {getattr(config, field.name)}'
    for field in dataclasses.fields(config)
    if field.name != 'windows'
    and getattr(config, field.name) != getattr(read_back, field.name)
  ]
  if differing:
    raise ValueError(f'Hugging Face has no Gemma with {", ".join(differing)}')
