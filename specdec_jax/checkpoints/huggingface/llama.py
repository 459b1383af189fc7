"""Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE, which `models.llama` computes."""

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
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.gemma.gemma4 import Gemma4Config
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.llama import LlamaConfig, RopeScaling

_MOE = 'qwen3_moe'
MODEL_TYPES: tuple[str, ...] = ('llama', 'mistral', 'qwen2', 'qwen3', _MOE)
# How experts are trained.
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
# The values that `models.llama` computes with; a file may state others.
_FLAGS = {
  'mlp_bias': False,
  'rope_interleaved': False,
  'use_mrope': False,
  'is_encoder_decoder': False,
  'add_cross_attention': False,
  'is_causal': True,
}
FULL, SLIDING = 'full_attention', 'sliding_attention'
# Classes of transformers whose names are not those of their types.
_CLASSES = {_MOE: 'Qwen3Moe'}
# Defaults of transformers.
_MISTRAL_WINDOW, _QWEN_FULL_LAYERS = 4096, 28


def read_config(values: Settings, dtype: jnp.dtype) -> LlamaConfig:
  """Returns the sizes that config.json states; raises ValueError for features
  that `models.llama` does not compute."""
  # All are one network: Mistral is Llama with a window, Qwen2 has biases on
  # queries, keys and values, Qwen3 norms of queries and keys, and Qwen3-MoE
  # experts as well.
  kind = values.text('model_type')
  check_supported(values, kind)
  num_layers = values.count('num_hidden_layers', most=settings.MAX_LAYERS)
  left_out = {'num_kv_heads': kind == 'llama', 'head_dim': kind != 'qwen3'}
  sizes = counts(values, may_lack=[x for x, may in left_out.items() if may])
  return values.build(
    LlamaConfig,
    **sizes,
    num_layers=num_layers,
    rope_base=rope_base(values),
    rope_scaling=rope_scaling(values),
    norm_epsilon=values.positive('rms_norm_eps', 1e-6),
    is_tied=values.flag('tie_word_embeddings', False),
    has_attention_bias=kind == 'qwen2',
    has_qk_norm=kind in ('qwen3', _MOE),
    **(_experts(values) if kind == _MOE else {}),
    windows=_windows(values, kind, num_layers, sizes['max_positions']),
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
  """Returns the fields of `_COUNTS`, with defaults by key. Of those that a file
  `may_lack`, each head has its own keys and an equal share of the width."""
  # With 4 heads and a width of 64, heads are of 16 unless a file says so.
  known = defaults or {}
  found = {
    field: values.count(key, known.get(key))
    for field, key in _COUNTS.items()
    if field not in may_lack
  }
  derived = {
    'num_kv_heads': found['num_heads'],
    'head_dim': found['embed_dim'] // found['num_heads'],
  }
  keys = {field: _COUNTS[field] for field in may_lack}
  return found | {
    field: values.count(key, known.get(key, derived[field]))
    for field, key in keys.items()
  }


def check_supported(values: Settings, kind: str) -> None:
  """Raises ValueError for what would load and then compute something else."""
  for key, expected in _FLAGS.items():
    values.expect(key, expected)
  # Qwen2 has biases whatever this says, and Mistral none.
  values.flag('attention_bias', False)
  if kind in ('llama', 'qwen3', _MOE):
    values.expect('attention_bias', False)
  if kind == _MOE:
    values.expect('use_sliding_window', False)
  values.expect('hidden_act', 'silu')
  key = 'partial_rotary_factor'
  for place in (values, _rope_place(values, key)):
    place.expect(key, 1.0, ': rotary positions turn whole heads')


def _rope_place(values: Settings, key: str) -> Settings:
  """Returns the section with rotary settings, of which `key` is one:
  rope_parameters, unless there is a rope_scaling."""
  scaling, parameters = values.at('rope_scaling'), values.at('rope_parameters')
  if not scaling.values:
    return parameters
  if parameters.has(key):
    parameters.refuse(
      key, 'no such section beside rope_scaling, which transformers reads alone'
    )
  return scaling


def rope_base(values: Settings) -> float:
  """Reads the base of rotary positions, `rope_theta`: transformers 4 has it at
  the top, and 5 in the section of rotary settings."""
  key = 'rope_theta'
  return base_in(_rope_place(values, key), values, key, 10_000.0)


def base_in(
  place: Settings, values: Settings, key: str, default: float
) -> float:
  """Reads the base of rotary positions from `rope_theta` of a section or, with
  a default, from a key at the top; ValueError if both state it differently."""
  if not place.has('rope_theta'):
    return values.positive(key, default)
  base = place.positive('rope_theta')
  if values.positive(key, base) != base:
    values.refuse(
      key, f'{base:g}, as {place.section}rope_theta says: it is in two places'
    )
  return base


def rope_scaling(values: Settings) -> RopeScaling | None:
  """Returns how rotary positions are stretched; raises ValueError if in another
  way than Llama 3.1's."""
  # Early files say `type`, later ones `rope_type`; the later one wins.
  kind, place = '', _rope_place(values, 'factor')
  for key in ('type', 'rope_type'):
    stating = _rope_place(values, key)
    if stating.has(key):
      kind, place = stating.text(key), stating
      if kind not in ('default', 'llama3'):
        place.refuse(key, 'default or llama3')
  if kind != 'llama3':
    # A factor without a type is a mistake, or scales in an early version.
    if place.positive('factor', 1.0) != 1.0 and not kind:
      place.refuse('factor', 'a rope_type beside it')
    return None
  return place.build(
    RopeScaling,
    factor=place.positive('factor'),
    low_freq_factor=place.positive('low_freq_factor'),
    high_freq_factor=place.positive('high_freq_factor'),
    original_max_positions=place.count('original_max_position_embeddings'),
  )


def _windows(
  values: Settings, kind: str, num_layers: int, max_positions: int
) -> tuple[int, ...]:
  """Returns each layer's window; one that no context outgrows is none."""
  # Of 4 layers with `max_window_layers` 2, the last two have a window.
  key, first, window = 'sliding_window', 0, 0
  if values.has(key):
    window = values.count(key)
  elif kind == 'mistral' and key not in values.values:
    window = _MISTRAL_WINDOW
  if kind.startswith('qwen'):
    first = values.count('max_window_layers', _QWEN_FULL_LAYERS, least=0)
    if not values.flag('use_sliding_window', False):
      window = 0
    elif not window:
      values.refuse(key, 'an integer, as use_sliding_window is true')
  elif kind == 'llama' and 0 < window < max_positions:
    values.refuse(key, 'null: a llama has no window')
  own = [SLIDING if window and i >= first else FULL for i in range(num_layers)]
  types = values.texts('layer_types', own)
  allowed = {FULL, SLIDING} if window else {FULL}
  is_other = types != own and not kind.startswith('qwen')
  if is_other or len(types) != num_layers or set(types) - allowed:
    names = ' or '.join(sorted(allowed))
    values.refuse('layer_types', f'{num_layers} of {names}')
  if window >= max_positions or SLIDING not in types:
    return ()
  if FULL not in types:
    return (window,)
  return tuple(window if each == SLIDING else 0 for each in types)


def needed(folder: Path, config: LlamaConfig, tensors: Tensors) -> Needed:
  """Returns the tensors that the network needs, and its parameters."""
  # Early versions of transformers saved tables of frequencies.
  kept = {k: v for k, v in tensors.items() if not k.endswith('.inv_freq')}
  if config.is_tied:
    kept = safetensors_folder.without_copy(
      folder,
      kept,
      'lm_head.weight',
      of='model.embed_tokens.weight',
      remedy=safetensors_folder.UNTIE,
    )
  return kept, parameters_of(config)


def parameters_of(config: LlamaConfig) -> tuple[Parameter, ...]:
  """Lists every parameter of a model of these sizes, by Hugging Face's name."""
  return tuple(
    _by_expert(parameter)
    for parameter in parameters.named(config, NAMES, _LAYER)
  )


def _by_expert(parameter: Parameter) -> Parameter:
  """Names the tensors of which a file makes up the kernels of all experts."""
  # Ours are [E, 2, embed, width] and [E, width, embed]; a file has a matrix for
  # each expert, and for gates and the other half of its input.
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
  """Makes a config.json; ValueError if transformers has no such network."""
  kind = _kind(config)
  return {
    'architectures': [f'{_CLASSES.get(kind, kind.capitalize())}ForCausalLM'],
    'model_type': kind,
    'torch_dtype': dtype,
    **sizes_json(config, config.num_layers),
    'tie_word_embeddings': config.is_tied,
    **_windows_json(config, kind),
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


def sizes_json(config: LlamaConfig | EagleConfig, num_layers: int) -> Json:
  """Returns the sizes of so many layers of a Llama, or of one like it."""
  return {
    **counts_json(config, num_layers),
    'hidden_act': 'silu',
    'rope_theta': config.rope_base,
    'rope_scaling': _rope_scaling_json(config.rope_scaling),
  }


def counts_json(
  config: LlamaConfig | EagleConfig | GemmaConfig | Gemma4Config,
  num_layers: int,
) -> Json:
  """Reverses `counts`, and adds what else all stacks of layers have."""
  return {
    **{key: getattr(config, field) for field, key in _COUNTS.items()},
    'num_hidden_layers': num_layers,
    'rms_norm_eps': config.norm_epsilon,
  }


def _kind(config: LlamaConfig) -> str:
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
  stated = dataclasses.asdict(scaling)
  original = stated.pop('original_max_positions')
  key = 'original_max_position_embeddings'
  return {'rope_type': 'llama3', **stated, key: original}


def _windows_json(config: LlamaConfig, kind: str) -> Json:
  windows = attention.layer_windows(config)
  if not any(windows):
    return {}
  # config.json has one length of windows, and a list of layers that have one.
  sizes = set(windows) - {0}
  is_mixed = 0 in windows
  if len(sizes) > 1 or (is_mixed and kind == 'mistral'):
    raise ValueError(f'Hugging Face has no {kind} with windows of {windows}')
  stated: Json = {'sliding_window': max(sizes)}
  if kind != 'mistral':
    types = [SLIDING if window else FULL for window in windows]
    stated |= {
      'use_sliding_window': True,
      'max_window_layers': types.index(SLIDING),
      'layer_types': types,
    }
  return stated
