"""Every format is read from a bucket, and written to one, as on a disk."""

import shutil

import jax
import pytest

pytest.importorskip('gguf')
pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')
pytest.importorskip('tokenizers')

from specdec_jax.checkpoints import formats, loading, model_file
from specdec_jax.cli.main import main
from tests.checkpoints import tiny_models, tiny_t5
from tests.checkpoints.tiny_t5 import GOLDEN, T5X, T5X_CONFIG
from tests.cli import tiny


def t5x_legacy(folder):
  shutil.copytree(T5X / 't5x_legacy', folder)
  model_file.write(folder, T5X_CONFIG)


def gguf(folder):
  folder.mkdir()
  config = tiny_models.make_config()
  params = tiny_models.make_params(config)
  tiny_models.write_gguf(folder / 'tiny.gguf', config, params)
  return 'tiny.gguf'


def gguf_in_parts(folder):
  folder.mkdir()
  config = tiny_models.make_config()
  params = tiny_models.make_params(config)
  path = folder / 'tiny.gguf'
  tiny_models.write_gguf(path, config, params, split_max_tensors=8)
  return 'tiny-00001-of-00003.gguf'


def converted(to):
  return lambda folder: main(['convert', 'ende-nano', str(folder), '--to', to])


MODELS = {
  't5x_legacy': t5x_legacy,
  't5x_orbax': tiny_t5.write_model,
  'orbax': converted('orbax'),
  'safetensors': converted('safetensors'),
  'huggingface': tiny.write_model,
  'huggingface, in parts': lambda folder: shutil.copytree(
    GOLDEN / 'tiny_flan_t5', folder
  ),
  'gguf': gguf,
  'gguf, in parts': gguf_in_parts,
}


def bits(params):
  return jax.tree.map(lambda x: (str(x.dtype), x.shape, x.tobytes()), params)


def vocabulary_of(path):
  try:
    found = loading.read_vocabulary(path)
  except ValueError as error:
    return str(error).replace(str(path), '')
  return found if found is None else found.tokens()


@pytest.mark.parametrize('write', MODELS.values(), ids=MODELS)
def test_reading(server, bucket, tmp_path, write):
  folder = tmp_path / 'model'
  name = write(folder)
  name = f'/{name}' if isinstance(name, str) and '.' in name else ''
  there = server.upload(folder, f'{bucket}/some/model') + name
  local, remote = loading.locate(f'{folder}{name}'), loading.locate(there)
  assert formats.find(remote).name == formats.find(local).name
  config, params = loading.read(remote)
  expected, as_local = loading.read(local)
  assert config == expected
  assert bits(params) == bits(as_local)
  assert vocabulary_of(remote) == vocabulary_of(local)
  assert loading.locate(there + '/') == remote


WRITTEN = [each.name for each in formats.FORMATS if each.write]


@pytest.mark.parametrize('to', WRITTEN)
def test_convert(server, bucket, tmp_path, to, capsys):
  """To a bucket and back; the objects are the files of a local folder."""
  local, there = tmp_path / 'local', f'{bucket}/folder/model'
  back = tmp_path / 'back'
  for command in (
    ['convert', 'ende-nano', str(local), '--to', to],
    ['convert', 'ende-nano', there, '--to', to],
    ['convert', there, str(back), '--to', 'safetensors'],
  ):
    assert main(command) == 0, capsys.readouterr().err
  objects = server.objects(there)
  files = {
    path.relative_to(local).as_posix(): path.read_bytes()
    for path in local.rglob('*')
    if path.is_file()
  }
  if 'orbax' in to:  # Its own files hold times and random names.
    params, expected = (
      formats.read_params(path, loading.read_config(path))
      for path in (loading.locate(there), local)
    )
    assert bits(params) == bits(expected)
    files = {k: v for k, v in files.items() if '/' not in k}
    objects = {k: v for k, v in objects.items() if '/' not in k}
  assert objects == files
  again = ['convert', 'ende-nano', there, '--to', to]
  assert main(again) == 2
  replaced = f'{there}/checkpoint_0' if to.startswith('t5x') else there
  assert f'{replaced} already exists' in capsys.readouterr().err
  assert main([*again, '--overwrite']) == 0


def test_what_stands_beside_config_json(server, bucket, tmp_path):
  """generation_config.json is found in the bucket, and refused."""
  shutil.copytree(GOLDEN / 'tiny_t5_1_1', tmp_path / 't5')
  (tmp_path / 't5' / 'generation_config.json').write_text(
    '{"decoder_start_token_id": 7}'
  )
  there = server.upload(tmp_path / 't5', f'{bucket}/t5')
  with pytest.raises(ValueError, match=f'{there}/generation_config.json'):
    loading.read_config(loading.locate(there))
