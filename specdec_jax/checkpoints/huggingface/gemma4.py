"""Gemma 4, the text alone: the networks of `models.gemma.gemma4`.

Keys and defaults are those of transformers 5.24.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp

from specdec_jax.checkpoints import parameters, safetensors_folder
from specdec_jax.checkpoints.huggingface import gemma, llama
from specdec_jax.checkpoints.huggingface.gemma import check_written
from specdec_jax.checkpoints.huggingface.llama import FULL, SLIDING
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.safetensors_folder import Needed, Tensors
from specdec_jax.files import settings
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models import attention
from specdec_jax.models.gemma.gemma4 import Gemma4Config

# The second is the first without experts and embeddings for each layer.
_TEXT, _UNIFIED = 'gemma4_text', 'gemma4_unified_text'
MODEL_TYPES: tuple[str, ...] = (_TEXT, 'gemma4', _UNIFIED, 'gemma4_unified')
# By the names of our branches; those of layer N are below `model.layers.N`.
NAMES = gemma.NAMES | {
  'per_layer_embedder': 'model.embed_tokens_per_layer',
  'per_layer_projection': 'model.per_layer_model_projection',
  'per_layer_norm': 'model.per_layer_projection_norm',
  'per_layer_gate': 'per_layer_input_gate',
  'per_layer_out': 'per_layer_projection',
  'post_per_layer_norm': 'post_per_layer_input_norm',
  'post_mlp_norm_1': 'post_feedforward_layernorm_1',
  'pre_mlp_norm_2': 'pre_feedforward_layernorm_2',
  'post_mlp_norm_2': 'post_feedforward_layernorm_2',
  'router': 'router.proj',
}
# Parameters of a layer that files call neither weight nor bias.
_EXPERT_WI = 'experts/expert_wi/kernel'
_BARE_NAMES = {
  'layer_scalar': 'layer_scalar',
  'router/scale': 'router.scale',
  'router/per_expert_scale': 'router.per_expert_scale',
  _EXPERT_WI: 'experts.gate_up_proj',
  'experts/expert_wo/kernel': 'experts.down_proj',
}
_LAYER = 'model.layers.{}'
_TEXT_BRANCH = 'model.language_model.'
# Tensors of what a model sees and hears.
_OTHER_SENSES = (
  'vision_embedder.',
  'vision_tower.',
  'audio_tower.',
  'embed_vision.',
  'embed_audio.',
)
# What makes keys and values of a layer.
_KEYS = ('k_proj', 'v_proj', 'k_norm', 'v_norm')
# Keys about images and sound, about how a file was made, and of experts that
# there are none of.
WITHOUT_EFFECT = gemma.WITHOUT_EFFECT | frozenset((
  'num_experts', 'top_k_experts', 'moe_intermediate_size',
  'audio_config', 'boi_token_id', 'eoi_token_id', 'image_token_id',
  'video_token_id', 'boa_token_id', 'eoa_token_id', 'eoa_token_index',
  'audio_token_id', 'vision_soft_tokens_per_image',
))  # fmt: skip
# Defaults of transformers.
_COUNTS: Json = {
  'vocab_size': 262_144,
  'hidden_size': 2304,
  'intermediate_size': 9216,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 256,
}
_NUM_LAYERS, _PERIOD, _FULL_HEAD_DIM = 30, 6, 512
_PER_LAYER_VOCAB_SIZE = 262_144
_DEFAULTS: dict[str, Json] = {
  _TEXT: {'max_positions': 131_072, 'window': 512, 'per_layer_dim': 256},
  _UNIFIED: {'max_positions': 262_144, 'window': 1024, 'per_layer_dim': 0},
}
# Bases of rotary wavelengths where a file states none, and the share that
# turns.
_FULL_BASE, _SLIDING_BASE, _FRACTION = 1e6, 1e4, 0.25


def read_config(values: Settings, dtype: jnp.dtype) -> Gemma4Config:
  """Returns the sizes that config.json states, of the text alone if it also
  sees or hears; ValueError for what `models.gemma.gemma4` does not compute."""
  text = values.at('text_config') if values.has('text_config') else values
  for place in (values, text):
    place.expect('tie_word_embeddings', True, ', as Gemmas are')
  return values.build(Gemma4Config, **sizes_of(text), dtype=dtype)


def sizes_of(values: Settings) -> Json:
  """Returns the fields of `Gemma4Config`, as an object of a configuration has
  them; raises ValueError as `read_config` does."""
  model_type = values.text('model_type', _TEXT)
  if model_type not in _DEFAULTS:
    values.refuse('model_type', f'{_TEXT} or {_UNIFIED}')
  defaults = _DEFAULTS[model_type]
  values.expect('attention_bias', False)
  values.expect('hidden_activation', 'gelu_pytorch_tanh')
  # Images are seen from both sides; a text never is.
  values.expect('use_bidirectional_attention', 'vision')
  num_layers = values.count(
    'num_hidden_layers', _NUM_LAYERS, most=settings.MAX_LAYERS
  )
  windows = _windows(values, num_layers, defaults['window'])
  max_positions = {'max_position_embeddings': defaults['max_positions']}
  counts = llama.counts(values, _COUNTS | max_positions, may_lack=())
  per_layer_dim = values.count(
    'hidden_size_per_layer_input', defaults['per_layer_dim'], least=0
  )
  per_layer_vocab_size = values.count(
    'vocab_size_per_layer_input', _PER_LAYER_VOCAB_SIZE, least=0
  )
  cap = 'final_logit_softcapping'
  return {
    **counts,
    **_heads(values, windows, counts),
    'num_layers': num_layers,
    'windows': gemma.shortest_pattern(windows),
    'num_shared_layers': values.count('num_kv_shared_layers', 0, least=0),
    'has_wide_shared_mlp': values.flag('use_double_wide_mlp', False),
    'per_layer_dim': per_layer_dim,
    'per_layer_vocab_size': per_layer_vocab_size if per_layer_dim else 0,
    'logits_softcap': values.positive(cap) if values.has(cap) else 0.0,
    'norm_epsilon': values.positive('rms_norm_eps', 1e-6),
    **_experts(values),
    **_rope(values),
  }


def _experts(values: Settings) -> dict[str, int]:
  """Returns the fields that describe experts, if there are any."""
  if not values.flag('enable_moe_block', False):
    return {}
  return {
    'num_experts': values.count('num_experts'),
    'num_chosen_experts': values.count('top_k_experts'),
    'expert_dim': values.count('moe_intermediate_size'),
  }


def _windows(values: Settings, num_layers: int, default: int) -> list[int]:
  """Returns the window of each layer, 0 for full ones."""
  window = values.count('sliding_window', default)
  usual = [SLIDING if (i + 1) % _PERIOD else FULL for i in range(num_layers)]
  types = values.texts('layer_types', usual)
  if len(types) != num_layers or set(types) - {FULL, SLIDING}:
    values.refuse('layer_types', f'{num_layers} of {FULL} or {SLIDING}')
  # As in transformers, the last layer is full whatever the file says.
  types = [*types[:-1], FULL]
  return [window if layer_type == SLIDING else 0 for layer_type in types]


def _heads(values: Settings, windows: list[int], counts: Json) -> Json:
  """Returns the fields that describe the heads of either type of layer."""
  key_is_value = values.flag('attention_k_eq_v', False)
  # transformers reads these two keys, or else the table of layers; of the
  # table, each layer has what it does not state from the top.
  full_head_dim = values.count('global_head_dim', _FULL_HEAD_DIM)
  full_num_kv_heads = counts['num_kv_heads']
  if values.has('num_global_key_value_heads'):
    stated = values.count('num_global_key_value_heads')
    full_num_kv_heads = stated if key_is_value else full_num_kv_heads
  heads = {False: (full_num_kv_heads, full_head_dim)}
  heads[True] = sliding = counts['num_kv_heads'], counts['head_dim']
  table = values.at('per_layer_config')
  for i, window in enumerate(windows if table.values else ()):
    layer = table.at(str(i))
    layer_heads = (
      layer.count('num_key_value_heads', sliding[0]),
      layer.count('head_dim', sliding[1]),
    )
    first = next(j for j in range(i + 1) if bool(windows[j]) == bool(window))
    if i == first:
      heads[bool(window)] = layer_heads
    elif layer_heads != heads[bool(window)]:
      values.refuse(
        'per_layer_config',
        f'layers {first} and {i}, of one type, to have heads alike',
      )
  full, sliding = heads[False], heads[True]
  return {
    'num_kv_heads': sliding[0],
    'head_dim': sliding[1],
    'full_num_kv_heads': full[0],
    'full_head_dim': full[1],
    'full_key_is_value': key_is_value,
  }


def _rope(values: Settings) -> dict[str, float]:
  """Reads the rotary positions of full and of sliding layers."""
  place = values.at('rope_parameters')
  if not place.values:
    return {
      'rope_base': _FULL_BASE,
      'rope_fraction': _FRACTION,
      'local_rope_base': _SLIDING_BASE,
    }
  full, sliding = place.at(FULL), place.at(SLIDING)
  sliding.expect('rope_type', 'default')
  rope = {
    'rope_base': full.positive('rope_theta'),
    'rope_fraction': 1.0,
    'local_rope_base': sliding.positive('rope_theta', _SLIDING_BASE),
  }
  rope_type = full.text('rope_type')
  if rope_type not in ('default', 'proportional'):
    full.refuse('rope_type', 'default or proportional')
  if rope_type == 'proportional':
    rope['rope_fraction'] = full.number('partial_rotary_factor', 1.0)
    rope['rope_factor'] = full.positive('factor', 1.0)
  return rope


def needed(folder: Path, config: Gemma4Config, tensors: Tensors) -> Needed:
  """Returns the tensors that the network needs, and its parameters."""
  # A model that also sees has its text below `language_model`.
  branch = 'model.'
  if any(name.startswith(_TEXT_BRANCH) for name in tensors):
    branch = _TEXT_BRANCH
  in_branch = lambda name: branch + name.removeprefix('model.')
  wanted = tuple(
    dataclasses.replace(p, name=in_branch(p.name))
    for p in parameters_of(config)
  )
  embeddings = in_branch(NAMES['token_embedder'] + '.weight')
  tensors = safetensors_folder.without_copy(
    folder, tensors, 'lm_head.weight', of=embeddings
  )
  shared_layers = range(config.num_cached_layers, config.num_layers)
  unused = tuple(map(in_branch, tensors_of_keys(shared_layers)))
  used = {
    name: file for name, file in tensors.items() if not name.startswith(unused)
  }
  return gemma.without_senses(folder, used, _OTHER_SENSES), wanted


def tensors_of_keys(numbers: Iterable[int]) -> tuple[str, ...]:
  """Lists how the names of the tensors begin that make keys and values of the
  layers of these numbers; files may have them though no layer reads them."""
  return tuple(
    f'{_LAYER.format(i)}.self_attn.{name}.' for i in numbers for name in _KEYS
  )


def parameters_of(config: Gemma4Config) -> tuple[Parameter, ...]:
  """Lists every parameter of a model of these sizes, by Hugging Face's name."""
  return tuple(map(_as_in_file, parameters.of(config, name_of)))


def _as_in_file(parameter: Parameter) -> Parameter:
  """Joins the axes that files join: gates and the other half of an input."""
  if not parameter.path.endswith(_EXPERT_WI):
    return parameter
  # Ours are [E, 2, embed, width], of files [E, 2 * width, embed].
  num_experts, _, embed_dim, width = parameter.shape
  shape = num_experts, 2 * width, embed_dim
  return dataclasses.replace(parameter, file_shape=shape)


def name_of(path: str, names: Mapping[str, str] = NAMES) -> str:
  """Returns what a file calls the parameter at a path of ours; `names` are
  those of branches."""
  if path.startswith('layers_'):
    layer, name = path.removeprefix('layers_').split('/', 1)
    if name in _BARE_NAMES:
      return f'{_LAYER.format(layer)}.{_BARE_NAMES[name]}'
  return parameters.renamed(path, names, _LAYER)


def config_json(config: Gemma4Config, dtype: str) -> Json:
  """Makes a config.json; ValueError if transformers has no such network."""
  stated: Json = {
    'architectures': ['Gemma4ForCausalLM'],
    'model_type': _TEXT,
    'torch_dtype': dtype,
    **sizes_json(config),
    'tie_word_embeddings': True,
    'pad_token_id': 0,
    'eos_token_id': 1,
    'bos_token_id': 2,
  }
  values = Settings(path=_TEXT, values=stated)
  check_written(config, read_config(values, config.dtype))
  return stated


def sizes_json(config: Gemma4Config) -> Json:
  """Reverses `sizes_of`; raises ValueError if windows differ."""
  windows = attention.layer_windows(config)
  sizes = set(windows) - {0}
  if len(sizes) > 1 or windows[-1]:
    raise ValueError(f'Hugging Face has no Gemma 4 with windows of {windows}')
  full_rope = {
    'rope_type': 'proportional',
    'rope_theta': config.rope_base,
    'partial_rotary_factor': config.rope_fraction,
    'factor': config.rope_factor,
  }
  return {
    **llama.counts_json(config, config.num_layers),
    'hidden_activation': 'gelu_pytorch_tanh',
    'attention_bias': False,
    'sliding_window': max(sizes, default=_DEFAULTS[_TEXT]['window']),
    'layer_types': [SLIDING if window else FULL for window in windows],
    'per_layer_config': {
      str(i): {
        'head_dim': config.full_head_dim,
        'num_key_value_heads': config.full_num_kv_heads,
      }
      for i, window in enumerate(windows)
      if not window
    },
    'attention_k_eq_v': config.full_key_is_value,
    'num_kv_shared_layers': config.num_shared_layers,
    'use_double_wide_mlp': config.has_wide_shared_mlp,
    'hidden_size_per_layer_input': config.per_layer_dim,
    'vocab_size_per_layer_input': config.per_layer_vocab_size,
    'final_logit_softcapping': config.logits_softcap or None,
    'rope_parameters': {
      FULL: full_rope,
      SLIDING: {
        'rope_type': 'default',
        'rope_theta': config.local_rope_base,
      },
    },
    'enable_moe_block': config.num_experts > 0,
    'num_experts': config.num_experts or None,
    'top_k_experts': config.num_chosen_experts or None,
    'moe_intermediate_size': config.expert_dim or None,
  }
