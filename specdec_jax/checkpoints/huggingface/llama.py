"""Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE: the network `models.llama`."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import jax.numpy as jnp

from specdec_jax.checkpoints import parameters, safetensors_folder
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.safetensors_folder import Needed, Tensors
from specdec_jax.files import settings
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models import attention
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.gemma.gemma4 import Gemma4Config
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.llama import LlamaConfig, RopeScaling

_MOE = 'qwen3_moe'
MODEL_TYPES: tuple[str, ...] = ('llama', 'mistral', 'qwen2', 'qwen3', _MOE)
# Settings of the training of experts.
WITHOUT_EFFECT = frozenset(('output_router_logits', 'router_aux_loss_coef'))
# By the names of our branches; those of layer N are below `model.layers.N`.
NAMES = {
  'token_embedder': 'model.embed_tokens',
  'decoder_norm': 'model.norm',
  'logits_dense': 'lm_head',
  'pre_self_attention_layer_norm': 'input_layernorm',
  'self_attention/query': 'self_attn.q_proj',
  'self_attention/key': 'self_attn.k_proj',
  'self_attention/value': 'self_attn.v_proj',
  'self_attention/query_norm': 'self_attn.q_norm',
  'self_attention/key_norm': 'self_attn.k_norm',
  'self_attention/out': 'self_attn.o_proj',
  'pre_mlp_layer_norm': 'post_attention_layernorm',
  'mlp/wi_0': 'mlp.gate_proj',
  'mlp/wi_1': 'mlp.up_proj',
  'mlp/wo': 'mlp.down_proj',
  'experts': 'mlp.gate',
  'experts/mlp/expert_wi': 'mlp.experts.gate_up_proj',
  'experts/mlp/expert_wo': 'mlp.experts.down_proj',
}
# Names of the kernels of an expert, in the order of ours.
_EXPERT_KERNELS = {
  'experts/mlp/expert_wi/kernel': ('gate_proj', 'up_proj'),
  'experts/mlp/expert_wo/kernel': ('down_proj',),
}
_LAYER = 'model.layers.{}'
# Fields that are counts, with their keys in config.json.
_COUNTS = {
  'vocab_size': 'vocab_size',
  'embed_dim': 'hidden_size',
  'mlp_dim': 'intermediate_size',
  'num_heads': 'num_attention_heads',
  'num_kv_heads': 'num_key_value_heads',
  'head_dim': 'head_dim',
  'max_positions': 'max_position_embeddings',
}
# The only values that `models.llama` supports.
_FLAGS = {
  'mlp_bias': False,
  'rope_interleaved': False,
  'use_mrope': False,
  'is_encoder_decoder': False,
  'add_cross_attention': False,
  'is_causal': True,
}
FULL, SLIDING = 'full_attention', 'sliding_attention'
# Names of transformers' classes that are not the capitalized model type.
_CLASSES = {_MOE: 'Qwen3Moe'}
# Defaults of transformers.
_MISTRAL_WINDOW, _QWEN_FULL_LAYERS = 4096, 28


def read_config(values: Settings, dtype: jnp.dtype) -> LlamaConfig:
  """Returns the config of a config.json; ValueError for features that
  `models.llama` lacks."""
  # All are one network: Mistral is Llama with a window, Qwen2 has biases on
  # queries, keys and values, Qwen3 norms of queries and keys, and Qwen3-MoE
  # experts as well.
  model_type = values.text('model_type')
  check_supported(values, model_type)
  num_layers = values.count('num_hidden_layers', most=settings.MAX_LAYERS)
  optional = []
  if model_type == 'llama':
    optional.append('num_kv_heads')
  if model_type != 'qwen3':
    optional.append('head_dim')
  sizes = counts(values, may_lack=optional)
  return values.build(
    LlamaConfig,
    **sizes,
    num_layers=num_layers,
    rope_base=rope_base(values),
    rope_scaling=rope_scaling(values),
    norm_epsilon=values.positive('rms_norm_eps', 1e-6),
    is_tied=values.flag('tie_word_embeddings', False),
    has_attention_bias=model_type == 'qwen2',
    has_qk_norm=model_type in ('qwen3', _MOE),
    **(_experts(values) if model_type == _MOE else {}),
    windows=windows(values, model_type, num_layers, sizes['max_positions']),
    dtype=dtype,
  )


def _experts(values: Settings) -> Json:
  """Reads the experts of a Qwen3-MoE; ValueError if layers differ."""
  values.expect('decoder_sparse_step', 1, ': each layer has experts')
  if values.counts('mlp_only_layers', []):
    values.refuse('mlp_only_layers', 'none: each layer has experts')
  # transformers 5 writes the second name.
  key = 'num_experts' if values.has('num_experts') else 'num_local_experts'
  return {
    'num_experts': values.count(key, 128),
    'num_chosen_experts': values.count('num_experts_per_tok', 8),
    'expert_dim': values.count('moe_intermediate_size', 768),
    'has_normalized_experts': values.flag('norm_topk_prob', False),
  }


def counts(
  values: Settings,
  defaults: Mapping[str, int] | None = None,
  *,
  may_lack: Collection[str] = ('num_kv_heads', 'head_dim'),
) -> dict[str, int]:
  """Returns the fields of `_COUNTS`; `defaults` are by key. Those that a file
  `may_lack` default to one key head per head, and to equal shares of the
  embedding."""
  defaults = defaults or {}
  fields = {
    field: values.count(key, defaults.get(key))
    for field, key in _COUNTS.items()
    if field not in may_lack
  }
  # With 4 heads and embeddings of 64, a head has 16 features.
  derived = {
    'num_kv_heads': fields['num_heads'],
    'head_dim': fields['embed_dim'] // fields['num_heads'],
  }
  for field in may_lack:
    key = _COUNTS[field]
    default = defaults.get(key, derived[field])
    fields[field] = values.count(key, default)
  return fields


def check_supported(values: Settings, model_type: str) -> None:
  """Raises ValueError for settings of features that the network lacks."""
  for key, expected in _FLAGS.items():
    values.expect(key, expected)
  # transformers ignores this key for Qwen2, with biases, and Mistral, without.
  values.flag('attention_bias', False)
  if model_type in ('llama', 'qwen3', _MOE):
    values.expect('attention_bias', False)
  if model_type == _MOE:
    values.expect('use_sliding_window', False)
  values.expect('hidden_act', 'silu')
  key = 'partial_rotary_factor'
  for place in (values, _rope_place(values, key)):
    place.expect(key, 1.0, ': partial RoPE is not supported')


def _rope_place(values: Settings, key: str) -> Settings:
  """Returns the section with the RoPE setting `key`: rope_parameters, unless
  there is a rope_scaling."""
  scaling = values.at('rope_scaling')
  parameters = values.at('rope_parameters')
  if not scaling.values:
    return parameters
  if parameters.has(key):
    parameters.refuse(
      key, 'no such section beside rope_scaling, which overrides it'
    )
  return scaling


def rope_base(values: Settings) -> float:
  """Reads the RoPE base, `rope_theta`: a top-level key of transformers 4, and a
  key of rope_parameters in transformers 5."""
  key = 'rope_theta'
  return base_in(_rope_place(values, key), values, key, 10_000.0)


def base_in(
  place: Settings, values: Settings, key: str, default: float
) -> float:
  """Reads the RoPE base from `rope_theta` of a section or, with a default, from
  a top-level key; ValueError if the two differ."""
  if not place.has('rope_theta'):
    return values.positive(key, default)
  base = place.positive('rope_theta')
  if values.positive(key, base) != base:
    values.refuse(key, f'{base:g}, the value of {place.section}rope_theta')
  return base


def rope_scaling(values: Settings) -> RopeScaling | None:
  """Returns the RoPE scaling; ValueError if it is not Llama 3.1's."""
  # Early files have `type`, later ones `rope_type`, which takes precedence.
  rope_type = ''
  place = _rope_place(values, 'factor')
  for key in ('type', 'rope_type'):
    section = _rope_place(values, key)
    if section.has(key):
      rope_type = section.text(key)
      place = section
      if rope_type not in ('default', 'llama3'):
        place.refuse(key, 'default or llama3')
  if rope_type != 'llama3':
    # A factor without a type is a mistake, or scales in an early version.
    if place.positive('factor', 1.0) != 1.0 and not rope_type:
      place.refuse('factor', 'a rope_type beside it')
    return None
  return place.build(
    RopeScaling,
    factor=place.positive('factor'),
    low_freq_factor=place.positive('low_freq_factor'),
    high_freq_factor=place.positive('high_freq_factor'),
    original_max_positions=place.count('original_max_position_embeddings'),
  )


def windows(
  values: Settings, model_type: str, num_layers: int, max_positions: int
) -> tuple[int, ...]:
  """Returns each layer's window; one as long as the context is left out."""
  # Of 4 layers with `max_window_layers` 2, the last two have a window.
  key = 'sliding_window'
  first, window = 0, 0
  if values.has(key):
    window = values.count(key)
  elif model_type == 'mistral' and key not in values.values:
    window = _MISTRAL_WINDOW
  if model_type.startswith('qwen'):
    first = values.count('max_window_layers', _QWEN_FULL_LAYERS, least=0)
    if not values.flag('use_sliding_window', False):
      window = 0
    elif not window:
      values.refuse(key, 'an integer, as use_sliding_window is true')
  elif model_type == 'llama' and 0 < window < max_positions:
    values.refuse(key, 'null: a llama has no window')
  default_types = [
    SLIDING if window and i >= first else FULL for i in range(num_layers)
  ]
  types = values.texts('layer_types', default_types)
  allowed = {FULL, SLIDING} if window else {FULL}
  is_other = types != default_types and not model_type.startswith('qwen')
  if is_other or len(types) != num_layers or set(types) - allowed:
    names = ' or '.join(sorted(allowed))
    values.refuse('layer_types', f'{num_layers} of {names}')
  if window >= max_positions or SLIDING not in types:
    return ()
  if FULL not in types:
    return (window,)
  return tuple(window if layer == SLIDING else 0 for layer in types)


def needed(folder: Path, config: LlamaConfig, tensors: Tensors) -> Needed:
  """Returns the tensors that the network needs, and its parameters."""
  # Early versions of transformers saved tables of frequencies.
  used = {k: v for k, v in tensors.items() if not k.endswith('.inv_freq')}
  if config.is_tied:
    used = safetensors_folder.without_copy(
      folder,
      used,
      'lm_head.weight',
      of='model.embed_tokens.weight',
      remedy=safetensors_folder.UNTIE,
    )
  return used, parameters_of(config)


def parameters_of(config: LlamaConfig) -> tuple[Parameter, ...]:
  """Lists every parameter of a model of these sizes, by Hugging Face's name."""
  return tuple(
    _by_expert(parameter)
    for parameter in parameters.named(config, NAMES, _LAYER)
  )


def _by_expert(parameter: Parameter) -> Parameter:
  """Adds the names of the tensors of an expert kernel, one per expert."""
  # Ours are [E, 2, embed, width] and [E, width, embed]; a file has separate
  # matrices for every expert's gate, up and down projection.
  layer, _, path = parameter.path.partition('/')
  if path not in _EXPERT_KERNELS:
    return parameter
  prefix = _LAYER.format(layer.removeprefix('layers_'))
  parts = tuple(
    f'{prefix}.mlp.experts.{expert}.{name}.weight'
    for expert in range(parameter.shape[0])
    for name in _EXPERT_KERNELS[path]
  )
  return dataclasses.replace(parameter, parts=parts)


def config_json(config: LlamaConfig, dtype: str) -> Json:
  """Returns a config.json; ValueError if transformers lacks the network."""
  model_type = _model_type(config)
  class_name = _CLASSES.get(model_type, model_type.capitalize())
  return {
    'architectures': [f'{class_name}ForCausalLM'],
    'model_type': model_type,
    'torch_dtype': dtype,
    **sizes_json(config, config.num_layers),
    'tie_word_embeddings': config.is_tied,
    **windows_json(config, model_type),
    **_experts_json(config),
  }


def _experts_json(config: LlamaConfig) -> Json:
  if not config.num_experts:
    return {}
  return {
    'decoder_sparse_step': 1,
    'mlp_only_layers': [],
    'num_experts': config.num_experts,
    'num_experts_per_tok': config.num_chosen_experts,
    'moe_intermediate_size': config.expert_dim,
    'norm_topk_prob': config.has_normalized_experts,
  }


def sizes_json(
  config: LlamaConfig | EagleConfig | BlockDrafterConfig, num_layers: int
) -> Json:
  """Returns the keys for `num_layers` layers of a Llama, or of its kin."""
  return {
    **counts_json(config, num_layers),
    'hidden_act': 'silu',
    'rope_theta': config.rope_base,
    'rope_scaling': _rope_scaling_json(config.rope_scaling),
  }


def counts_json(
  config: (
    LlamaConfig | EagleConfig | BlockDrafterConfig | GemmaConfig | Gemma4Config
  ),
  num_layers: int,
) -> Json:
  """Reverses `counts`, and adds the other keys of every stack of layers."""
  return {
    **{key: getattr(config, field) for field, key in _COUNTS.items()},
    'num_hidden_layers': num_layers,
    'rms_norm_eps': config.norm_epsilon,
  }


def _model_type(config: LlamaConfig) -> str:
  """Returns the `model_type` of a network."""
  if config.has_qk_norm and config.has_attention_bias:
    raise ValueError('Hugging Face has no has_qk_norm with has_attention_bias')
  if config.num_experts:
    if not config.has_qk_norm or any(attention.layer_windows(config)):
      raise ValueError(
        'Hugging Face has experts with has_qk_norm and without windows'
      )
    return _MOE
  if config.has_qk_norm:
    return 'qwen3'
  if config.has_attention_bias:
    return 'qwen2'
  return 'mistral' if any(attention.layer_windows(config)) else 'llama'


def _rope_scaling_json(scaling: RopeScaling | None) -> Json | None:
  """Writes `rope_scaling` as in config.json."""
  if scaling is None:
    return None
  fields = dataclasses.asdict(scaling)
  original = fields.pop('original_max_positions')
  key = 'original_max_position_embeddings'
  return {'rope_type': 'llama3', **fields, key: original}


def windows_json(
  config: LlamaConfig | BlockDrafterConfig, model_type: str
) -> Json:
  windows = attention.layer_windows(config)
  if not any(windows):
    return {}
  # config.json has one length of windows, and a list of layers that have one.
  sizes = set(windows) - {0}
  is_mixed = 0 in windows
  if len(sizes) > 1 or (is_mixed and model_type == 'mistral'):
    raise ValueError(
      f'Hugging Face has no {model_type} with windows of {windows}'
    )
  config_values: Json = {'sliding_window': max(sizes)}
  if model_type != 'mistral':
    types = [SLIDING if window else FULL for window in windows]
    config_values |= {
      'use_sliding_window': True,
      'max_window_layers': types.index(SLIDING),
      'layer_types': types,
    }
  return config_values
