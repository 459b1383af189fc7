"""Llama, Mistral and Qwen2: the networks that `models.llama` computes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec_jax.checkpoints import parameters, settings
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.models.llama import LlamaConfig

MODEL_TYPES = ('llama', 'mistral', 'qwen2')
# Of our branches; those of layer N are below `model.layers.N`.
_NAMES = {
  'token_embedder': 'model.embed_tokens',
  'decoder_norm': 'model.norm',
  'logits_dense': 'lm_head',
  'pre_self_attention_layer_norm': 'input_layernorm',
  'self_attention/query': 'self_attn.q_proj',
  'self_attention/key': 'self_attn.k_proj',
  'self_attention/value': 'self_attn.v_proj',
  'self_attention/out': 'self_attn.o_proj',
  'pre_mlp_layer_norm': 'post_attention_layernorm',
  'mlp/wi_0': 'mlp.gate_proj',
  'mlp/wi_1': 'mlp.up_proj',
  'mlp/wo': 'mlp.down_proj',
}
# What `models.llama` does not compute: the value that it needs, and the reason.
_FLAGS = {
  'attention_bias': (False, 'its attention has biases'),
  'mlp_bias': (False, 'its feed-forward layers have biases'),
  'rope_interleaved': (
    False,
    'its rotary positions pair neighbouring dimensions',
  ),
  'is_encoder_decoder': (False, 'it is an encoder-decoder'),
  'add_cross_attention': (False, 'it attends to an encoder'),
  'is_causal': (True, 'its attention looks both ways'),
}


def read_config(values: Settings, dtype: Any) -> LlamaConfig:
  """The sizes that config.json states.

  Llama, Mistral and Qwen2 are one network: Mistral without its sliding window
  is Llama, Qwen2 has biases on queries, keys and values. Raises ValueError for
  features that `models.llama` does not compute.
  """
  kind = values.text('model_type')
  for reason in _unsupported(values):
    raise ValueError(
      f'{values.path} describes a {kind} not supported: {reason}'
    )
  num_heads = values.count('num_attention_heads')
  embed_dim = values.count('hidden_size')
  rope = _rope(values, 'rope_theta', is_spread=True)
  return values.build(
    LlamaConfig,
    vocab_size=values.count('vocab_size'),
    embed_dim=embed_dim,
    num_layers=values.count('num_hidden_layers', most=settings.MAX_LAYERS),
    num_heads=num_heads,
    num_kv_heads=values.count('num_key_value_heads', num_heads),
    head_dim=values.count('head_dim', embed_dim // num_heads),
    mlp_dim=values.count('intermediate_size'),
    rope_base=rope.number('rope_theta', 10_000.0),
    norm_epsilon=values.number('rms_norm_eps', 1e-6),
    max_positions=values.count('max_position_embeddings'),
    is_tied=values.flag('tie_word_embeddings', False),
    has_attention_bias=kind == 'qwen2',
    dtype=dtype,
  )


def _rope(values: Settings, key: str, *, is_spread: bool = False) -> Settings:
  """Where a rotary setting is: transformers 4 has some at the top of the file,
  transformers 5 all in rope_parameters."""
  places = [values.at('rope_parameters'), values.at('rope_scaling')]
  if is_spread:
    places.append(values)
  return next((place for place in places if place.has(key)), places[-1])


def _unsupported(values: Settings) -> Iterator[str]:
  """Reasons why the network would not be computed as it was trained."""
  kind = values.text('model_type')
  # A factor without a type is a mistake, or scales in an early version.
  is_scaled = _rope(values, 'factor').number('factor', 1.0) != 1.0
  scaling = 'by a factor' if is_scaled else 'default'
  for key in ('type', 'rope_type'):
    scaling = _rope(values, key).text(key, scaling)
  if scaling != 'default':
    yield f'its rotary positions are scaled ({scaling})'
  key = 'partial_rotary_factor'
  if _rope(values, key, is_spread=True).number(key, 1.0) != 1.0:
    yield 'its rotary positions turn a part of each head'
  activation = values.text('hidden_act', 'silu')
  if activation != 'silu':
    yield f'its activation is {activation}, expected silu'
  for key, (expected, reason) in _FLAGS.items():
    # Qwen2 has biases whatever this says, and Mistral none.
    is_ignored = key == 'attention_bias' and kind != 'llama'
    if values.flag(key, expected) != expected and not is_ignored:
      yield reason
  has_window = kind != 'qwen2' or values.flag('use_sliding_window', False)
  if has_window and values.has('sliding_window'):
    window = values.count('sliding_window')
    max_positions = values.count('max_position_embeddings')
    if window < max_positions:
      yield f'its attention slides over {window} of {max_positions} positions'
  if others := set(values.texts('layer_types', [])) - {'full_attention'}:
    yield f'it has layers of {", ".join(sorted(others))}'


def needed(
  folder: Path, config: LlamaConfig, tensors: dict[str, Any]
) -> tuple[dict[str, Any], tuple[Parameter, ...]]:
  """The tensors of a folder that the network needs, and its parameters."""
  copy = 'lm_head.weight' if config.is_tied else ''
  kept = {
    name: tensor
    for name, tensor in tensors.items()
    if not (name.endswith('.inv_freq') or name == copy)
  }
  return kept, parameters_of(config)


def parameters_of(config: LlamaConfig) -> tuple[Parameter, ...]:
  """Every parameter of a model of these sizes, by Hugging Face's name."""
  name_of = lambda path: parameters.renamed(path, _NAMES, 'model.layers.{}')
  return parameters.of(config, name_of)


def config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
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
