"""Networks that is a drafter have, and models that Hugging Face has not, in
one file of safetensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('orbax.checkpoint')

from specdec_jax import lazy
from specdec_jax.checkpoints import (
  loading,
  model_file,
  orbax,
  pretrained,
  safetensors_model,
  stored_arrays,
)
from specdec_jax.models import families, products
from tests import toy_block, toy_t5
from tests.cli.tiny import assert_refused
from tests.edits import cut, edit_files

V = 12
NETWORKS = {
  'spec_drafter': toy_block.config(V),
  'decoder_only': toy_t5.config(V, num_encoder_layers=0),
}
for rows in lazy.installed('tests.contrib.block_heads.contract_rows:CONVERTED'):
  NETWORKS |= rows


def weights(config):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
    families.param_shapes(config),
  )


def assert_same_bits(params, expected):
  params, expected = map(stored_arrays.flatten, (params, expected))
  assert set(params) == set(expected)
  for name, leaf in expected.items():
    assert params[name].dtype == leaf.dtype
    np.testing.assert_array_equal(params[name], leaf, name)


def read(folder, config, dtype):
  return loading.read(folder, dtype=dtype)


# Linen's LayerNorm promotes bfloat16 to float32 by itself.
@jax.numpy_dtype_promotion('standard')
@pytest.mark.parametrize('name', NETWORKS)
def test_there_and_back(run, tmp_path, name):
  config = NETWORKS[name]
  params = weights(config)
  orbax.save(tmp_path / 'run', config, params)
  for source, to in (('run', 'safetensors'), ('safetensors', 'orbax')):
    result = run('convert', tmp_path / source, tmp_path / to, '--to', to)
    assert result.status == 0, result
    found, loaded = read(tmp_path / to, config, jnp.float32)
    assert found == config
    assert_same_bits(loaded, params)
  for source, to in (('run', 'half'), ('half', 'same')):
    result = run(
      *('convert', tmp_path / source, tmp_path / to),
      *('--to', 'safetensors', '--dtype', 'bfloat16'),
    )
    assert result.status == 0, result
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    _, loaded = read(tmp_path / to, config, jnp.bfloat16)
    assert_same_bits(loaded, rounded)
  assert model_file.read(tmp_path / 'half').dtype == jnp.bfloat16
  sizes = [
    (tmp_path / name / 'model.safetensors').stat().st_size
    for name in ('half', 'safetensors')
  ]
  assert sizes[0] < 0.75 * sizes[1]


def test_formats_that_have_no_such_network(run, tmp_path):
  for name, words in (
    ('spec_drafter', 'Hugging Face has no block_decoder'),
    ('decoder_only', 'no T5 without an encoder'),
  ):
    source = tmp_path / name
    safetensors_model.save(source, NETWORKS[name], weights(NETWORKS[name]))
    result = run('convert', source, tmp_path / 'x', '--to', 'huggingface')
    assert_refused(result, words)
  result = run(
    'convert', tmp_path / 'spec_drafter', tmp_path / 'x', '--to', 't5x_orbax'
  )
  assert_refused(result, 'T5s alone')


@pytest.mark.parametrize(
  ('sizes', 'edits', 'message'),
  [
    ({}, {'model.safetensors': cut(-100)}, 'incomplete'),
    ({'num_decoder_layers': 3}, {}, r'lacks.*layers_2/'),
    ({'mlp_dim': 16}, {}, r'mlp/.*\['),
  ],
)
def test_damage_is_named(tmp_path, sizes, edits, message):
  config = NETWORKS['spec_drafter']
  safetensors_model.save(tmp_path, config, weights(config))
  model_file.write(tmp_path, toy_block.config(V, **sizes))
  edit_files(tmp_path, edits)
  with pytest.raises(ValueError, match=message):
    loading.read(tmp_path)


def test_shipped_models_have_names_and_share_a_vocabulary(
  request, tmp_path, monkeypatch
):
  golden = request.config.rootpath / 'tests' / 'golden' / 't5x'
  config = toy_t5.config(128, num_encoder_layers=0)
  drafter = toy_block.config(128)
  monkeypatch.setattr(pretrained, 'FOLDER', tmp_path)
  safetensors_model.save(tmp_path / 'lm-tiny', config, weights(config))
  safetensors_model.save(tmp_path / 'draft-tiny', drafter, weights(drafter))
  (tmp_path / 'begun').mkdir()
  assert pretrained.names() == ('draft-tiny', 'lm-tiny')
  with pytest.raises(ValueError, match='no vocabulary'):
    loading.load('lm-tiny')
  (tmp_path / 'spiece.model').write_bytes(
    (golden / 'tiny_sp.model').read_bytes()
  )
  (tmp_path / 'tokenizer_config.json').write_text('{"extra_ids": 0}')
  model = loading.load('lm-tiny')
  assert model.vocabulary.vocab_size == 85
  expected = products.with_cpu_copies(weights(config), is_tied=config.is_tied)
  assert_same_bits(model.params, expected)
  assert_same_bits(
    loading.read(loading.locate('draft-tiny'))[1],
    weights(drafter),
  )
  with pytest.raises(ValueError, match='is a drafter'):
    loading.load('draft-tiny')
  with pytest.raises(ValueError, match='smollm2-135m, draft-tiny'):
    loading.load('lm-tini')
