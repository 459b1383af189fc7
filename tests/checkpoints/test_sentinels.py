"""How many sentinels follow the pieces of a SentencePiece model."""

import dataclasses
import json
import shutil

import pytest

from specdec_jax.checkpoints import huggingface, loading
from specdec_jax.cli.main import main
from specdec_jax.text import vocabulary_files
from tests.checkpoints import tiny_t5
from tests.checkpoints.tiny_models import make_config, make_params, write_gguf

pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')

MODEL = tiny_t5.T5X / 'tiny_sp.model'
NUM_PIECES = 85


@pytest.fixture
def umt5_folder(tmp_path):
  """As umT5 has them, 300 sentinels, and embeddings padded to 512."""
  config = dataclasses.replace(tiny_t5.T5X_CONFIG, vocab_size=512)
  folder = tmp_path / 'umt5'
  huggingface.save(folder, config, tiny_t5.make_params(config))
  shutil.copy(MODEL, folder / 'spiece.model')
  return folder


def sentinels(number) -> list[str]:
  return [f'<extra_id_{i}>' for i in range(number)]


def by_id(number, first=NUM_PIECES) -> dict:
  """`added_tokens_decoder`, where the last sentinel is the first."""
  names = reversed(sentinels(number))
  return {str(first + i): {'content': name} for i, name in enumerate(names)}


STATEMENTS = {
  'a number': {'extra_ids': 300},
  'special tokens': {'additional_special_tokens': sentinels(300)},
  'both': {'extra_ids': 300, 'additional_special_tokens': sentinels(300)},
  'ids': {'added_tokens_decoder': by_id(300)},
}


@pytest.mark.parametrize('statement', STATEMENTS)
def test_the_number_is_what_a_folder_states(umt5_folder, statement):
  path = umt5_folder / 'tokenizer_config.json'
  path.write_text(json.dumps(STATEMENTS[statement]))
  vocabulary = loading.load(str(umt5_folder)).vocabulary
  assert vocabulary.extra_ids == 300
  [first] = vocabulary.encode('<extra_id_0>', add_special_tokens=False)
  assert first == NUM_PIECES + 299


def test_a_folder_that_states_none_is_refused(umt5_folder, tmp_path):
  message = r'spiece\.model has 85 pieces for 512 embeddings.*"extra_ids": N'
  with pytest.raises(ValueError, match=message):
    loading.load(str(umt5_folder))
  copy = tmp_path / 'copy'
  command = ['convert', str(umt5_folder), str(copy), '--to', 'safetensors']
  assert main(command) == 2
  assert not copy.exists()
  model = str(umt5_folder / 'spiece.model')
  assert main([*command, '--vocabulary', model, '--extra_ids', '300']) == 0
  assert loading.load(str(copy)).vocabulary.extra_ids == 300


@pytest.mark.parametrize(
  ('stated', 'message'),
  [
    ({'additional_special_tokens': ['<extra_id_9>']}, r'9> it states 1: put'),
    (
      {'extra_ids': 5, 'additional_special_tokens': sentinels(7)},
      'extra_ids is 5, expected more: there is <extra_id_6>',
    ),
    (
      {'added_tokens_decoder': by_id(300, first=90)},
      "'<extra_id_299>' has the id 90 by .*, and 85 by spiece",
    ),
    (
      {'extra_ids': 300, 'added_tokens_decoder': by_id(100)},
      "'<extra_id_99>' has the id 85 by .*, and 285 by spiece",
    ),
  ],
)
def test_statements_that_contradict_each_other(umt5_folder, stated, message):
  path = umt5_folder / 'tokenizer_config.json'
  path.write_text(json.dumps(stated))
  with pytest.raises(ValueError, match=message):
    loading.load(str(umt5_folder))


def test_a_model_without_an_encoder_has_none(tmp_path):
  """Embeddings without tokens are padding there."""
  pytest.importorskip('gguf')
  config = make_config(vocab_size=400)
  write_gguf(tmp_path / 'tiny.gguf', config, make_params(config))
  shutil.copy(MODEL, tmp_path)
  loaded = loading.load(
    str(tmp_path / 'tiny.gguf'), vocabulary=str(tmp_path / MODEL.name)
  )
  assert loaded.vocabulary.vocab_size == NUM_PIECES
  (tmp_path / 'tokenizer_config.json').write_text('{"extra_ids": 3}')
  stated = vocabulary_files.read(
    tmp_path / MODEL.name, may_have_sentinels=False
  )
  assert stated.extra_ids == 3
