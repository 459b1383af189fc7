"""Gemma 4s, their assistants and Qwen3-MoEs in Hugging Face folders are read as
they were written; what they do not compute is refused with the key."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface
from specdec_jax.models import families, layers, presets, quantized
from specdec_jax.models.quantized import Bits
from tests import toy, toy_assistant, toy_gemma
from tests.checkpoints.test_public_configs import refusal, walk
from tests.checkpoints.tiny_models import assert_trees_equal

pytest.importorskip('safetensors')

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
V = 40
CONFIGS = {
  'gemma4_text': toy_gemma.gemma_4(V, rope_factor=2.0),
  'gemma4_text, E2B': toy_gemma.gemma_4_e2b(V, windows=(3, 0)),
  'gemma4_text, experts': toy_gemma.gemma_4_moe(V, num_layers=2),
  'gemma4_assistant': toy_assistant.config(toy_gemma.gemma_4(V)),
  'gemma4_assistant, clusters': toy_assistant.clustered(
    toy_gemma.gemma_4_e2b(V)
  ),
  'qwen3_moe': toy.llama_config(V, **toy.EXPERTS),
}
CONFIGS['gemma4_text'] = dataclasses.replace(
  CONFIGS['gemma4_text'], num_layers=4
)


def params_of(config):
  if hasattr(config, 'full_head_dim'):
    return toy_gemma.params(config, seed=3)
  params = toy.llama_params(config, seed=3)
  return jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)


def change(folder, **changes) -> None:
  path = folder / 'config.json'
  contents = json.loads(path.read_text()) | changes
  path.write_text(json.dumps(contents))


def rewrite(folder, edit) -> None:
  """Applies `edit` to the dict of a folder's tensors."""
  from safetensors.numpy import load_file, save_file

  tensors = load_file(folder / 'model.safetensors')
  save_file(edit(tensors), folder / 'model.safetensors')


@pytest.mark.parametrize('name', CONFIGS)
def test_round_trip(tmp_path, name):
  config = dataclasses.replace(CONFIGS[name], dtype=jnp.bfloat16)
  params = params_of(config)
  huggingface.save(tmp_path, config, params)
  found = huggingface.read_config(tmp_path, dtype=jnp.bfloat16)
  assert found == config
  assert_trees_equal(huggingface.read_params(tmp_path, found), params)
  stated = json.loads((tmp_path / 'config.json').read_text())
  assert stated['model_type'] == name.split(',')[0]


@pytest.mark.parametrize(
  'name', ['tiny_gemma4_e2b', 'tiny_gemma4_moe', 'tiny_qwen3_moe']
)
def test_what_transformers_wrote_is_written_again(tmp_path, name):
  """The same tensors, under the same names."""
  from safetensors.numpy import load_file

  config = huggingface.read_config(GOLDEN / name)
  params = huggingface.read_params(GOLDEN / name, config)
  huggingface.save(tmp_path, config, params)
  ours, theirs = (
    load_file(folder / 'model.safetensors')
    for folder in (tmp_path, GOLDEN / name)
  )
  assert ours.keys() == theirs.keys()
  for key, tensor in ours.items():
    np.testing.assert_array_equal(tensor, theirs[key])


def test_the_text_of_a_model_that_sees_and_hears(tmp_path, caplog):
  config = CONFIGS['gemma4_text, E2B']
  params = params_of(config)
  huggingface.save(tmp_path, config, params)
  path = tmp_path / 'config.json'
  text = json.loads(path.read_text())
  whole = {
    'model_type': 'gemma4',
    'text_config': text,
    'vision_config': {'hidden_size': 8},
    'audio_config': {'hidden_size': 8},
    'audio_token_id': 7,
  }
  path.write_text(json.dumps(whole))
  seen = np.ones(3, np.float32)
  prefix = 'model.language_model.'
  others = ('vision_tower.a', 'audio_tower.b', 'embed_vision.c', 'embed_audio')
  unread = {f'model.{other}.weight': seen for other in others}
  # Layers that read the keys of others have some in files all the same.
  unread |= {
    f'{prefix}layers.3.self_attn.{key}.weight': seen
    for key in ('k_proj', 'v_proj', 'k_norm')
  }
  rewrite(
    tmp_path,
    lambda tensors: unread | {
      prefix + name.removeprefix('model.'): tensor
      for name, tensor in tensors.items()
    },
  )  # fmt: skip
  assert huggingface.read_config(tmp_path) == config
  assert_trees_equal(huggingface.read_params(tmp_path, config), params)
  [record] = caplog.records
  assert '4 tensors for images or sound are not read' in record.message


@pytest.mark.parametrize('name', ['tiny_gemma4', 'tiny_gemma4_assistant'])
def test_unified_models_differ_in_names_alone(tmp_path, name):
  """As transformers has them: without experts and embeddings for layers."""
  contents = json.loads((GOLDEN / name / 'config.json').read_text())
  renamed = json.dumps(contents).replace('gemma4_', 'gemma4_unified_')
  (tmp_path / 'config.json').write_text(renamed)
  expected = huggingface.read_config(GOLDEN / name)
  assert huggingface.read_config(tmp_path) == expected
  section = contents if name == 'tiny_gemma4' else contents['text_config']
  del section['sliding_window']
  renamed = json.dumps(contents).replace('gemma4_', 'gemma4_unified_')
  (tmp_path / 'config.json').write_text(renamed)
  assert max(huggingface.read_config(tmp_path).windows) == 1024


def test_early_files_state_the_heads_of_full_layers_by_two_keys(tmp_path):
  contents = json.loads((GOLDEN / 'tiny_gemma4/config.json').read_text())
  expected = huggingface.read_config(GOLDEN / 'tiny_gemma4')
  del contents['per_layer_config']
  early = contents | {'global_head_dim': 16, 'num_global_key_value_heads': 1}
  (tmp_path / 'config.json').write_text(json.dumps(early))
  assert huggingface.read_config(tmp_path) == expected
  # Without value-is-key, transformers passes over the number of heads.
  change(tmp_path, attention_k_eq_v=False)
  found = huggingface.read_config(tmp_path)
  assert found.full_num_kv_heads == expected.num_kv_heads
  assert not found.full_key_is_value


# A folder, a change of its config.json, and what is said of it.
REFUSED = [
  ('tiny_gemma4', {'hidden_activation': 'relu'}, "is 'relu', expected gelu"),
  ('tiny_gemma4', {'attention_bias': True}, 'attention_bias is True'),
  ('tiny_gemma4', {'tie_word_embeddings': False}, 'is False, expected true'),
  ('tiny_gemma4', {'use_bidirectional_attention': 'all'}, "is 'all', expec"),
  ('tiny_gemma4', {'layer_types': ['full_attention']}, 'expected 5 of'),
  ('tiny_gemma4', {'num_kv_shared_layers': 5}, 'the first needs its own'),
  ('tiny_gemma4', {'num_kv_shared_layers': 3}, 'a window of 0'),
  ('tiny_gemma4', {'per_layer_config': {'2': {'head_dim': 4}}}, '2 and 4, of'),
  ('tiny_gemma4', {'per_layer_config': {'2': {'mlp': 4}}}, 'mlp is 4, a key'),
  ('tiny_gemma4', {'quantization_config': {'bits': 4}}, 'quantization_config'),
  ('tiny_gemma4_moe', {'top_k_experts': 7}, 'num_chosen_experts 7'),
  ('tiny_gemma4_moe', {'num_experts': None}, 'has no num_experts'),
  ('tiny_gemma4_e2b_assistant', {'num_centroids': 7}, 'into 7 clusters'),
  ('tiny_gemma4_assistant', {'text_config': {}}, 'num_hidden_layers'),
  ('tiny_qwen3_moe', {'decoder_sparse_step': 2}, 'is 2, expected 1'),
  ('tiny_qwen3_moe', {'mlp_only_layers': [0]}, r'is \[0\], expected none'),
  ('tiny_qwen3_moe', {'use_sliding_window': True}, 'is True, expected false'),
]


@pytest.mark.parametrize(('name', 'changes', 'message'), REFUSED)
def test_what_is_not_computed_is_refused_by_its_key(
  tmp_path, name, changes, message
):
  shutil.copy(GOLDEN / name / 'config.json', tmp_path)
  change(tmp_path, **changes)
  with pytest.raises(ValueError, match=message):
    huggingface.read_config(tmp_path)


# Keys of which others decide whether they count.
_BESIDE = {
  # There is no embedding for each layer, and no cluster.
  'tiny_gemma4': {'vocab_size_per_layer_input', 'use_double_wide_mlp'},
  'tiny_gemma4_moe': {'vocab_size_per_layer_input', 'use_double_wide_mlp'},
  'tiny_gemma4_e2b': set(),
  'tiny_qwen3_moe': {'sliding_window', 'intermediate_size'},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', _BESIDE)
def test_no_key_is_ignored_silently(name, tmp_path):
  contents = json.loads((GOLDEN / name / 'config.json').read_text())
  expected = refusal(tmp_path, contents)
  ignored = {
    path.split('.')[-1]
    for path, _, other in walk(contents)
    if refusal(tmp_path, other) == expected
  }
  of_family = (
    huggingface.gemma4.WITHOUT_EFFECT | huggingface.llama.WITHOUT_EFFECT
  )
  beside = _BESIDE[name] | {'model_type'}
  assert ignored <= huggingface.WITHOUT_EFFECT | of_family | beside


@pytest.mark.parametrize(
  ('name', 'millions'),
  [
    ('gemma4_31b', 30_697),
    ('gemma4_26b_a4b', 25_233),
    ('gemma4_e4b', 7463),
    ('gemma4_e2b', 4629),
    ('qwen3_30b_a3b', 30_532),
    ('gemma4_31b_assistant', 470),
    ('gemma4_e4b_assistant', 79),
  ],
)
def test_presets_have_as_many_parameters_as_their_makers_say(name, millions):
  """To the digits that names and pages have; the text alone. A scale for each
  expert counts, unlike the scales of packed weights."""
  shapes = families.param_shapes((presets.PRESETS | presets.ASSISTANTS)[name])
  num_params = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  assert num_params / 1e6 == pytest.approx(millions, abs=0.6)
  assert layers.num_params(shapes) == num_params
  packed = quantized.packed(shapes, Bits(8))
  assert layers.num_params(packed) == num_params
