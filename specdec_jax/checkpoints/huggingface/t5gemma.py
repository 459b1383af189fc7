"""T5Gemma: an encoder and a decoder, each with the config of a Gemma 2."""

from pathlib import Path

import jax.numpy as jnp

from specdec_jax.checkpoints import parameters, safetensors_folder
from specdec_jax.checkpoints.huggingface import gemma
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.safetensors_folder import Needed, Tensors
from specdec_jax.files import settings
from specdec_jax.files.paths import user_path
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models import attention
from specdec_jax.models.gemma import t5gemma
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.gemma.t5gemma import T5GemmaConfig

MODEL_TYPES: tuple[str, ...] = ('t5gemma',)
_EMBEDDINGS = 'model.decoder.embed_tokens.weight'
_LOGITS = 'lm_head.out_proj.weight'
# By the names of our branches in both stacks; layer N's are below `layers.N`.
_NAMES = gemma.NAMES | {
  'token_embedder': 'embed_tokens',
  'encoder_norm': 'norm',
  'decoder_norm': 'norm',
  'pre_self_attention_layer_norm': 'pre_self_attn_layernorm',
  'post_self_attention_layer_norm': 'post_self_attn_layernorm',
  'pre_cross_attention_layer_norm': 'pre_cross_attn_layernorm',
  'encoder_decoder_attention/query': 'cross_attn.q_proj',
  'encoder_decoder_attention/key': 'cross_attn.k_proj',
  'encoder_decoder_attention/value': 'cross_attn.v_proj',
  'encoder_decoder_attention/out': 'cross_attn.o_proj',
  'post_cross_attention_layer_norm': 'post_cross_attn_layernorm',
}
# Keys that only affect training.
WITHOUT_EFFECT = frozenset(
  ('dropout_rate', 'classifier_dropout_rate', 'is_decoder')
)
_START, _PADDING = 2, 0
_STACK = 't5_gemma_module'
# Fields that both stacks share, by the keys that state them.
_SHARED = {
  'vocab_size': 'vocab_size',
  'head_dim': 'head_dim',
  'query_pre_attn_scalar': 'query_pre_attn_scalar',
  'attention_softcap': 'attn_logit_softcapping',
  'rope_base': 'rope_theta',
  'norm_epsilon': 'rms_norm_eps',
  'max_positions': 'max_position_embeddings',
}
_PER_STACK = ('embed_dim', 'num_heads', 'num_kv_heads', 'mlp_dim')


def read_config(values: Settings, dtype: jnp.dtype) -> T5GemmaConfig:
  """Returns the config of a config.json; ValueError if it, or the folder's
  generation_config.json, needs features that `models.gemma.t5gemma` lacks."""
  path = user_path(values.path).with_name('generation_config.json')
  generation = settings.read_if_any(path)
  for place in (values, values.at('encoder'), values.at('decoder'), generation):
    _check_ids(place)
  return _config_of(values, dtype)


def _config_of(values: Settings, dtype: jnp.dtype) -> T5GemmaConfig:
  encoder, decoder = values.at('encoder'), values.at('decoder')
  for stack in (encoder, decoder):
    stack.expect('model_type', _STACK)
  for place in (values, encoder, decoder):
    place.expect('tie_word_embeddings', True, ', as Gemmas are')
  values.expect('is_encoder_decoder', True)
  encoder_fields = gemma.stack_fields(encoder, is_gemma_3=False)
  decoder_fields = gemma.stack_fields(decoder, is_gemma_3=False)
  # Both stacks state these; our network has one value for both.
  for field, key in _SHARED.items():
    if encoder_fields[field] != decoder_fields[field]:
      encoder.refuse(key, f'{decoder_fields[field]}, that of the decoder')
  window = max(decoder_fields['windows'])
  if max(encoder_fields['windows']) != window:
    encoder.refuse('sliding_window', f'{window}, that of the decoder')
  values.expect('vocab_size', decoder_fields['vocab_size'])
  decoder.expect('cross_attention_hidden_size', encoder_fields['embed_dim'])
  config = values.build(
    T5GemmaConfig,
    **{f'encoder_{name}': encoder_fields[name] for name in _PER_STACK},
    **{name: decoder_fields[name] for name in (*_PER_STACK, *_SHARED)},
    num_encoder_layers=encoder_fields['num_layers'],
    num_decoder_layers=decoder_fields['num_layers'],
    windows=max(decoder_fields['windows'], encoder_fields['windows'], key=len),
    logits_softcap=decoder_fields['logits_softcap'],
    dtype=dtype,
  )
  # One pattern of windows has to fit both stacks.
  for stack, fields, name in (
    (encoder, encoder_fields, 'encoder'),
    (decoder, decoder_fields, 'decoder'),
  ):
    stated = attention.layer_windows(values.build(GemmaConfig, **fields))
    if attention.layer_windows(t5gemma.stack(config, name)) != stated:
      stack.refuse('layer_types', 'the order of the other stack')
  return config


def _check_ids(place: Settings) -> None:
  """Raises ValueError unless decoders start with 2, and 0 is padding."""
  place.expect('pad_token_id', _PADDING, ', as T5Gemma has it')
  for key in ('bos_token_id', 'decoder_start_token_id'):
    place.expect(key, _START, ', as T5Gemma has it')


def needed(folder: Path, config: T5GemmaConfig, tensors: Tensors) -> Needed:
  """Returns the tensors that the network needs, and its parameters."""
  used = safetensors_folder.without_copy(
    folder, tensors, _LOGITS, of=_EMBEDDINGS
  )
  return used, parameters_of(config)


def parameters_of(config: T5GemmaConfig) -> tuple[Parameter, ...]:
  """Lists every parameter of a model of these sizes, by Hugging Face's name."""

  def name_of(path: str) -> str:
    # `decoder/layers_0/mlp/wo` is `model.decoder.layers.0.mlp.down_proj`.
    stack, rest = path.split('/', 1)
    return f'model.{stack}.{parameters.renamed(rest, _NAMES, "layers.{}")}'

  return parameters.of(config, name_of)


def config_json(config: T5GemmaConfig, dtype: str) -> Json:
  """Returns a config.json; ValueError if transformers lacks the network."""
  encoder, decoder = (
    {
      'model_type': _STACK,
      'torch_dtype': dtype,
      **gemma.stack_json(stack),
      'rope_theta': stack.rope_base,
    }
    for stack in (
      t5gemma.stack(config, 'encoder'),
      t5gemma.stack(config, 'decoder'),
    )
  )
  decoder['is_decoder'] = True
  decoder['cross_attention_hidden_size'] = config.encoder_embed_dim
  config_values = {
    'architectures': ['T5GemmaForConditionalGeneration'],
    'model_type': 't5gemma',
    'torch_dtype': dtype,
    'encoder': encoder,
    'decoder': decoder,
    'is_encoder_decoder': True,
    'tie_word_embeddings': True,
    'vocab_size': config.vocab_size,
    'pad_token_id': _PADDING,
    'eos_token_id': 1,
    'bos_token_id': _START,
  }
  place = Settings(path='t5gemma', values=config_values)
  gemma.check_written(config, _config_of(place, config.dtype))
  return config_values
