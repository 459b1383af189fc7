"""EAGLE-3 drafters in the formats in which they are published.

SafeAILab, SpecForge, SGLang and ModelOpt call the layer `midlayer`; the package
speculators calls it `layers.0` and has its sizes in `transformer_layer_config`;
NVIDIA NeMo calls it `model.layers.0`.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import parameters, safetensors_folder
from specdec_jax.checkpoints.huggingface import llama
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.safetensors_folder import Needed, Tensors
from specdec_jax.files.paths import user_path
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.products import Weights

MODEL_TYPES: tuple[str, ...] = ()  # See `is_eagle`.
WITHOUT_EFFECT = frozenset((
  'attn_implementation', 'target_model_type', 'embed_requires_grad',
  'speculators_version', 'proposal_methods', 'default_proposal_method',
  'verifier', 'auto_map', 'has_no_defaults_at_init', 'base_model_ep_plan',
))  # fmt: skip
_SPECFORGE, _NEMO = 'LlamaForCausalLMEagle3', 'LlamaEagle3DraftModel'
_SPECULATORS = 'Eagle3DraftModel'
_ARCHITECTURES = (
  _SPECFORGE,
  'Eagle3LlamaForCausalLM',  # vLLM's name for both.
  _SPECULATORS,
  'Eagle3Speculator',  # Of its first releases.
  _NEMO,
)
_LAYER, _LAYER_OF_SPECULATORS = 'midlayer.', 'layers.0.'
# SafeAILab's names, by those of our branches.
_NAMES = {ours: _LAYER + theirs for ours, theirs in llama.NAMES.items()} | {
  'token_embedder': 'embed_tokens',
  'features_norm': 'input_norm',
  'features_dense': 'fc',
  'embedding_layer_norm': f'{_LAYER}input_layernorm',
  'hidden_layer_norm': f'{_LAYER}hidden_norm',
  'decoder_norm': 'norm',
  'logits_dense': 'lm_head',
}
_FEATURE_NORM = 'feature_norms_'
_IDS, _OFFSETS, _IS_DRAFTED = 'target_ids', 'd2t', 't2d'
_EMBEDDINGS, _LOGITS = 'embed_tokens.weight', 'lm_head.weight'
_LAST_NORM = 'norm.weight'
# The values that `models.drafting.eagle` computes with.
_FLAGS = {
  'bias': False,
  'parallel_drafting': False,
  'use_aux_hidden_state': True,
  'use_input_layernorm_in_first_layer': True,
  'use_last_layernorm': True,
  'use_mtp_layernorm': False,
  'next_layer_regular': True,
  'use_sliding_window': False,
}
_NESTED, _LAYER_IDS = 'eagle_config', 'eagle_aux_hidden_state_layer_ids'
_NUM_USUAL_FEATURES = 3
# Defaults of transformers, which files of speculators leave out.
_LLAMA_DEFAULTS = {
  'vocab_size': 32_000,
  'hidden_size': 4096,
  'intermediate_size': 11_008,
  'num_hidden_layers': 32,
  'num_attention_heads': 32,
  'max_position_embeddings': 2048,
}
_QWEN3_DEFAULTS = {
  'vocab_size': 151_936,
  'intermediate_size': 22_016,
  'num_key_value_heads': 32,
  'head_dim': 128,
  'max_position_embeddings': 32_768,
}
DEFAULTS = {
  'llama': _LLAMA_DEFAULTS,
  'qwen3': _LLAMA_DEFAULTS | _QWEN3_DEFAULTS,
}


def is_eagle(values: Settings) -> bool:
  """Tells whether config.json is that of an EAGLE-3 drafter."""
  # SafeAILab's files state the architecture of a Llama, and have the last key.
  return (
    any('Eagle3' in name for name in values.texts('architectures', []))
    or values.has('speculators_model_type')
    or values.has('draft_vocab_size')
  )


def read_config(values: Settings, dtype: jnp.dtype) -> EagleConfig:
  """Returns the config of a config.json and the tensors' names; ValueError for
  features that `models.drafting.eagle` lacks."""
  # speculators has the layer's sizes in an inner object.
  is_nested = values.has('speculators_model_type')
  inner = values.at('transformer_layer_config') if is_nested else values
  # In the other formats `model_type` is the target's: the layer is a Llama's.
  stated_type = inner.text('model_type', None if is_nested else 'llama')
  model_type = stated_type if is_nested else 'llama'
  if model_type not in DEFAULTS:
    inner.refuse('model_type', ' or '.join(DEFAULTS))
  _check_supported(values, inner, model_type)
  folder = user_path(values.path).parent
  names = safetensors_folder.open_tensors(folder)
  defaults = DEFAULTS[model_type] if is_nested else {}
  sizes = llama.counts(inner, {'max_position_embeddings': 2048} | defaults)
  return values.build(
    EagleConfig,
    **sizes,
    draft_vocab_size=values.count('draft_vocab_size', sizes['vocab_size']),
    target_embed_dim=values.count('target_hidden_size', sizes['embed_dim']),
    feature_layers=_feature_layers(values),
    rope_base=llama.rope_base(inner),
    rope_scaling=llama.rope_scaling(inner),
    norm_epsilon=inner.positive('rms_norm_eps', 1e-6),
    has_qk_norm=model_type == 'qwen3',
    norm_before_residual=values.flag('norm_before_residual', False),
    norm_before_fc=values.flag('norm_before_fc', False),
    fc_norm=values.flag('fc_norm', False),
    has_embedding=_EMBEDDINGS in map(_usual_name, names),
    **_last_norm(values, names),
    dtype=dtype,
  )


def _check_supported(
  values: Settings, inner: Settings, model_type: str
) -> None:
  """Raises ValueError for settings of features that the network lacks."""
  values.expect('speculators_model_type', 'eagle3')
  values.at('speculators_config').expect('algorithm', 'eagle3')
  architectures = values.texts('architectures', [])
  named = {name for name in architectures if 'Eagle3' in name}
  if named - set(_ARCHITECTURES):
    values.refuse('architectures', f'one of {", ".join(_ARCHITECTURES)}')
  llama.check_supported(inner, model_type)
  nested = values.at(_NESTED)
  values.flag('tie_word_embeddings', False)
  inner.flag('tie_word_embeddings', False)
  for place in (values, nested, inner):
    for key, expected in _FLAGS.items():
      place.expect(key, expected)
  # Sizes of parallel heads, of which the drafter has none.
  nested.count('parallel_draft_heads_num_layers', 0, least=0)
  nested.expect('parallel_draft_step', 1)
  # NeMo states the target's number of layers; its drafter has one.
  inner.count('num_hidden_layers', 1)
  if _NEMO not in named:
    inner.expect('num_hidden_layers', 1)
  inner.count('max_window_layers', 0, least=0)
  window = inner.count('sliding_window', 0, least=0)
  if window and not inner.has('use_sliding_window'):
    inner.refuse('sliding_window', 'null, or use_sliding_window as false')
  if set(inner.texts('layer_types', [])) - {'full_attention'}:
    inner.refuse('layer_types', 'full_attention alone')


def _feature_layers(values: Settings) -> tuple[int, ...]:
  """Reads the layers whose inputs are features; empty for the usual three."""
  # SGLang's `eagle_config` states the layers by their outputs, and the output
  # of layer N is the input of layer N + 1; vLLM's top-level key states the
  # inputs.
  nested = values.at(_NESTED)
  layers = [i + 1 for i in nested.counts(_LAYER_IDS, [])]
  by_input = values.counts(_LAYER_IDS, layers)
  if layers and by_input != layers:
    values.refuse(_LAYER_IDS, f'{layers}, 1 more than {nested.section}...')
  number = len(by_input) or _NUM_USUAL_FEATURES
  values.expect('num_aux_hidden_states', number)
  return tuple(by_input)


def _last_norm(values: Settings, names: Collection[str]) -> dict[str, bool]:
  """Reads `norm_output`, whose meaning depends on the writer of the file."""
  # In SpecForge, where it defaults to true, a norm before the logits; in vLLM,
  # that the normed state is fed back.
  if any(name.startswith(_LAYER) for name in names):
    return {'norm_before_logits': values.flag('norm_output', True)}
  return {'norm_before_next': values.flag('norm_output', False)}


def _usual_name(name: str) -> str:
  """Returns SafeAILab's name for a tensor of any format."""
  name = name.removeprefix('model.')
  if name.startswith(_LAYER_OF_SPECULATORS):
    return _LAYER + name.removeprefix(_LAYER_OF_SPECULATORS)
  return name


def needed(folder: Path, config: EagleConfig, tensors: Tensors) -> Needed:
  """Returns the tensors of a folder that the network needs, and its parameters;
  ValueError if some are to be taken from the target."""
  # Names in the file, by SafeAILab's names.
  file_names: dict[str, str] = {}
  for name in tensors:
    usual = _usual_name(name)
    is_unused = usual == _LAST_NORM and not config.norm_before_logits
    if is_unused or usual == _IS_DRAFTED or usual.endswith('.inv_freq'):
      continue
    if usual in file_names:
      raise ValueError(f'{folder} has both {file_names[usual]} and {name}')
    file_names[usual] = name
  wanted = parameters.of(config, _name_of)
  if _OFFSETS not in file_names:
    if not _drafts_all_tokens(config):
      raise ValueError(f'{folder} has no tensor {_OFFSETS}, the drafted tokens')
    wanted = tuple(p for p in wanted if p.path != _IDS)
  if _LOGITS not in file_names:
    if not (_drafts_all_tokens(config) and config.has_embedding):
      raise ValueError(f'{folder} has no {_LOGITS}: copy rows of the target')
    file_names[_LOGITS] = file_names[_EMBEDDINGS]
  used = {name: tensors[name] for name in file_names.values()}
  return used, tuple(
    dataclasses.replace(p, name=file_names.get(p.name, p.name)) for p in wanted
  )


def _name_of(path: str) -> str:
  if path == _IDS:
    return _OFFSETS
  branch = path.rpartition('/')[0]
  if branch.startswith(_FEATURE_NORM):
    return f'fc_norm.{branch.removeprefix(_FEATURE_NORM)}.weight'
  return f'{_NAMES[branch]}.weight'


def from_file(config: EagleConfig, params: Weights) -> Weights:
  """Converts a file's offsets, if any, to ids: `target_ids[i] = i + d2t[i]`."""
  # Offsets [0, 0, 3] are the ids [0, 1, 5].
  ids = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
  return params | {_IDS: ids + params.get(_IDS, 0)}


def to_file(config: EagleConfig, params: Weights) -> Weights:
  """Reverses `from_file`, and adds `t2d`, which marks the target's tokens that
  can be drafted; for a full vocabulary, sorts the logits by token instead."""
  # With a full vocabulary, in the order [2, 0, 1] say, the columns of the
  # logits are sorted, since readers then expect no ids.
  ids = np.asarray(params[_IDS], np.int64)
  if _drafts_all_tokens(config):
    kernel = np.asarray(params['logits_dense']['kernel'])
    in_order = {'kernel': kernel[:, np.argsort(ids)]}
    return params | {'logits_dense': in_order}
  # `t2d`, by token of the target, says whether it can be drafted.
  is_drafted = np.zeros(config.vocab_size, bool)
  is_drafted[ids] = True
  offsets = ids - np.arange(config.draft_vocab_size)
  return params | {_IDS: offsets, _IS_DRAFTED: is_drafted}


def parameters_of(config: EagleConfig) -> tuple[Parameter, ...]:
  """Lists the parameters that `to_file` returns, with the names in the format
  of `config_json`."""
  written = parameters.of(config, _name_of)
  if _drafts_all_tokens(config):
    written = tuple(p for p in written if p.path != _IDS)
  else:
    shape, dtype = (config.vocab_size,), np.dtype(np.int32)
    is_drafted = Parameter(_IS_DRAFTED, _IS_DRAFTED, shape, dtype=dtype)
    written = (*written, is_drafted)
  if not _is_of_speculators(config):
    return written
  renamed = lambda name: name.replace(_LAYER, _LAYER_OF_SPECULATORS)
  return tuple(dataclasses.replace(p, name=renamed(p.name)) for p in written)


def _drafts_all_tokens(config: EagleConfig) -> bool:
  """Tells whether every token can be drafted."""
  return config.draft_vocab_size == config.vocab_size


def _is_of_speculators(config: EagleConfig) -> bool:
  """Tells whether only the format of speculators can describe a network."""
  names = ('norm_before_residual', 'norm_before_fc', 'norm_before_next')
  return any(getattr(config, name) for name in (*names, 'has_qk_norm'))


def config_json(config: EagleConfig, dtype: str) -> Json:
  """Returns a config.json for SafeAILab's code, SpecForge and SGLang, or else
  for speculators and vLLM; ValueError if neither has the network."""
  # The network of transformers with the same layer.
  model_type = 'qwen3' if config.has_qk_norm else 'llama'
  sizes = {'model_type': model_type} | llama.sizes_json(config, 1)
  common = {
    'torch_dtype': dtype,
    'draft_vocab_size': config.draft_vocab_size,
    'tie_word_embeddings': False,
  }
  if config.target_embed_dim != config.embed_dim:
    common['target_hidden_size'] = config.target_embed_dim
  if config.fc_norm:
    common['fc_norm'] = True
  if _is_of_speculators(config):
    if not config.norm_before_logits:
      raise ValueError('no format has such norms: convert it to safetensors')
    layers = list(config.feature_layers)
    greedy = {'proposal_type': 'greedy', 'speculative_tokens': 3}
    return {
      **common,
      'architectures': [_SPECULATORS],
      'speculators_model_type': 'eagle3',
      'speculators_config': {
        'algorithm': 'eagle3',
        'default_proposal_method': 'greedy',
        'proposal_methods': [greedy],
        'verifier': {'name_or_path': None, 'architectures': []},
      },
      'norm_before_residual': config.norm_before_residual,
      'norm_before_fc': config.norm_before_fc,
      'norm_output': config.norm_before_next,
      'transformer_layer_config': sizes,
    } | ({_LAYER_IDS: layers} if layers else {})
  if not config.norm_before_logits:
    common['norm_output'] = False
  if config.feature_layers:
    # Input of layer 3 is output of layer 2.
    by_output = [i - 1 for i in config.feature_layers]
    common[_NESTED] = {'use_aux_hidden_state': True, _LAYER_IDS: by_output}
  return {'architectures': [_SPECFORGE], **sizes, **common}
