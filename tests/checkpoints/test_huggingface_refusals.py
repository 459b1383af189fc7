"""Hugging Face folders that are incomplete or of another network are refused,
and what is wrong is named."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface, safetensors_folder
from tests.checkpoints.huggingface_folders import (
  LLAMA3,
  change_json,
  load_folder,
  rewrite,
  shard,
)
from tests.checkpoints.tiny_models import make_config, make_params
from tests.edits import edit_files

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')

INDEX = 'model.safetensors.index.json'
NORM = 'model.norm.weight'
NO_JSON = r'config\.json.*no JSON'


DAMAGED = {
  'no tokenizer': ({'tokenizer.json': None}, r'no tokenizer\.json'),
  'no settings': ({'config.json': None}, r'cannot read .*config\.json'),
  'empty settings': ({'config.json': ''}, NO_JSON),
  'half an object': ({'config.json': '{'}, NO_JSON),
  'a list': ({'config.json': '[]'}, NO_JSON),
  'nested too deeply': ({'config.json': '[' * 100_000}, NO_JSON),
  'not UTF-8': ({'config.json': b'\xff'}, NO_JSON),
}


@pytest.mark.parametrize(('edits', 'message'), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused(folder, edits, message):
  edit_files(folder, edits)
  with pytest.raises(ValueError, match=message):
    load_folder(folder)


def _move_norm(contents: bytes) -> str:
  """The index says that the last norm is in the other file."""
  weight_map = json.loads(contents)['weight_map']
  others = set(weight_map.values()) - {weight_map[NORM]}
  return json.dumps({'weight_map': weight_map | {NORM: others.pop()}})


SECOND = 'model-00002-of-00002.safetensors'
DAMAGED_SHARDS = {
  'no second file': ({SECOND: None}, 'lacks model-00002-of-00002'),
  'no index': ({SECOND: None, INDEX: None}, 'no weights'),
  'absent tensor': ({INDEX: _move_norm}, f'lacks .*{NORM}'),
  'no map': ({INDEX: '{}'}, 'no weight_map'),
}


@pytest.mark.parametrize(
  ('edits', 'message'), DAMAGED_SHARDS.values(), ids=DAMAGED_SHARDS
)
def test_damaged_shards_are_refused(folder, edits, message):
  config = huggingface.read_config(folder)
  shard(folder)
  edit_files(folder, edits)
  with pytest.raises(ValueError, match=message):
    huggingface.read_params(folder, config)


@pytest.mark.parametrize(
  ('weight_map', 'message'),
  [
    ({NORM: '../other/model.safetensors'}, "is '../other/"),
    ({NORM: '/etc/passwd'}, r"norm\.weight is '/etc/passwd'"),
    ({NORM: 5}, r'weight_map\.model\.norm\.weight is 5'),
    ({NORM: ['a']}, r"is \['a'\]"),
    ({NORM: 'a' * 300}, 'lacks aaaa'),
    ({NORM: '\0'}, 'lacks \0'),
    ('all', "weight_map is 'all'"),
  ],
)
def test_an_index_stays_in_its_folder(folder, weight_map, message):
  other = folder.parent / 'other'
  other.mkdir(exist_ok=True)
  (folder / 'model.safetensors').rename(other / 'model.safetensors')
  change_json(folder / INDEX, weight_map=weight_map)
  with pytest.raises(ValueError, match=message):
    safetensors_folder.open_tensors(folder)


NAME = 'model.layers.1.mlp.up_proj.weight'
Q_NORM = 'model.layers.0.self_attn.q_norm.weight'
BAD_TENSORS = {
  'missing': (lambda t: t.pop(NAME), f'lacks .*{NAME}'),
  'a row less': (
    lambda t: t.update({NAME: t[NAME][1:]}),
    rf'{NAME} is \[63, 32\]',
  ),
  'integers': (lambda t: t.update({NAME: t[NAME].astype(np.int8)}), 'as int8'),
  'booleans': (
    lambda t: t.update({NAME: t[NAME] > 0}),
    f'{NAME} is stored as BOOL',
  ),
  'a row less of each': (
    lambda t: t.update({key: value[1:] for key, value in t.items()}),
    r'does not fit: .*; .*; .*; .* and \d+ more',
  ),
  'NaN': (
    lambda t: t.update({NAME: t[NAME] * np.float32(np.nan)}),
    f'{NAME} holds a NaN',
  ),
  'one too many': (
    lambda t: t.update({Q_NORM: t[NAME]}),
    'unexpected .*model.layers.0.self_attn.q_norm',
  ),
}


@pytest.mark.parametrize(
  ('change', 'message'), BAD_TENSORS.values(), ids=BAD_TENSORS
)
def test_bad_tensors_are_named(folder, change, message):
  config = huggingface.read_config(folder)
  rewrite(folder, change)
  with pytest.raises(ValueError, match=message):
    huggingface.read_params(folder, config)


@pytest.mark.parametrize('size', [0, 5, 100, 5000, -1])
def test_truncated_weights_are_refused(folder, size):
  config = huggingface.read_config(folder)
  path = folder / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:size])
  with pytest.raises(ValueError, match='incomplete'):
    huggingface.read_params(folder, config)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'gpt2'}, "type is 'gpt2'.*t5, mt5"),
    (
      {'rope_scaling': {'type': 'linear', 'factor': 2.0}},
      r"rope_scaling\.type is 'linear'.*llama3",
    ),
    ({'rope_parameters': {'rope_type': 'llama3'}}, r'rope_parameters\.factor'),
    ({'rope_scaling': LLAMA3 | {'factor': 0.5}}, r'factor 0\.5.* 64'),
    (
      {'rope_scaling': LLAMA3 | {'high_freq_factor': 1.0}},
      'low_freq_factor 1.0.*less than',
    ),
    (
      {'rope_scaling': LLAMA3 | {'beta_fast': 32}},
      r'rope_scaling\.beta_fast is 32',
    ),
    (  # Where there is a rope_scaling, transformers takes nothing from here.
      {'rope_scaling': LLAMA3, 'rope_parameters': {'rope_theta': 1e6}},
      r'rope_parameters\.rope_theta is 1.*no such section beside rope_scaling',
    ),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor is 0.5'),
    ({'rope_interleaved': True}, 'rope_interleaved is True'),
    ({'hidden_act': 'gelu'}, "hidden_act is 'gelu'"),
    ({'attention_bias': True}, 'attention_bias is True'),
    ({'mlp_bias': True}, 'mlp_bias is True'),
    ({'model_type': 'qwen3', 'attention_bias': True}, 'attention_bias is True'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config.*bits'),
    ({'compression_config': {}}, 'compression_config is {}'),
    ({'sliding_window': 64}, 'sliding_window is 64'),
    (
      {'model_type': 'qwen2', 'use_sliding_window': True},
      'no sliding_window.*use_sliding_window',
    ),
    (
      {'layer_types': ['full_attention', 'x']},
      r"layer_types is \['full_attention', 'x'\]",
    ),
    (
      {'model_type': 'qwen2', 'layer_types': ['full_attention'] * 3},
      'expected 2 of full',
    ),
    (
      {
        'model_type': 'mistral',
        'sliding_window': None,
        'layer_types': ['sliding_attention'] * 2,
      },
      'layer_types.*expected 2 of full',
    ),
    ({'logit_scale': 0.5}, 'logit_scale is 0.5'),
    ({'hidden_size': None}, 'no hidden_size'),
    ({'num_attention_heads': 100_000, 'head_dim': None}, 'no head_dim'),
    ({'num_hidden_layers': 900}, 'too few.*900'),
    (
      {'rope_scaling': {'factor': 4.0}},
      r'rope_scaling\.factor is 4.0.*rope_type',
    ),
    ({'rope_scaling': {'type': 5}}, r'rope_scaling\.type is 5'),
    ({'is_encoder_decoder': True}, 'is_encoder_decoder is True'),
    ({'is_causal': False}, 'is_causal is False'),
    ({'num_key_value_heads': 3}, '4 heads'),
  ],
)
def test_unsupported_networks_are_refused(folder, changes, message):
  change_json(folder / 'config.json', **changes)
  with pytest.raises(ValueError, match=message):
    load_folder(folder)


@pytest.mark.parametrize(
  ('key', 'value', 'message'),
  [
    ('model_type', 5, 'is 5, expected a string'),
    ('num_hidden_layers', 10**9, 'is 1000000000, .* from 1 to 1000'),
    ('num_attention_heads', 0, 'is 0, expected an integer from 1'),
    ('num_attention_heads', True, 'is True, expected an integer'),
    ('num_key_value_heads', '2', "is '2', expected an integer"),
    ('num_key_value_heads', 0, 'is 0, expected an integer from 1'),
    ('head_dim', 0, 'is 0, expected an integer from 1'),
    ('head_dim', 8.0, 'is 8.0, expected an integer'),
    ('vocab_size', 2**31, 'is 2147483648, expected an integer'),
    ('rms_norm_eps', 'small', "is 'small', expected a number"),
    ('rms_norm_eps', float('nan'), 'is nan, expected a number'),
    ('rms_norm_eps', -1, 'is -1, expected a number above 0'),
    ('rope_theta', 10**400, 'is 1000.*000, expected a number'),
    ('rope_theta', 0, 'is 0, expected a number above 0'),
    ('rope_scaling', 'linear', "is 'linear', expected an object"),
    ('hidden_act', ['silu'], r"is \['silu'\], expected a string"),
    ('mlp_bias', 'no', "is 'no', expected true or false"),
    ('tie_word_embeddings', 'false', "is 'false', expected true or false"),
    ('sliding_window', '64', "is '64', expected an integer"),
    ('layer_types', 5, 'is 5, expected a list of strings'),
    ('layer_types', [None], r'is \[None\], expected a list of strings'),
    ('eos_token_id', 'x' * 500, "is 'x+[.]{3}x+', expected token ids"),
    ('eos_token_id', [2, 2.5], r'is \[2, 2.5\], expected token ids'),
  ],
)
def test_settings_of_another_type_are_named(folder, key, value, message):
  change_json(folder / 'config.json', **{key: value})
  with pytest.raises(ValueError, match=rf'config\.json: {key} {message}'):
    load_folder(folder)


def test_saving_names_what_is_wrong(tmp_path):
  config = make_config()
  params = make_params(config)
  params['decoder_norm']['scale'] = jnp.ones(3)
  with pytest.raises(ValueError, match=r'decoder_norm/scale is \[3\]'):
    huggingface.save(tmp_path, config, params)
  del params['decoder_norm']
  with pytest.raises(ValueError, match='no decoder_norm/scale'):
    huggingface.save(tmp_path, config, params)
  assert list(tmp_path.iterdir()) == []
