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

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')


def test_missing_files_are_named(folder):
  config = huggingface.read_config(folder)
  shard(folder)
  (folder / 'model-00002-of-00002.safetensors').unlink()
  with pytest.raises(ValueError, match='lacks model-00002-of-00002'):
    huggingface.read_params(folder, config)
  (folder / 'model.safetensors.index.json').unlink()
  with pytest.raises(ValueError, match='no weights'):
    huggingface.read_params(folder, config)
  (folder / 'tokenizer.json').unlink()
  with pytest.raises(ValueError, match=r'no tokenizer\.json'):
    load_folder(folder)
  (folder / 'config.json').unlink()
  with pytest.raises(ValueError, match=r'cannot read .*config\.json'):
    load_folder(folder)


def test_an_index_that_names_absent_tensors_is_refused(folder):
  config = huggingface.read_config(folder)
  shard(folder)
  path = folder / 'model.safetensors.index.json'
  weight_map = json.loads(path.read_text())['weight_map']
  name = 'model.norm.weight'
  others = set(weight_map.values()) - {weight_map[name]}
  change_json(path, weight_map=weight_map | {name: others.pop()})
  with pytest.raises(ValueError, match=f'lacks .*{name}'):
    huggingface.read_params(folder, config)
  path.write_text('{}')
  with pytest.raises(ValueError, match='no weight_map'):
    huggingface.read_params(folder, config)


@pytest.mark.parametrize(
  ('file_name', 'message'),
  [
    ('../other/model.safetensors', "is '../other/"),
    ('/etc/passwd', r"norm\.weight is '/etc/passwd'"),
    (5, r'weight_map\.model\.norm\.weight is 5'),
    (['a'], r"is \['a'\]"),
    ('a' * 300, 'lacks aaaa'),
    ('\0', 'lacks \0'),
  ],
)
def test_an_index_stays_in_its_folder(folder, file_name, message):
  other = folder.parent / 'other'
  other.mkdir(exist_ok=True)
  (folder / 'model.safetensors').rename(other / 'model.safetensors')
  change_json(
    folder / 'model.safetensors.index.json',
    weight_map={'model.norm.weight': file_name},
  )
  with pytest.raises(ValueError, match=message):
    safetensors_folder.open_tensors(folder)


def test_an_index_without_a_map_is_refused(folder):
  (folder / 'model.safetensors').unlink()
  path = folder / 'model.safetensors.index.json'
  change_json(path, weight_map='all')
  with pytest.raises(ValueError, match="weight_map is 'all'"):
    safetensors_folder.open_tensors(folder)


def test_bad_tensors_are_named(folder):
  config = huggingface.read_config(folder)
  name = 'model.layers.1.mlp.up_proj.weight'

  def refused(change, message):
    original = (folder / 'model.safetensors').read_bytes()
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
      huggingface.read_params(folder, config)
    (folder / 'model.safetensors').write_bytes(original)

  refused(lambda t: t.pop(name), f'lacks .*{name}')
  refused(
    lambda t: t.update({name: t[name][1:]}),
    rf'{name} is \[63, 32\]',
  )
  refused(lambda t: t.update({name: t[name].astype(np.int8)}), 'as int8')
  refused(lambda t: t.update({name: t[name] > 0}), f'{name} is stored as BOOL')
  refused(
    lambda t: t.update({key: value[1:] for key, value in t.items()}),
    r'does not fit: .*; .*; .*; .* and \d+ more',
  )
  refused(
    lambda t: t.update({name: t[name] * np.float32(np.nan)}),
    f'{name} holds a NaN',
  )
  refused(
    lambda t: t.update({'model.layers.0.self_attn.q_norm.weight': t[name]}),
    'unexpected .*model.layers.0.self_attn.q_norm',
  )


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
    (
      {'model_type': 'gpt2'},
      "type is 'gpt2'.*t5, mt5",
    ),
    (
      {'rope_scaling': {'type': 'linear', 'factor': 2.0}},
      r"rope_scaling\.type is 'linear'.*llama3",
    ),
    (
      {'rope_parameters': {'rope_type': 'llama3'}},
      r'rope_parameters\.factor',
    ),
    (
      {'rope_scaling': LLAMA3 | {'factor': 0.5}},
      r'factor 0\.5.* 64',
    ),
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
    (
      {'partial_rotary_factor': 0.5},
      'partial_rotary_factor is 0.5',
    ),
    ({'rope_interleaved': True}, 'rope_interleaved is True'),
    ({'hidden_act': 'gelu'}, "hidden_act is 'gelu'"),
    ({'attention_bias': True}, 'attention_bias is True'),
    ({'mlp_bias': True}, 'mlp_bias is True'),
    (
      {'model_type': 'qwen3', 'attention_bias': True},
      'attention_bias is True',
    ),
    (
      {'quantization_config': {'bits': 4}},
      'quantization_config.*bits',
    ),
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


def test_settings_of_a_section_are_named(folder):
  change_json(folder / 'config.json', rope_scaling={'type': 5})
  with pytest.raises(ValueError, match=r'rope_scaling\.type is 5'):
    load_folder(folder)


@pytest.mark.parametrize('text', ['', '{', '[]', '[' * 100_000, b'\xff'])
def test_broken_json_is_refused(folder, text):
  content = text if isinstance(text, bytes) else text.encode()
  (folder / 'config.json').write_bytes(content)
  with pytest.raises(ValueError, match=r'config\.json.*no JSON'):
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
