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
from tests.edits import change_json, edit_files


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


def _tree(**entries):
  return change_json(tree_metadata=entries)


def _other_name(contents: bytes) -> bytes:
  return contents.replace(b'"token_embedder"', b'"../../other"')


BAD_TREES = {
  'no tree': (change_json(tree_metadata=5), 'tree_metadata is 5'),
  'a number': (_tree(x=5), 'x is 5'),
  'no keys': (_tree(x={}), 'the keys'),
  'no key': (_tree(x=_entry()), 'the keys'),
  'a number as key': (_tree(x=_entry(3)), r'the keys \[3\]'),
  'parent folder': (_tree(x=_entry('..')), 'the keys'),
  'surrogate': (_tree(x=_entry('\ud800')), 'the keys'),
  'path out of the folder': (_other_name, r"the keys \['\.\./\.\./other'"),
  'skip_deserialize': (
    _tree(x=_entry('a', skip_deserialize=1)),
    'skip_deserialize is 1',
  ),
  'use_ocdbt': (change_json(use_ocdbt='no'), "use_ocdbt is 'no'"),
  'use_zarr3': (change_json(use_zarr3=[]), r'use_zarr3 is \[\]'),
  'nested too deeply': ('[' * 100_000, '_METADATA is no JSON'),
  'a list': ('[]', '_METADATA holds no JSON object'),
}


@pytest.mark.parametrize(
  ('metadata', 'message'), BAD_TREES.values(), ids=BAD_TREES
)
def test_trees_of_other_things(folder, metadata, message):
  edit_files(folder, {'params/_METADATA': metadata})
  with pytest.raises(ValueError, match=message) as error:
    orbax.open_tree(folder / 'params')
  assert str(error.value).startswith(f'{folder}/params/_METADATA')


def test_metadata_that_does_not_state_ocdbt(folder):
  """As of Orbax of 2024, whose own reader looks for the manifest."""
  path = folder / 'params' / '_METADATA'
  stated = json.loads(path.read_text())
  assert stated.pop('use_ocdbt') is True
  path.write_text(json.dumps(stated))
  params = orbax.restore(folder, families.param_shapes(make_config()))
  assert_trees_equal(params, make_params(make_config()))


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
  contents = json.loads((folder / 'model.json').read_text())
  if not set(change) <= set(contents):
    change = {'config': contents['config'] | change}
  edit_files(folder, {'model.json': change_json(**change)})
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
