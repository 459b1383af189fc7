"""Gemmas in Hugging Face folders are read as they were written; what they do
not compute is refused with the key and its value."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface
from specdec_jax.models import families, layers, presets
from specdec_jax.text import generation_config
from tests import toy_gemma
from tests.checkpoints.tiny_models import assert_trees_equal

pytest.importorskip('safetensors')

V = 40
GEMMA_2 = {
  'has_qk_norm': False,
  'rope_base': 1e4,
  'rope_factor': 1.0,
  'attention_softcap': 50.0,
  'logits_softcap': 30.0,
}
CONFIGS = {
  'gemma2': toy_gemma.decoder(V, **GEMMA_2),
  'gemma3_text': toy_gemma.decoder(V, num_layers=3, windows=(3, 3, 0)),
  't5gemma': toy_gemma.encoder_decoder(V, num_encoder_layers=3),
}


@pytest.fixture(params=CONFIGS)
def kind(request):
  return request.param


def write(folder, kind: str):
  config = CONFIGS[kind]
  params = toy_gemma.params(config, seed=3)
  huggingface.save(folder, config, params)
  return params


def change(folder, section: str = '', **changes) -> None:
  """Edits the object at a key of config.json, or its top."""
  path = folder / 'config.json'
  contents = json.loads(path.read_text())
  (contents[section] if section else contents).update(changes)
  path.write_text(json.dumps(contents))


def rewrite(folder, edit) -> None:
  """Applies `edit` to the dict of a folder's tensors."""
  from safetensors.numpy import load_file, save_file

  tensors = load_file(folder / 'model.safetensors')
  save_file(edit(tensors), folder / 'model.safetensors')


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_round_trip(tmp_path, kind, dtype):
  config = dataclasses.replace(CONFIGS[kind], dtype=dtype)
  params = toy_gemma.params(config, seed=3)
  huggingface.save(tmp_path, config, params)
  found = huggingface.read_config(tmp_path, dtype=dtype)
  assert found == config
  assert_trees_equal(huggingface.read_params(tmp_path, found), params)
  stated = json.loads((tmp_path / 'config.json').read_text())
  assert stated['model_type'] == kind


def test_a_copy_of_the_embeddings_is_passed_over(tmp_path, kind):
  params = write(tmp_path, kind)
  name, of = {
    't5gemma': ('lm_head.out_proj.weight', 'model.decoder.embed_tokens.weight')
  }.get(kind, ('lm_head.weight', 'model.embed_tokens.weight'))
  config = CONFIGS[kind]
  rewrite(tmp_path, lambda tensors: tensors | {name: tensors[of]})
  assert_trees_equal(huggingface.read_params(tmp_path, config), params)
  rewrite(tmp_path, lambda tensors: tensors | {name: tensors[of] + 1})
  with pytest.raises(ValueError, match=f'{name} differs from {of}'):
    huggingface.read_params(tmp_path, config)


@pytest.mark.parametrize(
  'prefix', ['language_model.model.', 'model.language_model.']
)
def test_the_text_of_a_model_that_also_sees(tmp_path, prefix):
  params = write(tmp_path, 'gemma3_text')
  path = tmp_path / 'config.json'
  text = json.loads(path.read_text())
  sees = {'model_type': 'gemma3', 'vision_config': {'hidden_size': 8}}
  path.write_text(json.dumps(sees | {'text_config': text}))
  seen = np.ones(3, np.float32)
  rewrite(
    tmp_path,
    lambda tensors: (
      {
        prefix + name.removeprefix('model.'): tensor
        for name, tensor in tensors.items()
      }
      | {'vision_tower.a': seen, 'model.multi_modal_projector.b': seen}
    ),
  )
  config = huggingface.read_config(tmp_path)
  assert config == CONFIGS['gemma3_text']
  assert_trees_equal(huggingface.read_params(tmp_path, config), params)


# The model, the section of its config.json, a change, and what is said of it.
REFUSED = [
  ('gemma2', '', {'hidden_activation': 'gelu'}, "is 'gelu', expected gelu_pyt"),
  ('gemma2', '', {'attention_bias': True}, 'attention_bias is True'),
  ('gemma2', '', {'tie_word_embeddings': False}, 'is False, expected true'),
  ('gemma2', '', {'use_bidirectional_attention': True}, 'is True, expected'),
  ('gemma2', '', {'rope_scaling': {'type': 'yarn'}}, "type is 'yarn', expec"),
  (
    'gemma2',
    '',
    {'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}},
    r'rope_scaling\.factor is 2\.0, expected none'
  ),
  (
    'gemma3_text',
    '',
    {'rope_scaling': {'factor': 2.0}},
    r'rope_scaling\.factor is 2\.0, expected rope_type linear'
  ),
  ('gemma2', '', {'sliding_window_size': 4}, 'size is 4, expected 3'),
  ('gemma2', '', {'layer_types': ['full_attention']}, 'expected 2 of full'),
  ('gemma2', '', {'layer_types': ['full', 'none']}, 'layer_types is .*none'),
  ('gemma2', '', {'attn_logit_softcapping': -1.0}, 'is -1.0, expected a num'),
  ('gemma2', '', {'quantization_config': {'bits': 4}}, 'quantization_config'),
  ('gemma2', '', {'altup_num_inputs': 4}, 'is 4, a key that is not known'),
  ('gemma3_text', '', {'attn_logit_softcapping': 50.0}, 'is 50.0, expected n'),
  ('t5gemma', '', {'is_encoder_decoder': False}, 'is False, expected true'),
  ('t5gemma', '', {'vocab_size': 41}, 'vocab_size is 41, expected 40'),
  ('t5gemma', '', {'pad_token_id': 3}, 'pad_token_id is 3, expected 0'),
  ('t5gemma', 'decoder', {'bos_token_id': 1}, r'decoder\.bos_token_id is 1'),
  ('t5gemma', 'encoder', {'head_dim': 8}, r'encoder\.head_dim is 8, expected'),
  ('t5gemma', 'encoder', {'sliding_window': 9}, r'sliding_window is 9, exp'),
  ('t5gemma', 'encoder', {'twist': 1}, r'encoder\.twist is 1, a key that'),
  (
    't5gemma',
    'encoder',
    {'layer_types': ['full_attention', 'sliding_attention'] * 2,
     'num_hidden_layers': 4},
    r'encoder\.layer_types is .*expected the order of the other stack'
  ),
  (
    't5gemma',
    'decoder',
    {'cross_attention_hidden_size': 7},
    r'decoder\.cross_attention_hidden_size is 7, expected 6'
  ),
]  # fmt: skip


@pytest.mark.parametrize(('kind', 'section', 'changes', 'message'), REFUSED)
def test_what_is_not_computed_is_refused(
  tmp_path, kind, section, changes, message
):
  write(tmp_path, kind)
  change(tmp_path, section, **changes)
  with pytest.raises(ValueError, match=rf'config\.json.*{message}'):
    huggingface.read_config(tmp_path)


@pytest.mark.parametrize(
  ('kind', 'section', 'stated', 'windows'),
  [
    ('gemma3_text', '', {}, (3, 3, 3, 3, 3, 0)),
    ('gemma3_text', '', {'sliding_window_pattern': 3}, (3, 3, 0)),
    ('gemma3_text', '', {'_sliding_window_pattern': 3}, (3, 3, 3, 3, 3, 0)),
    (
      'gemma3_text',
      '',
      {'sliding_window_pattern': 2, '_sliding_window_pattern': 3},
      (3, 0),
    ),
    ('gemma2', '', {}, (3, 0)),
    ('gemma2', '', {'sliding_window_pattern': 2}, (3, 0)),
    ('gemma2', '', {'sliding_window_pattern': 3}, None),
    ('gemma2', '', {'_sliding_window_pattern': 3}, None),
    ('t5gemma', 'decoder', {}, (3, 0)),
    ('t5gemma', 'decoder', {'sliding_window_pattern': 3}, None),
    ('t5gemma', 'encoder', {'_sliding_window_pattern': 3}, None),
  ],
)
def test_windows_of_layers_that_are_not_listed(
  tmp_path, kind, section, stated, windows
):
  """As transformers 5.24 derives `layer_types` of 6 layers; None where it would
  compute something else than the file states."""
  write(tmp_path, kind)
  change(tmp_path, section, layer_types=None, num_hidden_layers=6, **stated)
  if windows is None:
    name = next(iter(stated))
    with pytest.raises(
      ValueError, match=rf'{section}.*{name} is 3, expected 2'
    ):
      huggingface.read_config(tmp_path)
  else:
    assert huggingface.read_config(tmp_path).windows == windows


def test_listed_layers_need_no_pattern(tmp_path):
  write(tmp_path, 'gemma2')
  change(tmp_path, sliding_window_pattern=3)
  assert huggingface.read_config(tmp_path) == CONFIGS['gemma2']


@pytest.mark.parametrize(
  ('section', 'key'),
  [
    ('full_attention', 'rope_theta'),
    ('sliding_attention', 'rope_local_base_freq'),
  ],
)
def test_a_rotary_base_in_two_places(tmp_path, section, key):
  write(tmp_path, 'gemma3_text')
  change(tmp_path, rope_parameters={section: {'rope_theta': 33.0}}, **{key: 33})
  config = huggingface.read_config(tmp_path)
  assert 33.0 in (config.rope_base, config.local_rope_base)
  change(tmp_path, **{key: 34})
  with pytest.raises(
    ValueError, match=rf'{key} is 34.*33, the value of rope_.*{section}'
  ):
    huggingface.read_config(tmp_path)


@pytest.mark.parametrize(
  ('factors', 'expected'),
  [
    ((4.0, None), 4.0),
    ((None, 8.0), 8.0),
    ((4.0, 8.0), 8.0),
    ((4.0, 0.0), 1.0),
  ],
)
def test_rope_scaling_overrides_rope_parameters(tmp_path, factors, expected):
  """As transformers 5.23 reads them; the factors are those of `full_attention`,
  0 for the type `default`."""
  write(tmp_path, 'gemma3_text')
  full, scaling = (
    {'rope_type': 'linear', 'factor': each}
    if each
    else {'rope_type': 'default'}
    for each in factors
  )
  change(
    tmp_path,
    rope_parameters={'full_attention': full},
    rope_scaling=None if factors[1] is None else scaling,
  )
  assert huggingface.read_config(tmp_path).rope_factor == expected


def test_a_decoder_that_starts_otherwise_is_refused(tmp_path):
  write(tmp_path, 't5gemma')
  (tmp_path / 'generation_config.json').write_text(
    '{"decoder_start_token_id": 5}'
  )
  with pytest.raises(ValueError, match='decoder_start_token_id is 5'):
    huggingface.read_config(tmp_path)


def test_the_end_of_text_of_a_decoder(tmp_path):
  write(tmp_path, 't5gemma')
  change(tmp_path, eos_token_id=None)
  change(tmp_path, 'decoder', eos_token_id=[1, 7])
  assert generation_config.read_eos_ids(tmp_path) == (1, 7)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'windows': (3, 4)}, r'windows.*\[3, 4\]'),
    (GEMMA_2 | {'local_rope_base': 5.0}, 'local_rope_base'),
    ({'attention_softcap': 9.0}, 'expected null.*softcap'),
  ],
)
def test_what_transformers_has_not_is_not_written(tmp_path, changes, message):
  config = toy_gemma.decoder(V, **changes)
  with pytest.raises(ValueError, match=message):
    huggingface.save(tmp_path, config, toy_gemma.params(config, seed=0))


# Parameters of the published files.
_PUBLISHED = {
  't5gemma_s': 312_517_632,
  't5gemma_b': 591_490_560,
  't5gemma_ml': 2_200_345_344,
  't5gemma_xl': 3_766_980_608,
  't5gemma_9b_2b': 12_292_375_296,
  't5gemma_9b': 20_333_401_088,
  'gemma2_2b': 2_614_341_888,
  'gemma2_9b': 9_241_705_984,
  'gemma2_27b': 27_227_128_320,
  'gemma3_270m': 268_098_176,
  'gemma3_1b': 999_885_952,
}


@pytest.mark.parametrize('name', _PUBLISHED)
def test_presets_have_as_many_parameters_as_published(name):
  shapes = families.param_shapes(presets.preset(name))
  assert layers.num_params(shapes) == _PUBLISHED[name]
