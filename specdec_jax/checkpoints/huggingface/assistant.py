"""Assistants of Gemma 4: the networks of `models.drafting.assistant`.

Keys and defaults are those of transformers 5.24.
"""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from specdec_jax.checkpoints import parameters, safetensors_folder
from specdec_jax.checkpoints.huggingface import gemma4
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.safetensors_folder import Needed, Tensors
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models.drafting.assistant import AssistantConfig

_ASSISTANT, _UNIFIED = 'gemma4_assistant', 'gemma4_unified_assistant'
MODEL_TYPES: tuple[str, ...] = (_ASSISTANT, _UNIFIED)
# Files without clusters state their numbers as well.
WITHOUT_EFFECT = gemma4.WITHOUT_EFFECT | frozenset((
  'num_centroids', 'centroid_intermediate_top_k',
))  # fmt: skip
# By the names of our branches; those of layer N are below `model.layers.N`.
_NAMES = gemma4.NAMES | {
  'input_dense': 'pre_projection',
  'hidden_dense': 'post_projection',
  'clusters_dense': 'masked_embedding.centroids',
}
_IDS, _IDS_IN_FILE = 'token_ids', 'masked_embedding.token_ordering'
# Defaults of transformers.
_TARGET_WIDTHS = {_ASSISTANT: 1536, _UNIFIED: 3840}
_NUM_CLUSTERS, _NUM_CHOSEN = 2048, 32


def read_config(values: Settings, dtype: jnp.dtype) -> AssistantConfig:
  """Returns the config of a config.json; ValueError for features that
  `models.drafting.assistant` lacks."""
  text = values.at('text_config')
  for place in (values, text):
    place.expect('tie_word_embeddings', True, ', as Gemmas are')
  text.expect('hidden_size_per_layer_input', 0)
  text.expect('vocab_size_per_layer_input', 0)
  text.expect('use_double_wide_mlp', False)
  num_layers = text.count('num_hidden_layers')
  shared = text.count('num_kv_shared_layers', num_layers, least=0)
  if shared not in (0, num_layers):
    text.refuse('num_kv_shared_layers', f'{num_layers}, all layers')
  target_width = _TARGET_WIDTHS[values.text('model_type')]
  num_clusters = num_chosen = 0
  if values.flag('use_ordered_embeddings', False):
    num_clusters = values.count('num_centroids', _NUM_CLUSTERS)
    num_chosen = values.count('centroid_intermediate_top_k', _NUM_CHOSEN)
  fields = {field.name for field in dataclasses.fields(AssistantConfig)}
  # Its logits have no softcap, even if text_config has one.
  sizes = gemma4.sizes_of(text)
  return values.build(
    AssistantConfig,
    **{name: size for name, size in sizes.items() if name in fields},
    target_embed_dim=values.count('backbone_hidden_size', target_width),
    num_clusters=num_clusters,
    num_chosen_clusters=num_chosen,
    dtype=dtype,
  )


def needed(folder: Path, config: AssistantConfig, tensors: Tensors) -> Needed:
  """Returns the tensors that the network needs, and its parameters."""
  wanted = parameters_of(config)
  tensors = safetensors_folder.without_copy(
    folder, tensors, 'lm_head.weight', of='model.embed_tokens.weight'
  )
  unused = gemma4.tensors_of_keys(range(config.num_layers))
  if not config.num_clusters:
    unused += ('masked_embedding.',)
  used = {
    name: file for name, file in tensors.items() if not name.startswith(unused)
  }
  return used, wanted


def parameters_of(config: AssistantConfig) -> tuple[Parameter, ...]:
  """Lists every parameter of a network of these sizes, by its name in files."""
  return parameters.of(config, _name_of)


def _name_of(path: str) -> str:
  return _IDS_IN_FILE if path == _IDS else gemma4.name_of(path, _NAMES)


def config_json(config: AssistantConfig, dtype: str) -> Json:
  """Returns a config.json; ValueError if transformers lacks the network."""
  text = gemma4.sizes_json(config.layers())
  has_clusters = config.num_clusters > 0
  config_values: Json = {
    'architectures': ['Gemma4AssistantForCausalLM'],
    'model_type': _ASSISTANT,
    'torch_dtype': dtype,
    'backbone_hidden_size': config.target_embed_dim,
    'use_ordered_embeddings': has_clusters,
    'num_centroids': config.num_clusters or _NUM_CLUSTERS,
    'centroid_intermediate_top_k': config.num_chosen_clusters or _NUM_CHOSEN,
    'tie_word_embeddings': True,
    'text_config': {
      'model_type': 'gemma4_text',
      **text,
      'num_kv_shared_layers': config.num_layers,
      'tie_word_embeddings': True,
    },
  }
  values = Settings(path=_ASSISTANT, values=config_values)
  gemma4.check_written(config, read_config(values, config.dtype))
  return config_values
