"""What ends texts: the same for the vocabularies of every format."""

import io
import json
import shutil

import pytest

from specdec_jax.checkpoints import gguf, huggingface, loading
from specdec_jax.cli.main import main
from specdec_jax.text import sentencepiece_vocabulary, vocabulary_files
from tests.checkpoints import tiny_t5
from tests.checkpoints.huggingface_folders import tokenizer_json
from tests.checkpoints.tiny_models import (
  byte_tokens,
  make_config,
  make_params,
  write_gguf,
)

pytest.importorskip('gguf')
pytest.importorskip('safetensors')
sentencepiece = pytest.importorskip('sentencepiece')
tokenizers = pytest.importorskip('tokenizers')

CONFIG = make_config()


def in_gguf(path, names=(), **ids):
  """A GGUF file with these tokens in the place of others."""
  tokens = byte_tokens()
  tokens[3 : 3 + len(names)] = names
  stated = {f'tokenizer.ggml.{name}_token_id': i for name, i in ids.items()}
  write_gguf(
    path,
    CONFIG,
    make_params(CONFIG),
    metadata={'tokenizer.ggml.tokens': tokens, **stated},
  )
  return gguf.read_vocabulary(path)


def in_folder(folder, names=()):
  """A folder with tokenizer.json, to which tokens are added."""
  tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json())
  tokenizer.add_tokens([tokenizers.AddedToken(name) for name in names])
  tokenizer.save(str(folder / 'tokenizer.json'))
  return vocabulary_files.read(folder)


def in_sentencepiece(folder, names=()):
  """A SentencePiece model with pieces for these tokens."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['the quick brown fox jumps over the lazy dog'] * 9),
    model_writer=model,
    model_type='char',
    vocab_size=60,
    hard_vocab_limit=False,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    eos_piece='<end>',
    user_defined_symbols=list(names),
    num_threads=1,
    minloglevel=2,
  )
  (folder / 'spiece.model').write_bytes(model.getvalue())
  return sentencepiece_vocabulary.load(folder / 'spiece.model', extra_ids=0)


FORMATS = {
  'gguf': lambda folder, names: in_gguf(folder / 'tiny.gguf', names),
  'huggingface': in_folder,
  'sentencepiece': in_sentencepiece,
}
# What ends texts in all vocabularies here.
ALWAYS = {'<|endoftext|>', '<|im_end|>', '<end>'}


@pytest.mark.parametrize('name', FORMATS)
@pytest.mark.parametrize(
  ('names', 'expected'),
  [
    (['<|eot_id|>', '<|eom_id|>', '<|start_header_id|>'], 2),
    (['<end_of_turn>', '<eos>', '<start_of_turn>'], 2),
    (['<|file_sep|>', '<|fim_pad|>', '<|repo_name|>', '<|fim_middle|>'], 3),
    (['</s>', '<|end|>', '<|user|>'], 2),
    # Where `<|end|>` ends a part of a message, as gpt-oss has it.
    (['<|return|>', '<|call|>', '<|end|>'], 2),
    (['<|flush|>', '<|calls|>', '<|end|>'], 2),
    (['<turn|>', '<|tool_response>', '</s>'], 2),
  ],
)
def test_tokens_whose_names_say_so(tmp_path, name, names, expected):
  """As in llama.cpp, the first few of `names`."""
  vocabulary = FORMATS[name](tmp_path, names)
  tokens = vocabulary.tokens()
  ends = {tokens[i] for i in vocabulary.eos_ids}
  assert ends - ALWAYS == {*names[:expected]}


def test_what_a_gguf_states(tmp_path):
  path = tmp_path / 'tiny.gguf'
  assert in_gguf(path).eos_ids == (2, 0)
  assert in_gguf(path, eot=7, eom=8).eos_ids == (2, 7, 8, 0)
  assert in_gguf(path, fim_pad=4, fim_rep=5, fim_sep=6).eos_ids == (
    2, 4, 5, 6, 0
  )  # fmt: skip
  with pytest.raises(ValueError, match=r'eom_token_id is 900.*to 264'):
    in_gguf(path, eom=900)


@pytest.mark.parametrize('splitting', ['llama-bpe', 'qwen2', 'smollm'])
def test_the_splitting_of_words_decides_nothing(tmp_path, splitting):
  path = tmp_path / 'tiny.gguf'
  metadata = {'tokenizer.ggml.pre': splitting}
  write_gguf(path, CONFIG, make_params(CONFIG), metadata=metadata)
  assert gguf.read_vocabulary(path).eos_ids == (2, 0)


def test_what_a_folder_states(tmp_path):
  """The tokenizer's own end counts beside what the other files say."""

  def read(name, **values):
    (tmp_path / name).write_text(json.dumps(values))
    return vocabulary_files.read(tmp_path).eos_ids

  in_folder(tmp_path)
  assert read('tokenizer_config.json') == (0, 2)
  assert read('tokenizer_config.json', eos_token='<|im_start|>') == (1, 0, 2)
  assert read('config.json', eos_token_id=5) == (1, 5, 0, 2)
  # transformers then takes nothing from config.json.
  assert read('generation_config.json', eos_token_id=[7, 6]) == (1, 7, 6, 0, 2)
  assert read('generation_config.json', eos_token_id=0) == (1, 0, 2)
  with pytest.raises(
    ValueError, match='eos_token_id 999 is not in the vocabulary'
  ):
    read('generation_config.json', eos_token_id=[2, 999])


@pytest.fixture
def t5_folder(tmp_path):
  folder = tmp_path / 't5'
  config = tiny_t5.T5X_CONFIG
  huggingface.save(folder, config, tiny_t5.make_params(config))
  shutil.copy(tiny_t5.T5X / 'tiny_sp.model', folder / 'spiece.model')
  return folder


@pytest.mark.parametrize(
  ('stated', 'eos_ids'), [(1, (1,)), ([7, 1], (1, 7)), (2, (1, 2))]
)
def test_what_a_folder_states_beside_spiece_model(t5_folder, stated, eos_ids):
  """What an encoder's input ends with stays first."""
  path = t5_folder / 'generation_config.json'
  path.write_text(json.dumps({'eos_token_id': stated}))
  vocabulary = loading.load(str(t5_folder)).vocabulary
  assert vocabulary.eos_ids == eos_ids
  assert vocabulary.encode('the')[-1] == 1
  path.write_text('{"eos_token_id": 85}')
  with pytest.raises(
    ValueError, match='eos_token_id 85 is not in the vocabulary'
  ):
    loading.load(str(t5_folder))


def test_what_a_model_states_for_another_vocabulary(tmp_path):
  """The model's files still say what ends texts, also in a copy."""
  words = tmp_path / 'words'
  words.mkdir()
  in_folder(words)
  folder, file = tmp_path / 'model', tmp_path / 'tiny.gguf'
  huggingface.save(folder, CONFIG, make_params(CONFIG))
  (folder / 'generation_config.json').write_text('{"eos_token_id": [9]}')
  in_gguf(file, eot=9)
  for source, eos_ids in ((folder, (9, 0, 2)), (file, (2, 9, 0))):
    loaded = loading.load(str(source), vocabulary=str(words))
    assert set(loaded.vocabulary.eos_ids) == set(eos_ids)
    copy = tmp_path / f'copy_of_{source.name}'
    command = ['convert', str(source), str(copy), '--to', 'huggingface']
    assert main([*command, '--vocabulary', str(words)]) == 0
    copied = loading.load(str(copy)).vocabulary
    assert set(copied.eos_ids) == set(eos_ids)
  in_gguf(file, eot=264)
  smaller = tmp_path / 'smaller'
  smaller.mkdir()
  in_sentencepiece(smaller)
  (smaller / 'tokenizer_config.json').write_text('{"extra_ids": 0}')
  with pytest.raises(
    ValueError, match='eos_token_id 264 is not in the vocabulary'
  ):
    loading.load(str(file), vocabulary=str(smaller))
