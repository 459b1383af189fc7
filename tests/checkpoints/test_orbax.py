"""Our own checkpoints: Orbax's tree of parameters with model.json beside it."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax.checkpoints import model_file, orbax
from specdec_jax.models import families
from tests.checkpoints import tiny_models
from tests.checkpoints.tiny_models import assert_trees_equal
from tests.checkpoints.tiny_t5 import make_config, make_params


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp('orbax') / 'model'
  config = make_config()
  orbax.save(folder, config, make_params(config))
  return folder


@pytest.fixture
def folder(saved, tmp_path):
  """A copy, to be spoilt."""
  return shutil.copytree(saved, tmp_path / 'model')


@pytest.mark.parametrize(
  'config',
  [
    make_config(dtype=jnp.bfloat16, is_tied=True, mlp_activations=('relu',)),
    make_config(num_encoder_layers=0),
    tiny_models.make_config(),
  ],
  ids=['t5', 'decoder_only', 'llama'],
)
def test_round_trip(tmp_path, config):
  params = make_params(config)
  folder = tmp_path / 'new'
  orbax.save(folder, config, params)
  assert orbax.is_checkpoint(folder)
  loaded = model_file.read(folder)
  assert loaded == config
  assert hash(loaded) == hash(config)
  shapes = families.param_shapes(loaded)
  assert_trees_equal(orbax.restore(folder, shapes), params)
  with pytest.raises(ValueError, match='already holds parameters'):
    orbax.save(folder, config, params)
  with pytest.raises(ValueError, match='as patterns'):
    orbax.save(tmp_path / 'new[1]', config, params)


def test_restoring_shards_and_casts(saved):
  config = make_config()
  mesh = jax.make_mesh(
    (4,),
    ('model',),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:4],
  )
  expected = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape,
      jnp.bfloat16,
      sharding=NamedSharding(
        mesh, PartitionSpec('model' if leaf.shape[0] % 4 == 0 else None)
      ),
    ),
    families.param_shapes(config),
  )
  params = orbax.restore(saved, expected)
  assert_trees_equal(
    params,
    jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params(config)),
  )
  embedding = params['token_embedder']['embedding']
  assert {s.data.shape for s in embedding.addressable_shards} == {(8, 16)}


def test_the_dtype_can_be_another_than_that_written(saved):
  assert model_file.read(saved).dtype == jnp.float32
  assert model_file.read(saved, dtype=jnp.bfloat16) == make_config(
    dtype=jnp.bfloat16
  )


def test_an_incomplete_folder(folder):
  shapes = families.param_shapes(make_config())
  shutil.rmtree(folder / 'params' / 'ocdbt.process_0')
  with pytest.raises(ValueError, match='incomplete or damaged'):
    orbax.restore(folder, shapes)
  shutil.rmtree(folder / 'params')
  assert not orbax.is_checkpoint(folder)
  with pytest.raises(ValueError, match='not written'):
    orbax.restore(folder, shapes)


def _entry(*keys, **value) -> dict:
  names = [{'key': key, 'key_type': 2} for key in keys]
  return {'key_metadata': names, 'value_metadata': value}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'tree_metadata': 5}, 'tree_metadata is 5'),
    ({'tree_metadata': {'x': 5}}, 'x is 5'),
    ({'tree_metadata': {'x': {}}}, 'the keys'),
    ({'tree_metadata': {'x': _entry()}}, 'the keys'),
    ({'tree_metadata': {'x': _entry(3)}}, r'the keys \[3\]'),
    ({'tree_metadata': {'x': _entry('..')}}, 'the keys'),
    ({'tree_metadata': {'x': _entry('\ud800')}}, 'the keys'),
    (
      {'tree_metadata': {'x': _entry('a', skip_deserialize=1)}},
      'skip_deserialize is 1',
    ),
    ({'use_ocdbt': 'no'}, "use_ocdbt is 'no'"),
    ({'use_zarr3': []}, r'use_zarr3 is \[\]'),
  ],
)
def test_trees_of_other_things(folder, changes, message):
  path = folder / 'params' / '_METADATA'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  with pytest.raises(ValueError, match=message) as error:
    orbax.open_tree(folder / 'params')
  assert str(error.value).startswith(str(path))


def test_metadata_that_does_not_state_ocdbt(folder):
  """As of Orbax of 2024, whose own reader looks for the manifest."""
  path = folder / 'params' / '_METADATA'
  stated = json.loads(path.read_text())
  assert stated.pop('use_ocdbt') is True
  path.write_text(json.dumps(stated))
  params = orbax.restore(folder, families.param_shapes(make_config()))
  assert_trees_equal(params, make_params(make_config()))


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('[' * 100_000, 'is no JSON'),
    ('[]', 'holds no JSON object'),
  ],
)
def test_damaged_metadata(folder, text, message):
  (folder / 'params' / '_METADATA').write_text(text)
  with pytest.raises(ValueError, match=f'_METADATA {message}'):
    orbax.open_tree(folder / 'params')


def test_keys_that_lead_out_of_the_folder_are_refused(folder):
  path = folder / 'params' / '_METADATA'
  path.write_text(path.read_text().replace('"token_embedder"', '"../../other"'))
  with pytest.raises(ValueError, match=r"the keys \['\.\./\.\./other'"):
    orbax.open_tree(folder / 'params')


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'network': 'gpt'}, "'gpt'.*llama"),
    ({'config': None}, 'missing.*vocab_size'),
    ({'config': 5}, 'config is 5'),
    ({'heads': 3}, 'T5Config.*heads'),
    ({'num_heads': None}, 'missing.*num_heads'),
    ({'num_heads': 0}, r'config\.num_heads is 0'),
    ({'num_encoder_layers': 10**9}, '1000000000.* to 1000'),
    ({'relpos_max_distance': 2**30}, 'is 1073741824.*1048576'),
    ({'mlp_activations': ['swish']}, r"\['swish'\]"),
    ({'mlp_activations': []}, r'is \[\]'),
    ({'num_heads': True}, 'num_heads is True'),
    ({'vocab_size': -1}, 'vocab_size is -1'),
    ({'is_tied': 1}, 'is_tied is 1'),
    ({'mlp_activations': 'gelu'}, "mlp_activations is 'gelu'"),
    ({'dtype': 'int8'}, "dtype is 'int8'"),
  ],
)
def test_bad_sizes_are_refused(folder, change, message):
  path = folder / 'model.json'
  contents = json.loads(path.read_text())
  if not set(change) <= set(contents):
    change = {'config': contents['config'] | change}
  path.write_text(json.dumps(contents | change))
  with pytest.raises(ValueError, match=message):
    model_file.read(folder)


def test_missing_sizes_are_named(folder):
  path = folder / 'model.json'
  path.write_text('{"network": "t5", "config": {"embed_dim": 8}}')
  with pytest.raises(ValueError, match=r'vocab_size.*num_encoder_layers'):
    model_file.read(folder)
  path.unlink()
  with pytest.raises(ValueError, match=r'cannot read .*model\.json'):
    model_file.read(folder)
