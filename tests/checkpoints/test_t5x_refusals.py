"""T5X checkpoints that are incomplete or damaged are refused, and what is
wrong is named; writing never replaces one."""

import gzip
import json
import resource
import shutil

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax import serialization

from specdec_jax.checkpoints import orbax, stored_arrays, t5x
from tests.checkpoints.t5x_folders import (
  FORMATS,
  KERNEL,
  described,
  rewrite_specs,
)
from tests.checkpoints.tiny_t5 import make_config, make_params
from tests.edits import cut, edit_files, half

# The folder of a parameter in a legacy checkpoint.
ARRAY = f'target.{KERNEL.replace("/", ".")}'


def test_integers_are_refused():
  arrays = {'x': np.zeros(3, np.int32)}
  with pytest.raises(ValueError, match='as int32'):
    stored_arrays.read_tree(arrays, {'x': jnp.zeros(3)}, source='it')


CHUNK = f'{ARRAY}/0.0'
INCOMPLETE = f'checkpoint_7 is incomplete or damaged: array {KERNEL}'
DAMAGED_LEGACY = {
  'chunk cut': ({CHUNK: cut(-1000)}, f'{INCOMPLETE} cannot be read'),
  'no chunk': ({CHUNK: None}, f'{INCOMPLETE}.*is missing'),
  'no array': ({ARRAY: None}, f'{INCOMPLETE} cannot be opened'),
  'empty index': ({'checkpoint': b''}, 'truncated'),
  'index of 1 byte': ({'checkpoint': cut(1)}, 'truncated'),
  'index of 100 bytes': ({'checkpoint': cut(100)}, 'truncated'),
  'half of an index': ({'checkpoint': half}, 'truncated'),
  'index without its last byte': ({'checkpoint': cut(-1)}, 'truncated'),
  'index is a list': ({'checkpoint': b'\x92\x01\x02'}, 'it holds no names'),
  'no version': (
    {'checkpoint': msgpack.packb({'model': {}})},
    'has no version: expected 3',
  ),
  'version 2': (
    {'checkpoint': msgpack.packb({'optimizer': {'target': {}}, 'version': 2})},
    'version is 2',
  ),
  'no target': (
    {'checkpoint': msgpack.packb({'optimizer': {}, 'version': 3})},
    'holds no parameters',
  ),
}


@pytest.mark.parametrize(
  ('edits', 'message'), DAMAGED_LEGACY.values(), ids=DAMAGED_LEGACY
)
def test_damaged_legacy_checkpoints(legacy, shapes, edits, message):
  edit_files(legacy, edits)
  with pytest.raises(ValueError, match=message):
    t5x.read_target(legacy, shapes)


METADATA = 'state/_METADATA'
NO_TREE = r'_METADATA (is|holds|has) no '
DAMAGED_ORBAX = {
  'empty metadata': ({METADATA: ''}, NO_TREE),
  'no tree': ({METADATA: '{}'}, NO_TREE),
  'metadata is a list': ({METADATA: '[]'}, NO_TREE),
  'half of the metadata': ({METADATA: half}, NO_TREE),
  'data cut': ({'state/ocdbt.process_0/d/*': cut(100)}, r'incomplete.*array'),
  'no manifest': ({'state/manifest.ocdbt': None}, r'incomplete.*array'),
  'no metadata': ({METADATA: None}, 'not written'),
}


@pytest.mark.parametrize(
  ('edits', 'message'), DAMAGED_ORBAX.values(), ids=DAMAGED_ORBAX
)
def test_damaged_orbax_checkpoints(orbax_folder, shapes, edits, message):
  edit_files(orbax_folder, edits)
  with pytest.raises(ValueError, match=message):
    t5x.read_target(orbax_folder, shapes)


def _index(optimizer=None, **others) -> bytes:
  """What a checkpoint's index is as msgpack, with these fields."""
  usual = {'state': {'step': 7}, 'target': {}}
  contents = {'optimizer': usual | (optimizer or {}), 'version': 3}
  return msgpack.packb(contents | others)


def _array(shape, dtype, values) -> msgpack.ExtType:
  return msgpack.ExtType(1, msgpack.packb([shape, dtype, values]))


_BAD_INDICES = [
  (b'\x81\x80\x01', 'truncated'),
  (b'\x81\xa1a' * 5000 + b'\xc0', 'truncated'),
  (_index({'state': [7]}), r'optimizer\.state is \[7\]'),
  (_index({'target': 7}), r'optimizer\.target is 7'),
  (_index(version=_array([2], 'int8', b'33')), r'version is \[51, 51\]'),
  (_index(version=_array([], 'int8', b'3')), 'version is'),
  (_index({'target': {'x': msgpack.ExtType(5, b'')}}), 'x is .*code=5'),
  (_index(x=msgpack.ExtType(1, b'\x07')), 'no T5X checkpoint'),
  (_index(x=_array([1], 'nope', b'1234')), 'nope'),
  (_index(x=_array([1], 'object', b'12345678')), 'OBJECT'),
  (_index(x=_array([1], {}, b'1234')), 'no T5X checkpoint'),
  (_index(x=_array('x', 'int8', b'1234')), 'no T5X checkpoint'),
  (_index(x=_array([2], 'int8', b'1234')), 'cannot reshape'),
  (_index(x=_array([2], 'int8', 5)), 'no T5X checkpoint'),
  (_index({'state': {'step': 'x'}}), "step is 'x'"),
  (_index({'state': {'step': _array([2], 'int8', b'33')}}), 'an integer'),
  (_index({'target': {'x': None}}), r'has no .*\.x\.path'),
]


@pytest.mark.parametrize(
  ('content', 'message'), _BAD_INDICES, ids=[m for _, m in _BAD_INDICES]
)
def test_an_index_of_other_things(legacy, content, message):
  (legacy / 'checkpoint').write_bytes(content)

  def read():
    t5x.read_step(legacy)
    described(legacy)

  with pytest.raises(ValueError, match=message) as error:
    read()
  assert str(error.value).startswith(str(legacy))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'driver': 'n5'}, "driver is 'n5'"),
    ({'kvstore': 'file'}, "kvstore is 'file'"),
    ({'metadata': 5}, 'metadata is 5'),
    ({'metadata': {'shape': 'x'}}, "shape is 'x'"),
    ({'metadata': {'shape': [2**60]}}, 'shape is'),
    ({'kvstore': {'path': 5}}, 'path is 5'),
  ],
)
def test_specs_of_other_things(legacy, change, message):
  rewrite_specs(legacy, lambda name, spec: spec | change)
  with pytest.raises(ValueError, match=f'checkpoint: .*{message}'):
    described(legacy)


def test_a_chunk_larger_than_its_array_is_refused(legacy, shapes):
  """Memory for a whole chunk is taken; for one too large the process aborts."""
  folder = legacy / ARRAY
  metadata = json.loads((folder / '.zarray').read_text())
  message = f'array {KERNEL} cannot be opened .its chunks are .*it is 64x128'
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # The second is 1 MB of gzip that inflates to 1 GiB.
  for rows, content in ((2**40, b''), (2**21, gzip.compress(bytes(2**30), 1))):
    chunks = {'chunks': [rows, 128]}
    (folder / '.zarray').write_text(json.dumps(metadata | chunks))
    (folder / '0.0').write_bytes(content)
    with pytest.raises(ValueError, match=message):
      t5x.read_target(legacy, shapes)
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert grown * 1024 < 100 * 2**20


@pytest.mark.parametrize('path', ['../../etc', '', None])
def test_paths_that_lead_elsewhere(legacy, shapes, path):
  kvstore = {'driver': 'file'} | ({} if path is None else {'path': path})
  rewrite_specs(legacy, lambda name, spec: {**spec, 'kvstore': kvstore})
  with pytest.raises(ValueError, match=r'\.path(:| is)'):
    t5x.read_target(legacy, shapes)


@pytest.mark.parametrize(
  ('path', 'message'),
  [
    ('s3://bucket/checkpoint_7', 'local disk'),
    ('none', 'no folder'),
    ('unfinished/checkpoint_7.tmp-123', 'unfinished, temporary'),
    ('unfinished/checkpoint_7.orbax-checkpoint-tmp-1', 'unfinished, temporary'),
    ('unfinished', 'no finished checkpoint'),
    ('checkpoint_7', 'folder state'),
    ('empty', 'no finished checkpoint_N'),
  ],
)
def test_folders_that_are_no_checkpoint(tmp_path, legacy, path, message):
  for name in ('checkpoint_7.tmp-123', 'checkpoint_7.orbax-checkpoint-tmp-1'):
    shutil.copytree(legacy, tmp_path / 'unfinished' / name)
  (legacy / 'checkpoint').unlink()
  (tmp_path / 'empty').mkdir()
  if '://' not in path:
    path = tmp_path / path
  assert t5x.layout_of(path) is None
  with pytest.raises(ValueError, match=message):
    t5x.find(path)


@pytest.mark.parametrize('format', FORMATS)
def test_writing_never_replaces_or_leaves_a_half(tmp_path, monkeypatch, format):
  config = make_config()
  params = make_params(config)
  t5x.write_target(tmp_path, params, step=1, format=format)
  with pytest.raises(ValueError, match='checkpoint_1 already exists'):
    t5x.write_target(tmp_path, params, step=1, format=format)

  def fail(*args, **kwargs):
    raise KeyboardInterrupt

  monkeypatch.setattr(serialization, 'msgpack_serialize', fail)
  monkeypatch.setattr(orbax, 'write_tree', fail)
  with pytest.raises(KeyboardInterrupt):
    t5x.write_target(tmp_path, params, step=2, format=format)
  assert [p.name for p in tmp_path.iterdir()] == ['checkpoint_1']
