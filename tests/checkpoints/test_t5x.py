"""T5X's checkpoints are read and written as T5X does."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax.checkpoints import stored_arrays, t5x
from specdec_jax.checkpoints.t5x import legacy as t5x_legacy
from specdec_jax.checkpoints.t5x import scanned
from specdec_jax.models import families
from specdec_jax.sharding import mesh as mesh_lib
from tests.checkpoints.t5x_folders import (
  FORMATS,
  KERNEL,
  described,
  rewrite_specs,
)
from tests.checkpoints.tiny_models import assert_trees_equal
from tests.checkpoints.tiny_t5 import (
  SCANNED_CONFIG,
  T5X,
  T5X_CONFIG,
  make_config,
  make_params,
)


@pytest.fixture(scope='module')
def params(shapes):
  return t5x.read_target(T5X / 't5x_legacy', shapes)


@pytest.fixture(params=FORMATS)
def checkpoint(request, tmp_path):
  """A copy of what T5X wrote, to be spoilt."""
  folder = tmp_path / 'checkpoint_7'
  shutil.copytree(T5X / f't5x_{request.param}' / 'checkpoint_7', folder)
  return folder


def with_leaf(tree, name, leaf):
  """A copy of a tree with another leaf at a name; None removes it."""
  leaves = stored_arrays.flatten(tree) | {name: leaf}
  kept = {k: v for k, v in leaves.items() if v is not None}
  return traverse_util.unflatten_dict(kept, sep='/')


def test_both_formats_hold_the_same_parameters(shapes, params):
  from_orbax = t5x.read_target(T5X / 't5x_orbax', shapes)
  assert_trees_equal(from_orbax, params)
  leaves = jax.tree.leaves(params)
  assert (len(leaves), sum(leaf.size for leaf in leaves)) == (52, 214_016)
  assert all(float(jnp.std(leaf)) > 0 for leaf in leaves)


@pytest.mark.parametrize('format', FORMATS)
def test_metadata(shapes, format):
  path = T5X / f't5x_{format}' / 'checkpoint_7'
  assert described(path) == stored_arrays.flatten(shapes)
  assert t5x.read_step(path) == 7


def test_legacy_files_are_those_of_t5x_byte_for_byte(tmp_path, params):
  t5x.write_target(tmp_path, params, step=7)
  original = T5X / 't5x_legacy'
  names = {str(p.relative_to(original)) for p in original.rglob('*')}
  assert names == {str(p.relative_to(tmp_path)) for p in tmp_path.rglob('*')}
  for name in names:
    if (original / name).is_file():
      written = (tmp_path / name).read_bytes()
      assert written == (original / name).read_bytes(), name


def test_orbax_itself_reads_what_is_written(tmp_path, params):
  checkpoint = t5x.write_target(tmp_path, params, step=7, format='orbax')
  ocp = pytest.importorskip('orbax.checkpoint')
  args = ocp.RestoreArgs(restore_type=np.ndarray)
  for state in (checkpoint / 'state', T5X / 't5x_orbax/checkpoint_7/state'):
    reader = ocp.PyTreeCheckpointer()
    tree = reader.metadata(state).item_metadata.tree
    assert set(tree) == {'state', 'target'}
    restored = reader.restore(
      state,
      restore_args=jax.tree.map(
        lambda leaf: args, {'state': tree['state'], 'target': tree['target']}
      ),
    )
    assert int(restored['state']['step']) == 7
    assert restored['state']['param_states'] == {}
    assert_trees_equal(restored['target'], jax.tree.map(np.asarray, params))


@pytest.mark.parametrize('format', FORMATS)
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_round_trip(tmp_path, format, dtype):
  config = make_config(dtype=dtype)
  params = make_params(config)
  path = t5x.write_target(tmp_path / 'new', params, step=12, format=format)
  assert path == tmp_path / 'new' / 'checkpoint_12'
  assert_trees_equal(
    t5x.read_target(path, families.param_shapes(config)), params
  )
  assert t5x.read_step(path) == 12
  assert described(path)[KERNEL].dtype == dtype


@pytest.mark.parametrize('format', FORMATS)
def test_reading_casts(shapes, params, format):
  expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
  path = T5X / f't5x_{format}'
  halves = families.param_shapes(T5X_CONFIG, jnp.bfloat16)
  assert_trees_equal(t5x.read_target(path, halves), expected)


def test_the_newest_finished_step_is_taken(tmp_path):
  config = make_config()
  for step in (9, 10, 100):
    t5x.write_target(tmp_path, make_params(config, step), step=step)
  (tmp_path / 'checkpoint_1000.tmp-17').mkdir()
  (tmp_path / 'checkpoint_999').mkdir()
  (tmp_path / 'config.gin').write_text('')
  assert t5x.find(tmp_path) == tmp_path / 'checkpoint_100'
  assert t5x.find(tmp_path / 'checkpoint_9').name == 'checkpoint_9'
  file = tmp_path / 'checkpoint_10' / 'checkpoint'
  assert t5x.find(file).name == 'checkpoint_10'
  assert_trees_equal(
    t5x.read_target(tmp_path, families.param_shapes(config)),
    make_params(config, 100),
  )


def on_a_bucket(name, spec):
  bucket = {'driver': 'gcs', 'bucket': 't5x-dummy-bucket'}
  return {**spec, 'kvstore': {**bucket, 'path': spec['kvstore']['path']}}


def by_an_old_tensorstore(name, spec):
  bucket = {'driver': 'gcs', 'bucket': 't5x-dummy-bucket'}
  return {**spec, 'kvstore': bucket, 'path': spec['kvstore']['path'][:-1]}


@pytest.mark.parametrize('change', [on_a_bucket, by_an_old_tensorstore])
def test_specs_of_other_places_are_read_here(legacy, shapes, params, change):
  rewrite_specs(legacy, change)
  assert_trees_equal(t5x.read_target(legacy, shapes), params)


def test_inline_arrays(legacy, shapes, params):
  leaves = stored_arrays.flatten(params)

  def change(name, spec):
    if not name.endswith('scale'):
      return spec
    shutil.rmtree(legacy / spec['kvstore']['path'])
    return np.asarray(leaves[name])

  rewrite_specs(legacy, change)
  assert_trees_equal(t5x.read_target(legacy, shapes), params)
  assert described(legacy) == stored_arrays.flatten(shapes)


class Recorded:
  """A stored array that remembers which slices were read."""

  def __init__(self, values):
    self.values, self.slices = values, []
    self.shape, self.dtype = values.shape, values.dtype

  def __getitem__(self, index):
    self.slices.append(
      tuple(s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True))
    )
    return self.values[index]


def test_devices_get_their_slices_and_copies_are_read_once():
  mesh = jax.make_mesh(
    (2, 4),
    ('data', 'model'),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  values = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
  arrays = {name: Recorded(values) for name in ('split', 'whole', 'columns')}
  specs = {'split': ('data', 'model'), 'whole': (), 'columns': (None, 'model')}
  expected = {
    name: jax.ShapeDtypeStruct(
      (8, 16),
      jnp.bfloat16,
      sharding=NamedSharding(mesh, PartitionSpec(*spec)),
    )
    for name, spec in specs.items()
  }
  tree = stored_arrays.read_tree(arrays, expected, source='it')
  for name, leaf in tree.items():
    assert leaf.sharding == expected[name].sharding
    np.testing.assert_array_equal(leaf, values.astype(jnp.bfloat16))
  columns = [(start, start + 4) for start in range(0, 16, 4)]
  assert sorted(arrays['columns'].slices) == [((0, 8), c) for c in columns]
  assert sorted(arrays['split'].slices) == [
    (rows, c) for rows in ((0, 4), (4, 8)) for c in columns
  ]
  assert arrays['whole'].slices == [((0, 8), (0, 16))]


@pytest.mark.parametrize('format', FORMATS)
def test_sharded_reading_equals_unsharded(shapes, params, format):
  mesh = jax.make_mesh(
    (8,), ('model',), axis_types=(jax.sharding.AxisType.Auto,)
  )

  def shard(leaf):
    spec = PartitionSpec(*[None] * (len(leaf.shape) - 1), 'model')
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  expected = jax.tree.map(shard, shapes)
  sharded = t5x.read_target(T5X / f't5x_{format}', expected)
  assert_trees_equal(sharded, params)
  kernel = stored_arrays.flatten(sharded)[KERNEL]
  assert {s.data.shape for s in kernel.addressable_shards} == {(64, 16)}


def test_large_arrays_are_written_in_chunks(tmp_path, monkeypatch):
  assert t5x_legacy.chunk_shape((32_128, 4096)) == [2008, 2048]
  assert t5x_legacy.chunk_shape((24, 16)) == [24, 16]
  monkeypatch.setattr(t5x_legacy, '_CHUNK_ELEMENTS', 100)
  config = make_config()
  params = make_params(config)
  path = t5x.write_target(tmp_path, params, step=1)
  folder = path / f'target.{KERNEL.replace("/", ".")}'
  assert len(list(folder.iterdir())) == 5
  assert_trees_equal(
    t5x.read_target(path, families.param_shapes(config)), params
  )


UNFITTING = {
  'arrays are missing': (
    lambda shapes: families.param_shapes(make_config(num_decoder_layers=3)),
    r'lacks 14 .*decoder/layers_2/.*10 more',
  ),
  'an array too many': (
    lambda shapes: with_leaf(shapes, KERNEL, None),
    rf'has 1 .*{KERNEL}',
  ),
  'another shape': (
    lambda shapes: with_leaf(
      shapes, KERNEL, jax.ShapeDtypeStruct((64, 256), jnp.float32)
    ),
    rf'{KERNEL} is \[64, 128\], expected \[64, 256\]',
  ),
}


@pytest.mark.parametrize(
  ('change', 'message'), UNFITTING.values(), ids=UNFITTING
)
def test_arrays_that_differ_are_listed(checkpoint, shapes, change, message):
  with pytest.raises(ValueError, match=message):
    t5x.read_target(checkpoint, change(shapes))


SCANNED_KERNEL = 'encoder/encoder/attention/query/kernel'


def test_scanned_layers_are_stored_as_t5x_stores_them(tmp_path):
  original = T5X / 't5x_scanned'
  params = t5x.read_target(original, families.param_shapes(SCANNED_CONFIG))
  path = t5x.write_target(tmp_path, params, step=3)
  assert described(path) == described(original)
  for file in (original / 'checkpoint_3').glob('*/*'):
    written = path / file.relative_to(original / 'checkpoint_3')
    assert written.read_bytes() == file.read_bytes(), file.parent.name


@pytest.mark.parametrize('format', FORMATS)
def test_scanned_layers_are_written_and_read(tmp_path, format):
  config = make_config(has_layer_relpos=True)
  params = make_params(config)
  path = t5x.write_target(tmp_path, params, step=1, format=format)
  assert described(path)[SCANNED_KERNEL].shape == (16, 2, 2, 4)
  assert described(path)['decoder/decoder/self_attention/out/kernel'].shape == (
    2, 1, 4, 16,
  )  # fmt: skip
  shapes = families.param_shapes(config)
  assert_trees_equal(t5x.read_target(path, shapes), params)


def mesh_of(num_partitions: int):
  return jax.make_mesh(
    (8 // num_partitions, num_partitions),
    ('data', 'model'),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )


@pytest.mark.parametrize(('num_partitions', 'heads'), [(2, 'model'), (8, None)])
def test_heads_that_do_not_divide_are_read_whole(num_partitions, heads):
  sharding = NamedSharding(
    mesh_of(num_partitions), PartitionSpec(None, 'model')
  )
  shapes = {
    'encoder/layers_0/attention/query/kernel': jax.ShapeDtypeStruct(
      (16, 8), jnp.float32, sharding=sharding
    ),
    'encoder/layers_0/relpos_bias/rel_embedding': jax.ShapeDtypeStruct(
      (2, 32), jnp.float32
    ),
  }
  stored = scanned.stacked_shapes(shapes)[SCANNED_KERNEL]
  assert stored.shape == (16, 1, 2, 4)
  assert stored.sharding.spec == PartitionSpec(None, None, heads, None)


def test_scanned_layers_are_read_in_slices():
  shapes = families.param_shapes(SCANNED_CONFIG)
  shardings = mesh_lib.parameter_shardings(mesh_of(2), shapes)
  expected = jax.tree.map(
    lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings
  )
  sharded = t5x.read_target(T5X / 't5x_scanned', expected)
  whole = t5x.read_target(T5X / 't5x_scanned', shapes)
  assert_trees_equal(sharded, whole)
  jax.tree.map(
    lambda leaf, sharding: (
      sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
      or pytest.fail(str(leaf.sharding))
    ),
    sharded,
    shardings,
  )


def test_scanned_layers_need_sizes_with_positions_of_their_own():
  config = dataclasses.replace(SCANNED_CONFIG, has_layer_relpos=False)
  with pytest.raises(ValueError, match=r'stacked.*has_layer_relpos'):
    t5x.read_target(T5X / 't5x_scanned', families.param_shapes(config))
