"""Hugging Face folders are read as they were written."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface
from specdec_jax.checkpoints.huggingface import hub
from specdec_jax.models.llama import RopeScaling
from tests.checkpoints.huggingface_folders import (
  LLAMA3,
  change_json,
  load_folder,
  rewrite,
  save,
  shard,
)
from tests.checkpoints.tiny_models import (
  assert_trees_equal,
  byte_tokens,
  make_config,
  make_params,
)

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')


@pytest.mark.parametrize('is_tied', [True, False])
@pytest.mark.parametrize('has_attention_bias', [True, False])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_round_trip(tmp_path, is_tied, has_attention_bias, dtype):
  config = make_config(
    is_tied=is_tied, has_attention_bias=has_attention_bias, dtype=dtype
  )
  params = make_params(config)
  save(tmp_path, config, params)
  loaded, loaded_params, vocabulary = load_folder(tmp_path, dtype=dtype)
  assert loaded == config
  assert_trees_equal(loaded_params, params)
  assert vocabulary.tokens() == byte_tokens()


@pytest.mark.parametrize(
  ('changes', 'kind'),
  [
    ({'rope_scaling': RopeScaling(factor=32.0)}, 'llama'),
    ({'windows': (64,)}, 'mistral'),
    ({'windows': (64, 0), 'has_attention_bias': True}, 'qwen2'),
    ({'windows': (0, 64), 'has_qk_norm': True}, 'qwen3'),
    ({'has_qk_norm': True, 'head_dim': 16, 'is_tied': False}, 'qwen3'),
  ],
)
def test_round_trip_of_each_network(tmp_path, changes, kind):
  config = make_config(**changes)
  params = make_params(config)
  save(tmp_path, config, params)
  loaded, loaded_params, _ = load_folder(tmp_path)
  assert loaded == config
  assert_trees_equal(loaded_params, params)
  stated = json.loads((tmp_path / 'config.json').read_text())
  assert stated['model_type'] == kind


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'has_qk_norm': True, 'has_attention_bias': True}, 'has_qk_norm'),
    ({'windows': (64, 0)}, r'mistral.*\[64, 0'),
    ({'windows': (64, 32), 'has_qk_norm': True}, r'qwen3.*\[64, 32'),
  ],
)
def test_networks_that_transformers_has_not_are_not_written(changes, message):
  with pytest.raises(ValueError, match=message):
    huggingface.llama.config_json(make_config(**changes), 'float32')


def test_shards_equal_the_single_file(folder):
  config, params, _ = load_folder(folder)
  shard(folder)
  assert_trees_equal(huggingface.read_params(folder, config), params)


def test_a_tied_head_in_the_file_is_the_embeddings(folder):
  config, params, _ = load_folder(folder)
  rewrite(
    folder,
    lambda t: t.update({
      'lm_head.weight': t['model.embed_tokens.weight'],
      'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float32),
    }),
  )  # fmt: skip
  assert_trees_equal(huggingface.read_params(folder, config), params)
  rewrite(folder, lambda t: t.update({'lm_head.weight': -t['lm_head.weight']}))
  with pytest.raises(
    ValueError, match=r'lm_head\.weight differs from.*"tie_word_embeddings": f'
  ):
    huggingface.read_params(folder, config)


@pytest.mark.parametrize(
  'changes',
  [
    {'model_type': 'mistral', 'sliding_window': None},
    {'model_type': 'mistral', 'sliding_window': 128},
    {'rope_scaling': {'rope_type': 'default'}, 'rope_interleaved': False},
    {'layer_types': ['full_attention', 'full_attention']},
    {'rope_scaling': {'rope_type': 'default', 'factor': 4.0}},
    {'quantization_config': None, 'head_dim': None, 'is_causal': True},
  ],
)
def test_equal_networks_are_accepted(folder, changes):
  change_json(folder / 'config.json', **changes)
  assert huggingface.read_config(folder) == make_config()


FULL, SLIDING = 'full_attention', 'sliding_attention'


@pytest.mark.parametrize(
  ('changes', 'windows'),
  [
    ({'model_type': 'mistral', 'sliding_window': 64}, (64,)),
    ({'model_type': 'qwen2', 'sliding_window': 64}, ()),
    (
      {
        'model_type': 'qwen2',
        'use_sliding_window': True,
        'sliding_window': 64,
        'max_window_layers': 1,
      },
      (0, 64),
    ),
    (
      {
        'model_type': 'qwen3',
        'use_sliding_window': True,
        'sliding_window': 64,
        'layer_types': [SLIDING, FULL],
      },
      (64, 0),
    ),
    (
      {'model_type': 'qwen3', 'use_sliding_window': True, 'sliding_window': 64},
      (),
    ),
  ],
)
def test_windows_are_those_of_each_layer(folder, changes, windows):
  change_json(folder / 'config.json', **changes)
  assert huggingface.read_config(folder).windows == windows


def test_a_mistral_has_the_window_of_transformers_by_default(folder):
  """It is not in config.json then."""
  change_json(
    folder / 'config.json', model_type='mistral', max_position_embeddings=8192
  )
  assert huggingface.read_config(folder).windows == (4096,)


@pytest.mark.parametrize(
  'rope',
  [
    {'rope_scaling': LLAMA3},
    {'rope_parameters': {**LLAMA3, 'rope_theta': 5e4}, 'rope_theta': None},
  ],
)
def test_rotary_scaling_of_both_transformers(folder, rope):
  change_json(folder / 'config.json', **rope)
  expected = make_config(
    rope_scaling=RopeScaling(factor=8.0, original_max_positions=64)
  )
  assert huggingface.read_config(folder) == expected


@pytest.mark.parametrize('section', ['rope_parameters', 'rope_scaling'])
def test_a_rotary_base_in_two_places(folder, section):
  def read(base):
    stated = {'rope_type': 'default', 'rope_theta': 1e6}
    change_json(folder / 'config.json', rope_theta=base, **{section: stated})
    return huggingface.read_config(folder)

  assert read(1e6).rope_base == read(None).rope_base == 1e6
  with pytest.raises(
    ValueError,
    match=rf'rope_theta is 50.*1e\+06, the value of {section}\.rope_theta',
  ):
    read(50.0)


def test_rotary_base_of_transformers_5(folder):
  change_json(
    folder / 'config.json',
    rope_theta=None,
    rope_parameters={'rope_theta': 1e6, 'rope_type': 'default'},
  )
  assert huggingface.read_config(folder).rope_base == 1e6


def test_downloads(monkeypatch, tmp_path):
  huggingface_hub = pytest.importorskip('huggingface_hub')

  def snapshot(name, *, allow_patterns, ignore_patterns, **_):
    files = ['model-1-of-2.safetensors', 'consolidated.safetensors']
    patterns = {'allow_patterns': allow_patterns}
    patterns |= {'ignore_patterns': ignore_patterns}
    assert [
      *huggingface_hub.utils.filter_repo_objects(files, **patterns)
    ] == files[:1]
    return str(tmp_path / name)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot)
  assert hub.download('some/model') == tmp_path / 'some/model'

  def fail(name, **_):
    raise OSError('no route to host')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', fail)
  with pytest.raises(ValueError, match=r'hf:some/model.*no route'):
    hub.download('some/model')


@pytest.mark.parametrize('name', ['model', '/model', 'a/b/c', ''])
def test_names_that_no_repository_has_are_refused(name):
  pytest.importorskip('huggingface_hub')
  with pytest.raises(ValueError, match='write hf:organisation/name'):
    hub.download(name)
