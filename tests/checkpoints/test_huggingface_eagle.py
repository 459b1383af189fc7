"""EAGLE-3 folders are read and written as their makers have them, and what is
not computed is refused."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import (
  formats,
  huggingface,
  loading,
  safetensors_model,
)
from specdec_jax.cli.main import main
from specdec_jax.models import families
from specdec_jax.models.drafting.eagle import EagleConfig, feature_layers
from specdec_jax.models.llama import RopeScaling
from tests.checkpoints.huggingface_folders import rewrite
from tests.checkpoints.tiny_models import assert_trees_equal

pytest.importorskip('safetensors')

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'
SPELLINGS = ('safeailab', 'specforge', 'speculators', 'nemo')


def make_config(**changes) -> EagleConfig:
  config = EagleConfig(
    vocab_size=20,
    draft_vocab_size=9,
    embed_dim=8,
    target_embed_dim=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=12,
  )
  return dataclasses.replace(config, **changes)


def make_params(config: EagleConfig) -> dict:
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype),
    families.param_shapes(config),
  )
  ids = rng.permutation(config.vocab_size)[: config.draft_vocab_size]
  return params | {'target_ids': jnp.asarray(ids, jnp.int32)}


def read(folder, **options) -> tuple:
  return loading.read(folder, **options)


@pytest.fixture
def folder(tmp_path):
  """A folder with a tiny drafter, to be changed."""

  def copied(spelling: str) -> pathlib.Path:
    source = GOLDEN / f'tiny_eagle_{spelling}'
    return shutil.copytree(source, tmp_path / spelling)

  return copied


def change_json(folder, **changes) -> None:
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


LLAMA3 = RopeScaling(factor=8.0, original_max_positions=64)
IN_SAFEAILABS, IN_SPECULATORS = 'LlamaForCausalLMEagle3', 'Eagle3DraftModel'


@pytest.mark.parametrize(
  ('changes', 'architecture'),
  [
    ({}, IN_SAFEAILABS),
    ({'dtype': jnp.bfloat16, 'has_embedding': True}, IN_SAFEAILABS),
    (
      {
        'target_embed_dim': 6,
        'feature_layers': (1, 3),
        'fc_norm': True,
        'rope_scaling': LLAMA3,
        'norm_before_logits': False,
      },
      IN_SAFEAILABS,
    ),
    ({'fc_norm': True, 'norm_before_next': True}, IN_SPECULATORS),
    (
      {
        'norm_before_fc': True,
        'norm_before_residual': True,
        'has_qk_norm': True,
        'feature_layers': (1, 2, 5, 7),
      },
      IN_SPECULATORS,
    ),
  ],
)
def test_round_trip(tmp_path, changes, architecture):
  config = make_config(**changes)
  params = make_params(config)
  huggingface.save(tmp_path, config, params)
  loaded, loaded_params = read(tmp_path, dtype=config.dtype)
  assert loaded == config
  assert_trees_equal(loaded_params, params)
  stated = json.loads((tmp_path / 'config.json').read_text())
  assert stated['architectures'] == [architecture]


@pytest.mark.parametrize('spelling', SPELLINGS)
def test_folders_are_converted_there_and_back(tmp_path, capsys, spelling):
  source = str(GOLDEN / f'tiny_eagle_{spelling}')
  ours, back = str(tmp_path / 'ours'), str(tmp_path / 'back')
  assert main(['convert', source, ours, '--to', 'safetensors']) == 0
  assert main(['convert', ours, back, '--to', 'huggingface']) == 0
  assert 'without a vocabulary' in capsys.readouterr().out
  expected = loading.read(pathlib.Path(source))
  for folder in (tmp_path / 'ours', tmp_path / 'back'):
    config, params = read(folder)
    assert config == expected[0]
    assert_trees_equal(params, expected[1])


def test_a_drafter_of_all_tokens_has_them_in_order(tmp_path):
  config = make_config(draft_vocab_size=20)
  params = make_params(config)
  huggingface.save(tmp_path, config, params)
  loaded, in_order = read(tmp_path)
  assert loaded == config
  np.testing.assert_array_equal(in_order['target_ids'], np.arange(20))
  np.testing.assert_array_equal(
    in_order['logits_dense']['kernel'][:, params['target_ids']],
    params['logits_dense']['kernel'],
  )


def test_no_spelling_has_every_network(tmp_path):
  config = make_config(norm_before_residual=True, norm_before_logits=False)
  with pytest.raises(ValueError, match='no format has'):
    huggingface.save(tmp_path, config, make_params(config))


def test_a_drafter_is_no_whole_model_and_has_its_targets_vocabulary(folder):
  eagle = folder('nemo')
  with pytest.raises(ValueError, match=r'eagle.*is a drafter'):
    loading.read_config(eagle)
  words = ['--vocabulary', str(eagle)]
  target = str(eagle.parent / 'target')
  assert main(['convert', str(eagle), target, '--to', 'orbax', *words]) == 2


def test_defaults_of_transformers_are_those_of_speculators(folder):
  """Its files leave out what is the default."""
  eagle = folder('speculators')
  change_json(
    eagle,
    transformer_layer_config={'model_type': 'llama'},
    norm_before_fc=False,
  )
  config = formats.read_config(eagle)
  assert (config.embed_dim, config.mlp_dim, config.num_heads) == (
    4096,
    11_008,
    32,
  )
  assert (config.head_dim, config.vocab_size) == (128, 32_000)
  assert not config.has_qk_norm


@pytest.mark.parametrize(
  ('spelling', 'changes', 'message'),
  [
    (
      'specforge',
      {'architectures': ['Eagle3DeepseekV2ForCausalLM']},
      'DeepseekV2.*LlamaForCausalLMEagle3',
    ),
    ('safeailab', {'hidden_act': 'gelu'}, "hidden_act is 'gelu'"),
    ('safeailab', {'num_hidden_layers': 2}, 'num_hidden_layers is 2'),
    ('safeailab', {'attention_bias': True}, 'attention_bias is True'),
    ('safeailab', {'bias': True}, 'bias is True'),
    ('safeailab', {'draft_vocab_size': 41}, '41.*40'),
    ('safeailab', {'sliding_window': 64}, 'sliding_window is 64'),
    ('safeailab', {'use_sliding_window': True}, 'use_sliding_window is True'),
    (
      'safeailab',
      {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}},
      r"rope_scaling\.type is 'dynamic'.*llama3",
    ),
    ('safeailab', {'quantization_config': {'bits': 4}}, 'quantization_config'),
    ('safeailab', {'num_medusa_heads': 3}, 'num_medusa_heads is 3'),
    ('safeailab', {'num_aux_hidden_states': 1}, 'num_aux_hidden_states is 1'),
    (
      'specforge',
      {'eagle_config': {'use_aux_hidden_state': False}},
      r'eagle_config\.use_aux_hidden_state is False',
    ),
    (
      'specforge',
      {'eagle_config': {'parallel_draft_step': 4}},
      r'eagle_config\.parallel_draft_step is 4',
    ),
    ('specforge', {'eagle_config': {'depth': 7}}, r'eagle_config\.depth is 7'),
    (
      'specforge',
      {'eagle_aux_hidden_state_layer_ids': [1, 4, 8]},
      r'layer_ids is \[1, 4, 8\].*\[2, 5, 9\], 1 more',
    ),
    (
      'speculators',
      {'eagle_aux_hidden_state_layer_ids': [1, 5, 3, 8]},
      'ascend.*1, 5, 3, 8',
    ),
    (
      'speculators',
      {'eagle_aux_hidden_state_layer_ids': [0, 1, 5, 8]},
      'first.*0, 1, 5, 8',
    ),
    (
      'speculators',
      {'speculators_model_type': 'peagle'},
      "speculators_model_type is 'peagle'.*eagle3",
    ),
    (
      'speculators',
      {'speculators_config': {'algorithm': 'dflash'}},
      r"speculators_config\.algorithm is 'dflash'.*eagle3",
    ),
    (
      'speculators',
      {'transformer_layer_config': {'model_type': 'gemma'}},
      r"layer_config\.model_type is 'gemma'.*qwen3",
    ),
    (
      'speculators',
      {
        'transformer_layer_config': {
          'model_type': 'llama',
          'layer_types': ['sliding_attention'],
        }
      },
      r"layer_config\.layer_types is \['sliding_attention'\]",
    ),
    (
      'speculators',
      {
        'transformer_layer_config': {
          'model_type': 'llama',
          'num_hidden_layers': 2,
        }
      },
      r'layer_config\.num_hidden_layers is 2',
    ),
    ('speculators', {'fc_norm': True}, 'norm_before_fc.*fc_norm'),
    ('nemo', {'parallel_drafting': True}, 'parallel_drafting is True'),
    ('nemo', {'fc_norm': 'yes'}, "fc_norm is 'yes'"),
    ('nemo', {'hidden_size': None}, 'no hidden_size'),
  ],
)
def test_what_is_not_computed_is_refused(folder, spelling, changes, message):
  eagle = folder(spelling)
  change_json(eagle, **changes)
  with pytest.raises(ValueError, match=message) as error:
    read(eagle)
  assert 'config.json' in str(error.value)


def _keys(stated: dict, path: tuple[str, ...] = ()):
  """Every key of a configuration, as a path of keys."""
  for key, value in stated.items():
    yield *path, key
    if isinstance(value, dict):
      yield from _keys(value, (*path, key))


# What no network's arithmetic depends on: how files were made, how to train,
# how to generate and how to run.
WITHOUT_EFFECT = {
  'attention_dropout', 'attn_implementation', '_attn_implementation_autoset',
  'bos_token_id', 'eos_token_id', 'pad_token_id', 'dtype', 'torch_dtype',
  'initializer_range', 'pretraining_tp',
  'transformers_version', 'use_cache', 'embed_requires_grad',
  'speculators_version', 'accept_tolerance', 'default_proposal_method',
  'proposal_methods', 'proposal_type', 'speculative_tokens', 'verifier',
  'verifier_accept_k', 'name_or_path',
}  # fmt: skip


@pytest.mark.parametrize('spelling', SPELLINGS)
def test_no_key_is_overlooked(folder, spelling):
  """A value of a type that no key has is refused, wherever it stands."""
  eagle = folder(spelling)
  path = eagle / 'config.json'
  text = path.read_text()
  for keys in list(_keys(json.loads(text))):
    is_free = 'verifier' in keys or keys[-1] in WITHOUT_EFFECT
    stated = json.loads(text)
    place = stated
    for key in keys[:-1]:
      place = place[key]
    place[keys[-1]] = {'of no type': [1.5]}
    path.write_text(json.dumps(stated))
    if is_free:
      read(eagle)
      continue
    with pytest.raises(ValueError, match=keys[-1]):
      read(eagle)


QUERY = 'layers.0.self_attn.q_proj.weight'
BAD_TENSORS = {
  'no ids': (lambda t: t.pop('d2t'), 'no tensor d2t'),
  'no head': (lambda t: t.pop('lm_head.weight'), 'no lm_head.weight'),
  'no query': (lambda t: t.pop(QUERY), 'lacks .*midlayer.self_attn.q_proj'),
  'bias': (
    lambda t: t.update({'layers.0.self_attn.q_proj.bias': t[QUERY][0]}),
    'unexpected .*layers.0.self_attn.q_proj.bias',
  ),
  'query twice': (
    lambda t: t.update({f'model.{QUERY}': t[QUERY]}),
    f'both (model.)?{QUERY} and',
  ),
  'two features': (
    lambda t: t.update({'fc.weight': t['fc.weight'][:, :-16]}),
    r'fc.weight is \[16, 48\]',
  ),
  'ids as floats': (
    lambda t: t.update({'d2t': t['d2t'].astype(np.float32)}),
    'd2t is stored as float32',
  ),
  'ids of 64 bits': (
    lambda t: t.update({'d2t': t['d2t'] + 2**40}),
    'more than 32 bits',
  ),
  'ids beyond the vocabulary': (
    lambda t: t.update({'d2t': t['d2t'] + 40}),
    'target_ids are from 4. to 7.',
  ),
  'one id 12 times': (
    lambda t: t.update({'d2t': -np.arange(12)}),
    'token 0 12 times',
  ),
}


@pytest.mark.parametrize(
  ('change', 'message'), BAD_TENSORS.values(), ids=BAD_TENSORS
)
def test_bad_tensors_are_named(folder, change, message):
  eagle = folder('speculators')
  rewrite(eagle, change)
  with pytest.raises(ValueError, match=message) as error:
    read(eagle)
  assert str(eagle) in str(error.value)


def test_own_formats_refuse_the_same_ids(tmp_path):
  config = make_config()
  params = make_params(config)
  ids = params['target_ids'].at[3].set(params['target_ids'][5])
  safetensors_model.save(tmp_path, config, params | {'target_ids': ids})
  with pytest.raises(ValueError, match=r'target_ids.*\d+ 2 times'):
    read(tmp_path)


def test_a_head_that_is_the_embedding(folder):
  """As in a tied Llama whose whole vocabulary is drafted."""
  eagle = folder('nemo')
  rewrite(eagle, lambda t: t.pop('lm_head.weight'))
  _, params = read(eagle)
  np.testing.assert_array_equal(
    params['logits_dense']['kernel'].T, params['token_embedder']['embedding']
  )


def test_weights_of_torch_are_refused_with_the_way_out(folder):
  eagle = folder('safeailab')
  (eagle / 'model.safetensors').rename(eagle / 'pytorch_model.bin')
  with pytest.raises(ValueError, match=r'pytorch_model\.bin.*save_file'):
    read(eagle)


def test_norm_output_means_what_it_does_where_it_was_written(folder):
  specforge, nemo = folder('specforge'), folder('nemo')
  config = formats.read_config(specforge)
  assert (config.norm_before_logits, config.norm_before_next) == (False, False)
  change_json(specforge, norm_output=None)
  config = formats.read_config(specforge)
  assert (config.norm_before_logits, config.norm_before_next) == (True, False)
  config = formats.read_config(nemo)
  assert (config.norm_before_logits, config.norm_before_next) == (True, True)


def test_features_are_of_three_layers_unless_they_are_named():
  assert feature_layers(make_config(), 30) == (2, 15, 27)
  named = make_config(feature_layers=(4, 5))
  assert feature_layers(named, 5) == (4, 5)
  with pytest.raises(ValueError, match=r'ascend.*2, 2, 1'):
    feature_layers(make_config(), 4)
  with pytest.raises(ValueError, match=r'first.*-1, 2'):
    make_config(feature_layers=(-1, 2))
