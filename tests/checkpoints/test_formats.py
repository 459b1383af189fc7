"""A format is one row: with it every door reads and writes it."""

import json

import jax
import numpy as np
import pytest
from flax import traverse_util

from specdec_jax.checkpoints import (
  formats,
  loading,
  safetensors_folder,
  stored_arrays,
)
from specdec_jax.cli.main import main
from specdec_jax.models.t5 import T5Config
from tests.checkpoints import tiny_t5

SIZES, ARRAYS = 'sizes.json', 'arrays.npz'


def read_sizes(path, dtype):
  values = json.loads((path / SIZES).read_text())
  activations = tuple(values.pop('mlp_activations'))
  return T5Config(**values, mlp_activations=activations, dtype=dtype)


def read_arrays(path, config):
  with np.load(path / ARRAYS) as arrays:
    leaves = {k: jax.numpy.asarray(v, config.dtype) for k, v in arrays.items()}
  return traverse_util.unflatten_dict(leaves, sep='/')


def write(folder, config, params, step):
  del step
  sizes = {name: getattr(config, name) for name in config.__dataclass_fields__}
  del sizes['dtype']
  (folder / SIZES).write_text(json.dumps(sizes))
  np.savez(folder / ARRAYS, **stored_arrays.flatten(params))


NPZ = formats.Format(
  name='npz',
  matches=lambda path: (path / SIZES).is_file(),
  read_config=read_sizes,
  read_params=read_arrays,
  write=write,
  files=(SIZES, ARRAYS),
)


def test_a_new_format_is_one_row(tmp_path, monkeypatch, capsys):
  pytest.importorskip('sentencepiece')
  pytest.importorskip('safetensors')
  monkeypatch.setattr(formats, 'FORMATS', (*formats.FORMATS, NPZ))
  ours, npz, back = (str(tmp_path / name) for name in ('ours', 'npz', 'back'))
  for source, folder, to in (
    ('ende-nano', ours, 'safetensors'),
    (ours, npz, 'npz'),
    (npz, back, 'safetensors'),
  ):
    assert main(['convert', source, folder, '--to', to]) == 0
  first, model = loading.load(ours), loading.load(npz)
  assert model.config == first.config
  assert model.vocabulary.tokens() == first.vocabulary.tokens()
  stored = [tmp_path / name / 'model.safetensors' for name in ('ours', 'back')]
  assert stored[0].read_bytes() == stored[1].read_bytes()
  assert f'wrote {npz} (npz)' in capsys.readouterr().out
  again = ['convert', back, npz, '--to', 'npz']
  assert main([*again, '--overwrite']) == 0
  assert main([*again, '--overwrite', '--step', '1']) == 2
  assert '--step' in (capsys.readouterr().err)


def test_the_first_format_that_matches_is_taken(tmp_path):
  """A folder of ours stays one with what another format is known by."""
  named = {each.name: each for each in formats.FORMATS}
  config = tiny_t5.make_config()
  named['safetensors'].write(tmp_path, config, tiny_t5.make_params(config), 0)
  (tmp_path / 'config.json').write_text('{}')
  assert formats.find(tmp_path) is named['safetensors']
  for name in ('t5x_legacy', 't5x_orbax'):
    assert formats.find(tiny_t5.T5X / name) is named[name]
  with pytest.raises(ValueError, match=r'no config\.json'):
    formats.find(tmp_path / 'none')


def read_header(path, header):
  """A safetensors file of two numbers, read in ranges, as from a bucket."""
  text = json.dumps(header).encode()
  numbers = np.float32([1, 2]).tobytes()
  path.write_bytes(len(text).to_bytes(8, 'little') + text + numbers)
  return safetensors_folder.RemoteFile(path)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'shape': None}, 'header'),
    ({'shape': [float('inf')]}, 'header'),
    ({'data_offsets': [0]}, 'header'),
    ({'shape': [3]}, 'header'),
    ({'data_offsets': [4, 12]}, 'offset .*x'),
  ],
)
def test_a_damaged_header_of_safetensors(tmp_path, changes, message):
  entry = {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}
  safetensors = pytest.importorskip('safetensors')
  path = tmp_path / 'model.safetensors'
  found = read_header(path, {'x': entry}).get_tensor('x')
  np.testing.assert_array_equal(found, np.float32([1, 2]))
  with pytest.raises(safetensors.SafetensorError, match=message):
    read_header(path, {'x': entry | changes})
