"""T5 1.0, T5 1.1, FLAN-T5, mT5, umT5 and MADLAD-400."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from specdec_jax.checkpoints import parameters, safetensors_folder
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.safetensors_folder import Needed, Tensors
from specdec_jax.files import settings
from specdec_jax.files.paths import user_path
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models.t5 import T5Config

MODEL_TYPES: tuple[str, ...] = ('t5', 'mt5', 'umt5')
WITHOUT_EFFECT: frozenset[str] = frozenset()
_EPSILON = 1e-6
_EMBEDDINGS, _LOGITS = 'shared.weight', 'lm_head.weight'
# Some files repeat the embeddings under these names.
_COPIES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
# In files of T5 1.0; no T5 uses it.
_UNUSED = (
  'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
)
# Names of our branches outside of layers, and then of those in a layer.
_NAMES = {
  'token_embedder': 'shared',
  'decoder/logits_dense': 'lm_head',
  'encoder/encoder_norm': 'encoder.final_layer_norm',
  'decoder/decoder_norm': 'decoder.final_layer_norm',
}
_RELPOS = 'layer.0.SelfAttention.relative_attention_bias'
_IN_LAYER = {
  'encoder': {
    'pre_attention_layer_norm': 'layer.0.layer_norm',
    'attention': 'layer.0.SelfAttention',
    'relpos_bias': _RELPOS,
    'pre_mlp_layer_norm': 'layer.1.layer_norm',
    'mlp': 'layer.1.DenseReluDense',
  },
  'decoder': {
    'pre_self_attention_layer_norm': 'layer.0.layer_norm',
    'self_attention': 'layer.0.SelfAttention',
    'relpos_bias': _RELPOS,
    'pre_cross_attention_layer_norm': 'layer.1.layer_norm',
    'encoder_decoder_attention': 'layer.1.EncDecAttention',
    'pre_mlp_layer_norm': 'layer.2.layer_norm',
    'mlp': 'layer.2.DenseReluDense',
  },
}
_ATTENTION = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}

# Fields that are counts: their keys in config.json, and defaults.
_COUNTS: dict[str, tuple[str, int | None]] = {
  'vocab_size': ('vocab_size', None),
  'embed_dim': ('d_model', None),
  'head_dim': ('d_kv', None),
  'mlp_dim': ('d_ff', None),
  'num_encoder_layers': ('num_layers', None),
  'num_decoder_layers': ('num_decoder_layers', None),
  'num_heads': ('num_heads', None),
  'relpos_num_buckets': ('relative_attention_num_buckets', 32),
  'relpos_max_distance': ('relative_attention_max_distance', 128),
}

# Activations of feed_forward_proj, and transformers' default of dense_act_fn
# for it. gelu is the tanh approximation in both.
_PROJECTIONS = {
  'relu': (('relu',), 'relu'),
  'gated-gelu': (('gelu', 'linear'), 'gelu_new'),
  'gated-silu': (('silu', 'linear'), 'silu'),
  'gated-relu': (('relu', 'linear'), 'relu'),
}


def read_config(values: Settings, dtype: jnp.dtype) -> T5Config:
  """Returns the config of a config.json; ValueError if it, or the folder's
  generation_config.json, needs features that `models.t5` lacks."""
  model_type = values.text('model_type')
  is_t5 = model_type == 't5'
  is_umt5 = model_type == 'umt5'
  # generation_config.json may state another first token than config.json.
  generation = user_path(values.path).with_name('generation_config.json')
  for place in (values, settings.read_if_any(generation)):
    _check_ids(place)
  key = 'feed_forward_proj'
  projection = values.text(key, 'relu' if is_t5 else 'gated-gelu')
  if projection not in _PROJECTIONS:
    values.refuse(key, f'one of {", ".join(_PROJECTIONS)}')
  activations, dense = _PROJECTIONS[projection]
  values.expect('dense_act_fn', dense, f', that of {projection}')
  values.expect('layer_norm_epsilon', _EPSILON)
  for key, expected in (
    ('is_encoder_decoder', True),
    ('is_decoder', False),
    ('tie_encoder_decoder', False),
    ('is_gated_act', projection.startswith('gated')),
    ('scalable_attention', is_umt5),
  ):
    values.expect(key, expected)
  # T5 scales the logits if embeddings are tied. transformers 4 decides by
  # `tie_word_embeddings`, which is false in the files of T5 1.1 and FLAN-T5;
  # transformers 5 always ties, and decides by `scale_decoder_outputs`. mT5 and
  # umT5 are never scaled: transformers 5 scales umT5, but earlier versions and
  # T5X, which trained it, do not.
  is_tied = values.flag('tie_word_embeddings', True)
  is_scaled = values.flag('scale_decoder_outputs', is_tied)
  # By default the decoder has as many layers as the encoder.
  default_counts = {'num_decoder_layers': values.values.get('num_layers')}
  counts = {
    field: values.count(
      key,
      default_counts.get(key, default),
      most=settings.MOST.get(field, settings.MAX_COUNT),
    )
    for field, (key, default) in _COUNTS.items()
  }
  return values.build(
    T5Config,
    **counts,
    mlp_activations=activations,
    is_tied=is_scaled and is_t5,
    has_layer_relpos=is_umt5,
    dropout_rate=values.number('dropout_rate', 0.0),
    dtype=dtype,
  )


def _check_ids(values: Settings) -> None:
  """Raises ValueError unless decoders start with 0, and padding is 0 or 1."""
  # Rows are padded with 0 here; MADLAD-400 states 1, but was trained with 0.
  values.expect('decoder_start_token_id', 0, ', as T5 has it')
  if values.count('pad_token_id', 0, least=0) > 1:
    values.refuse('pad_token_id', '0, as T5 has it, or 1, as MADLAD-400')


def needed(folder: Path, config: T5Config, tensors: Tensors) -> Needed:
  """Returns the tensors that the network needs, and its parameters."""
  used = {name: file for name, file in tensors.items() if name != _UNUSED}
  wanted = parameters_of(config)
  # Files of T5 1.0 repeat the embeddings up to three times.
  for name in _COPIES:
    used = safetensors_folder.without_copy(folder, used, name, of=_EMBEDDINGS)
  if config.is_tied:
    used = safetensors_folder.without_copy(
      folder,
      used,
      _LOGITS,
      of=_EMBEDDINGS,
      remedy=safetensors_folder.UNTIE,
    )
  if _LOGITS not in used:
    # Tied, but not scaled: our logits have a kernel with the same values.
    wanted = tuple(
      dataclasses.replace(p, name=_EMBEDDINGS) if p.name == _LOGITS else p
      for p in wanted
    )
  return used, wanted


def parameters_of(config: T5Config) -> tuple[Parameter, ...]:
  """Lists every parameter by Hugging Face's name; ValueError for no such T5."""
  if not config.num_encoder_layers:
    raise ValueError('Hugging Face has no T5 without an encoder')
  if config.has_layer_relpos and config.is_tied:
    raise ValueError('Hugging Face has no T5 with has_layer_relpos and is_tied')
  _projection_of(config)
  return parameters.of(config, _name_of)


def _name_of(path: str) -> str:
  branch = path.rpartition('/')[0]
  if branch in _NAMES:
    return f'{_NAMES[branch]}.weight'
  # `decoder/layers_2/self_attention/query` is `decoder.block.2.layer.0.
  # SelfAttention.q`.
  stack, part, *keys = branch.split('/')
  if part == 'relpos_bias':  # A shared table is stored in the first layer.
    part, keys = 'layers_0', [part]
  number = part.removeprefix('layers_')
  names = [_IN_LAYER[stack][keys[0]], *(_ATTENTION.get(k, k) for k in keys[1:])]
  return f'{stack}.block.{number}.{".".join(names)}.weight'


def _projection_of(config: T5Config) -> str:
  """Returns transformers' name for the activations of feed-forward layers."""
  for projection, (activations, _) in _PROJECTIONS.items():
    if activations == config.mlp_activations:
      return projection
  raise ValueError(f'Hugging Face has no T5 with {config.mlp_activations}')


def config_json(config: T5Config, dtype: str) -> Json:
  """Returns the keys of a model's config.json."""
  model_type = 'umt5' if config.has_layer_relpos else 't5'
  return {
    'architectures': [f'{model_type.upper()}ForConditionalGeneration'],
    'model_type': model_type,
    'torch_dtype': dtype,
    **{key: getattr(config, field) for field, (key, _) in _COUNTS.items()},
    'dropout_rate': config.dropout_rate,
    'layer_norm_epsilon': _EPSILON,
    'feed_forward_proj': _projection_of(config),
    'is_encoder_decoder': True,
    'scale_decoder_outputs': config.is_tied,
    'tie_word_embeddings': config.is_tied,
    'pad_token_id': 0,
    'eos_token_id': 1,
    'decoder_start_token_id': 0,
  }
