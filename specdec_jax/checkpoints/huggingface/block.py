"""Block drafters in the spellings in which they are published.

DFlash's authors (z-lab) state what is their own in `dflash_config`; the package
speculators writes DFlash and DSpark with the sizes of their layers in
`transformer_layer_config`. All layers are Qwen3's. Token embeddings and the
projection to logits are the target's: neither trains them, and copies of them
in older files are not read.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import parameters
from specdec_jax.checkpoints.huggingface import eagle, llama
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.safetensors_folder import Needed, Tensors
from specdec_jax.files import settings
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models import attention
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig
from specdec_jax.models.products import Weights

MODEL_TYPES: tuple[str, ...] = ()  # See `is_block_drafter`.
WITHOUT_EFFECT = eagle.WITHOUT_EFFECT
_DFLASH, _DSPARK = 'dflash', 'dspark'
# By `speculators_model_type`, what the two releases of speculators write.
_ARCHITECTURES = {
  _DFLASH: ('DFlashDraftModel', 'DFlashSpeculator'),
  _DSPARK: ('DSparkDraftModel', 'DSparkSpeculator'),
}
_NESTED, _INNER = 'dflash_config', 'transformer_layer_config'
# By the names of our branches.
_NAMES = {
  'features_dense': 'fc',
  'context_norm': 'hidden_norm',
  'decoder_norm': 'norm',
  'pre_attention_layer_norm': 'input_layernorm',
  'attention/query': 'self_attn.q_proj',
  'attention/key': 'self_attn.k_proj',
  'attention/value': 'self_attn.v_proj',
  'attention/query_norm': 'self_attn.q_norm',
  'attention/key_norm': 'self_attn.k_norm',
  'attention/out': 'self_attn.o_proj',
  'pre_mlp_layer_norm': 'post_attention_layernorm',
  'mlp/wi_0': 'mlp.gate_proj',
  'mlp/wi_1': 'mlp.up_proj',
  'mlp/wo': 'mlp.down_proj',
  'markov_embedder': 'markov_head.markov_w1',
  'markov_dense': 'markov_head.markov_w2',
  'markov_gate': 'markov_head.gate_proj',
  'markov_step': 'markov_head.joint_proj',
  'confidence_dense': 'confidence_head.proj',
}
_LAYER = 'layers.{}'
_IDS, _OFFSETS, _IS_DRAFTED = 'target_ids', 'd2t', 't2d'
# Copies of the target's weights, and of what `d2t` says.
_OF_TARGET = frozenset((
  'embed_tokens.weight', 'lm_head.weight', 'verifier_lm_head.weight',
  'verifier_norm.weight', _IS_DRAFTED,
))  # fmt: skip


def is_block_drafter(values: Settings) -> bool:
  """Tells whether config.json is that of a block drafter."""
  architectures = values.texts('architectures', [])
  of_speculators = values.text('speculators_model_type', '')
  return (
    any('DFlash' in name or 'DSpark' in name for name in architectures)
    or values.has(_NESTED)
    or of_speculators.startswith((_DFLASH, _DSPARK))
  )


def read_config(values: Settings, dtype: jnp.dtype) -> BlockDrafterConfig:
  """Returns the sizes that config.json states; ValueError for what
  `models.drafting.block_drafter` does not compute."""
  if values.has('speculators_model_type'):
    return _read_speculators(values, dtype)
  return _read_authors(values, dtype)


def _read_authors(values: Settings, dtype: jnp.dtype) -> BlockDrafterConfig:
  """Reads DFlash's config.json as its authors write it."""
  _check_architectures(values, _ARCHITECTURES[_DFLASH][:1])
  values.expect('model_type', 'qwen3')
  nested = values.at(_NESTED)
  # `is_causal` is not the flag of transformers, which is always true.
  layer_values = dict(values.values)
  layer_values.pop('is_causal', None)
  layers = dataclasses.replace(values, values=layer_values)
  sizes = _read_layers(layers, 'qwen3', {})
  has_causal_windows = not values.has('is_causal')
  is_causal = values.flag('is_causal', False)
  block_size = _where(nested, values, 'block_size').count('block_size', 16)
  # A window also ends after its slot, beyond the end of the block.
  window = max(sizes['windows'], default=0)
  if 0 < window < block_size and not (is_causal or has_causal_windows):
    values.refuse('sliding_window', f'at least the block size, {block_size}')
  mask = _where(nested, values, 'mask_token_id').count('mask_token_id', least=0)
  return values.build(
    BlockDrafterConfig,
    **sizes,
    draft_vocab_size=sizes['vocab_size'],
    block_size=block_size,
    mask_token_id=mask,
    sample_from_anchor=False,
    feature_layers=_layers_by_output(nested, values),
    is_causal=is_causal,
    has_causal_windows=has_causal_windows,
    dtype=dtype,
  )


def _layers_by_output(nested: Settings, values: Settings) -> tuple[int, ...]:
  """Reads the layers of which streams are read, by their inputs."""
  # The output of layer 1 is the input of layer 2.
  key = 'target_layer_ids'
  place = _where(nested, values, key)
  layers = [i + 1 for i in place.counts(key)]
  number = values.count('num_target_layers', settings.MAX_LAYERS + 1)
  if max(layers, default=0) >= number:
    # transformers gives the output of the last layer after its last norm.
    place.refuse(key, f'layers before the last, {number - 1}')
  return tuple(layers)


def _where(nested: Settings, values: Settings, key: str) -> Settings:
  """Returns which of both sections states a key, the first if both do; raises
  ValueError if they differ."""
  if not nested.has(key):
    return values
  if values.has(key) and values.values[key] != nested.values[key]:
    values.refuse(key, f'{nested.values[key]}, as {nested.section}{key}')
  # `refuse_others` looks for both.
  values.asked.add(key)
  return nested


def _read_speculators(values: Settings, dtype: jnp.dtype) -> BlockDrafterConfig:
  """Reads the config.json of a DFlash or DSpark of speculators."""
  algorithm = values.text('speculators_model_type')
  if algorithm not in _ARCHITECTURES:
    values.refuse('speculators_model_type', ' or '.join(_ARCHITECTURES))
  values.at('speculators_config').expect('algorithm', algorithm)
  _check_architectures(values, _ARCHITECTURES[algorithm])
  inner = values.at(_INNER)
  model_type = inner.text('model_type', 'qwen3')
  if model_type not in eagle.DEFAULTS:
    inner.refuse('model_type', ' or '.join(eagle.DEFAULTS))
  sizes = _read_layers(inner, model_type, eagle.DEFAULTS[model_type])
  values.expect('target_hidden_size', sizes['embed_dim'])
  values.flag('tie_word_embeddings', False)
  is_dspark = algorithm == _DSPARK
  config: BlockDrafterConfig = values.build(
    BlockDrafterConfig,
    **sizes,
    draft_vocab_size=values.count('draft_vocab_size', 32_000),
    block_size=values.count('block_size', 8),
    mask_token_id=values.count('mask_token_id', least=0),
    sample_from_anchor=values.flag('sample_from_anchor', is_dspark),
    feature_layers=tuple(values.counts('aux_hidden_state_layer_ids')),
    has_causal_windows=not values.flag('sliding_window_non_causal', False),
    window_from_anchor=True,
    **(_read_heads(values) if is_dspark else {}),
    dtype=dtype,
  )
  if config.state_size and not config.sample_from_anchor:
    # There the state also passes through the anchor's slot.
    values.refuse('sample_from_anchor', 'true, with an rnn as Markov head')
  return config


def _read_heads(values: Settings) -> Json:
  """Reads the heads of DSpark."""
  rank = values.count('markov_rank', 256, least=0)
  has_confidence = values.flag('enable_confidence_head', True)
  reads_tokens = values.flag('confidence_head_with_markov', True)
  if has_confidence and reads_tokens != (rank > 0):
    values.refuse(
      'confidence_head_with_markov', 'true, or false without a Markov head'
    )
  return {
    'markov_rank': rank,
    'markov_head': values.text('markov_head_type', 'vanilla'),
    'has_confidence': has_confidence,
  }


def _check_architectures(values: Settings, allowed: Collection[str]) -> None:
  named = values.texts('architectures', [])
  if set(named) - set(allowed):
    values.refuse('architectures', f'one of {", ".join(allowed)}')


def _read_layers(
  values: Settings, model_type: str, defaults: dict[str, int]
) -> Json:
  """Reads the sizes of the drafter's layers, which are Qwen3's."""
  llama.check_supported(values, model_type)
  values.flag('tie_word_embeddings', False)
  sizes = llama.counts(values, {'max_position_embeddings': 2048} | defaults)
  key = 'num_hidden_layers'
  num_layers = values.count(key, defaults.get(key), most=settings.MAX_LAYERS)
  windows = llama.windows(
    values, model_type, num_layers, sizes['max_positions']
  )
  types = values.texts('layer_types', [])
  if llama.SLIDING in types and not windows:
    # Layers may differ in what their blocks see, whatever the window.
    values.refuse('sliding_window', 'less than max_position_embeddings')
  return sizes | {
    'num_layers': num_layers,
    'windows': windows,
    'rope_base': llama.rope_base(values),
    'rope_scaling': llama.rope_scaling(values),
    'norm_epsilon': values.positive('rms_norm_eps', 1e-6),
    'has_qk_norm': True,
  }


def needed(
  folder: Path, config: BlockDrafterConfig, tensors: Tensors
) -> Needed:
  """Returns the tensors of a folder that the network needs, and its parameters;
  raises ValueError if the folder does not state which tokens are drafted."""
  wanted = parameters.of(config, _name_of)
  ignored = _OF_TARGET
  if _is_whole(config):
    ignored = ignored | {_OFFSETS}
    wanted = tuple(p for p in wanted if p.path != _IDS)
  elif _OFFSETS not in tensors:
    raise ValueError(f'{folder} has no tensor {_OFFSETS} of what is drafted')
  used = {
    name: tensors[name]
    for name in tensors
    if name not in ignored and not name.endswith('.inv_freq')
  }
  return used, wanted


def _name_of(path: str) -> str:
  return _OFFSETS if path == _IDS else parameters.renamed(path, _NAMES, _LAYER)


# A file's offsets, if any, are converted to ids.
from_file = eagle.from_file


def to_file(config: BlockDrafterConfig, params: Weights) -> Weights:
  """Reverses `from_file`, with drafted tokens in ascending order, in which
  speculators takes the rows of its target's projection."""
  # Logits [a, b, c] of the tokens [2, 0, 1] become [b, c, a].
  ids = np.asarray(params[_IDS], np.int64)
  order = np.argsort(ids)
  written = dict(params)
  if config.markov_rank:
    kernel = np.asarray(params['markov_dense']['kernel'])
    written['markov_dense'] = {'kernel': kernel[:, order]}
  # `t2d`, by token of the target, says whether it can be drafted.
  is_drafted = np.zeros(config.vocab_size, bool)
  is_drafted[ids] = True
  offsets = ids[order] - np.arange(config.draft_vocab_size)
  return written | {_IDS: offsets, _IS_DRAFTED: is_drafted}


def parameters_of(config: BlockDrafterConfig) -> tuple[Parameter, ...]:
  """Returns what `to_file` gives, by the names of speculators."""
  # `config_json` refuses a network with other parameters, in clear words.
  config_json(config, '')
  written = parameters.of(config, _name_of)
  if _is_whole(config):
    return tuple(p for p in written if p.path != _IDS)
  shape, dtype = (config.vocab_size,), np.dtype(np.int32)
  is_drafted = Parameter(_IS_DRAFTED, _IS_DRAFTED, shape, dtype=dtype)
  return (*written, is_drafted)


def _is_whole(config: BlockDrafterConfig) -> bool:
  """Tells whether every token can be drafted."""
  return config.draft_vocab_size == config.vocab_size


def config_json(config: BlockDrafterConfig, dtype: str) -> Json:
  """Makes a config.json of speculators: DSpark's if there is a head, or else
  DFlash's; ValueError if speculators has no such network."""
  _check_writable(config)
  has_heads = config.markov_rank > 0 or config.has_confidence
  algorithm = _DSPARK if has_heads else _DFLASH
  model_type = 'qwen3'
  stated = {
    'architectures': [_ARCHITECTURES[algorithm][0]],
    'torch_dtype': dtype,
    'speculators_model_type': algorithm,
    'speculators_config': {
      'algorithm': algorithm,
      'default_proposal_method': 'greedy',
      'proposal_methods': [
        {'proposal_type': 'greedy', 'speculative_tokens': config.num_drafts}
      ],
      'verifier': {'name_or_path': None, 'architectures': []},
    },
    _INNER: {
      'model_type': model_type,
      **llama.sizes_json(config, config.num_layers),
      **llama.windows_json(config, model_type),
    },
    'draft_vocab_size': config.draft_vocab_size,
    'block_size': config.block_size,
    'mask_token_id': config.mask_token_id,
    'sample_from_anchor': config.sample_from_anchor,
    'aux_hidden_state_layer_ids': list(config.feature_layers),
    'sliding_window_non_causal': not config.has_causal_windows,
    'tie_word_embeddings': False,
  }
  if not has_heads:
    return stated
  return stated | {
    'markov_rank': config.markov_rank,
    'markov_head_type': config.markov_head,
    'enable_confidence_head': config.has_confidence,
    'confidence_head_with_markov': config.markov_rank > 0,
  }


def _check_writable(config: BlockDrafterConfig) -> None:
  """Raises ValueError unless speculators has such a network."""
  has_windows = any(attention.layer_windows(config))
  unlike = {
    'cross_layers': bool(config.cross_layers),
    'feature_norms': config.feature_norms,
    'a mask_embedding (mask_token_id is null)': config.mask_token_id is None,
    'no has_qk_norm': not config.has_qk_norm,
    'mlp_activations': config.mlp_activations != ('silu', 'linear'),
    'is_causal': config.is_causal,
    'windows that end at a slot': has_windows and not config.window_from_anchor,
    'an rnn behind the anchor': (
      config.state_size > 0 and not config.sample_from_anchor
    ),
  }
  names = [name for name, is_other in unlike.items() if is_other]
  if names:
    raise ValueError(
      f'speculators has no block drafter with {", ".join(names)}: convert it '
      'to safetensors'
    )
