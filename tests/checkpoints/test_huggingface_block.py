"""Folders of block drafters are read and written as their makers have them,
and what is not computed is refused by its key."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface, loading
from specdec_jax.cli.main import main
from specdec_jax.models import families
from specdec_jax.models.llama import RopeScaling
from tests import toy, toy_blocks
from tests.checkpoints.tiny_models import assert_trees_equal

pytest.importorskip('safetensors')

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'
# What speculators can state: no norms of features, and a token as the mask.
SIZES = {
  'feature_norms': False,
  'mask_token_id': 3,
  'has_qk_norm': True,
  'window_from_anchor': True,
  'has_causal_windows': True,
}
TARGET = toy.llama_config(12, num_layers=3)


def make(**changes):
  return toy_blocks.config(TARGET, **(SIZES | changes))


def make_params(config):
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype),
    families.param_shapes(config),
  )
  ids = rng.permutation(config.vocab_size)[: config.draft_vocab_size]
  return params | {'target_ids': jnp.asarray(ids, jnp.int32)}


@pytest.mark.parametrize(
  ('changes', 'architecture'),
  [
    ({}, 'DSparkDraftModel'),
    ({'draft_vocab_size': 12, 'dtype': jnp.bfloat16}, 'DSparkDraftModel'),
    ({'markov_head': 'rnn', 'windows': (3, 0)}, 'DSparkDraftModel'),
    (
      {
        'markov_rank': 0,
        'markov_head': 'vanilla',
        'has_confidence': False,
        'sample_from_anchor': False,
        'windows': (3,),
        'has_causal_windows': False,
        'rope_scaling': RopeScaling(factor=8.0, original_max_positions=64),
      },
      'DFlashDraftModel',
    ),
  ],
)
def test_round_trip(tmp_path, changes, architecture):
  """Tokens are in ascending order in the file, with the columns of the head."""
  config = make(**changes)
  params = make_params(config)
  huggingface.save(tmp_path, config, params)
  loaded, loaded_params = loading.read(tmp_path, dtype=config.dtype)
  assert loaded == config
  order = np.argsort(params['target_ids'])
  expected = params | {'target_ids': params['target_ids'][order]}
  if config.markov_rank:
    kernel = params['markov_dense']['kernel'][:, order]
    expected['markov_dense'] = {'kernel': kernel}
  assert_trees_equal(loaded_params, expected)
  stated = json.loads((tmp_path / 'config.json').read_text())
  assert stated['architectures'] == [architecture]


@pytest.mark.parametrize('name', ['zlab_older', 'dflash', 'dspark_gated'])
def test_folders_are_converted_to_ours(tmp_path, capsys, name):
  source = GOLDEN / f'tiny_block_{name}'
  ours, back = tmp_path / 'ours', tmp_path / 'back'
  assert main(['convert', str(source), str(ours), '--to', 'safetensors']) == 0
  expected = loading.read(source)
  folders = [ours]
  if not name.startswith('zlab'):
    to_theirs = ['convert', str(ours), str(back), '--to', 'huggingface']
    assert main(to_theirs) == 0
    folders.append(back)
  assert 'without a vocabulary' in capsys.readouterr().out
  for folder in folders:
    config, params = loading.read(folder)
    assert config == expected[0]
    assert_trees_equal(params, expected[1])


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'feature_norms': True}, 'feature_norms'),
    ({'mask_token_id': None}, 'mask_embedding'),
    ({'has_qk_norm': False}, 'has_qk_norm'),
    ({'is_causal': True}, 'is_causal'),
    ({'windows': (3,), 'window_from_anchor': False}, 'windows that end'),
    ({'mlp_activations': ('gelu', 'linear')}, 'mlp_activations'),
    ({'markov_head': 'rnn', 'sample_from_anchor': False}, 'an rnn behind'),
  ],
)
def test_networks_that_speculators_has_not_are_not_written(
  tmp_path, changes, message
):
  config = make(**changes)
  with pytest.raises(ValueError, match=f'no block drafter with .*{message}'):
    huggingface.save(tmp_path, config, make_params(config))


def changed(tmp_path, name: str, section: str | None, **changes):
  folder = shutil.copytree(GOLDEN / f'tiny_block_{name}', tmp_path / name)
  path = folder / 'config.json'
  stated = json.loads(path.read_text())
  (stated[section] if section else stated).update(changes)
  path.write_text(json.dumps(stated))
  return folder


LAYERS = 'transformer_layer_config'


@pytest.mark.parametrize(
  ('name', 'section', 'changes', 'message'),
  [
    ('zlab_older', None, {'architectures': ['DFlash2DraftModel']}, 'architec'),
    ('zlab_older', None, {'model_type': 'qwen2'}, 'model_type'),
    ('zlab_older', None, {'attention_bias': True}, 'attention_bias'),
    ('zlab_newer', None, {'block_size': 4}, 'block_size is 4, expected 5'),
    ('zlab_newer', None, {'block_size': 16}, 'block_size is 16'),
    ('zlab_newer', None, {'sliding_window': 4}, 'sliding_window is 4'),
    ('zlab_causal', None, {'sliding_window': 128}, 'sliding_window is 128'),
    ('zlab_older', 'dflash_config', {'target_layer_ids': [1, 7]}, 'target_lay'),
    ('zlab_older', 'dflash_config', {'target_layer_ids': [3, 1]}, 'ascend'),
    ('zlab_older', 'dflash_config', {'mask_token_id': None}, 'mask_token_id'),
    ('zlab_older', 'dflash_config', {'mask_token_id': 40}, 'mask_token_id 40'),
    (
      'zlab_older',
      'dflash_config',
      {'output_multiplier': 0.2},
      'dflash_config.output_multiplier',
    ),
    (
      'dspark',
      None,
      {'speculators_model_type': 'dspark2'},
      'speculators_model_type',
    ),
    ('dspark', None, {'architectures': ['DFlashDraftModel']}, 'architectures'),
    ('dspark', 'speculators_config', {'algorithm': 'dflash'}, 'algorithm'),
    ('dspark', LAYERS, {'model_type': 'gemma3'}, f'{LAYERS}.model_type'),
    ('dspark', LAYERS, {'rope_scaling_factor': 2}, 'rope_scaling_factor'),
    ('dspark', None, {'target_hidden_size': 20}, 'target_hidden_size'),
    ('dspark', None, {'markov_head_type': 'gru'}, "markov_head is 'gru'"),
    ('dspark', None, {'confidence_head_with_markov': False}, 'confidence_head'),
    ('dspark_rnn', None, {'sample_from_anchor': False}, 'sample_from_anchor'),
    ('dspark', None, {'aux_hidden_state_layer_ids': [2, 2]}, 'ascend'),
  ],
)
def test_what_is_not_computed_is_refused(
  tmp_path, name, section, changes, message
):
  folder = changed(tmp_path, name, section, **changes)
  with pytest.raises(ValueError, match=message):
    loading.read_config(folder)


def test_copies_of_the_targets_weights_are_not_read(tmp_path):
  from safetensors.numpy import load_file, save_file

  folder = changed(tmp_path, 'dspark', None)
  path = folder / 'model.safetensors'
  _, expected = loading.read(folder)
  tensors = load_file(path)
  copies = {
    'embed_tokens.weight': np.zeros((40, 16), np.float32),
    'lm_head.weight': np.zeros((12, 16), np.float32),
  }
  save_file(tensors | copies, path)
  assert_trees_equal(loading.read(folder)[1], expected)
  # One publisher's other layers.
  for name in ('layers.0.self_attn.g_proj.weight', 'aux_hidden_norms.0.weight'):
    save_file(tensors | {name: np.zeros((16,), np.float32)}, path)
    with pytest.raises(ValueError, match=name):
      loading.read(folder)
  del tensors['d2t']
  save_file(tensors, path)
  with pytest.raises(ValueError, match='no tensor d2t'):
    loading.read(folder)
