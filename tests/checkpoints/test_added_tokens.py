"""Added tokens have the ids that transformers 5.23 gives them."""

import dataclasses
import json
import shutil

import pytest

from specdec_jax.text import (
  sentencepiece_vocabulary,
  vocabularies,
  vocabulary_files,
)
from tests.checkpoints import tiny_t5
from tests.checkpoints.huggingface_folders import tokenizer_json

tokenizers = pytest.importorskip('tokenizers')
pytest.importorskip('sentencepiece')


def token(content, **changes) -> dict:
  """As transformers writes one."""
  flags = {'lstrip': False, 'normalized': False, 'rstrip': False}
  return {'content': content, 'special': True, **flags, **changes}


BACKEND = {'tokenizer_class': 'PreTrainedTokenizerFast'}
TEXT = 'in <sep> a <b><c><|im_end|>'
# Files beside tokenizer.json by name, the ids of TEXT, its text without special
# tokens, and the end of text: what `AutoTokenizer` gives for them. Tokens such
# as `<|im_end|>`, ids 0 and 2, end texts besides.
CASES = {
  'by id': (
    {
      'tokenizer_config': {
        'added_tokens_decoder': {
          '300': token('<sep>'),
          '270': token('<b>', special=False, lstrip=True),
        },
        'additional_special_tokens': ['<b>'],
        'eos_token': '<|im_end|>',
      },
      # Files that are not read beside `added_tokens_decoder`.
      'added_tokens': {'<c>': 265},
      'special_tokens_map': {'eos_token': '<c>'},
    },
    [262, 223, 266, 223, 67, 265, 30, 69, 32, 2],
    'in  a<b><c>',
    (2,),
  ),
  'files of earlier versions': (
    {
      'tokenizer_config': {'eos_token': '<|endoftext|>'},
      'added_tokens': {'<c>': 266, '<sep>': 265},
      'special_tokens_map': {
        'eos_token': '<sep>',
        'additional_special_tokens': ['<b>'],
      },
    },
    [262, 223, 265, 223, 67, 223, 267, 266, 2],
    'in  a <c>',
    (265,),
  ),
  'tokens with a role': (
    {
      'tokenizer_config': {
        'additional_special_tokens': ['<c>'],
        'extra_special_tokens': {'image_token': '<b>'},
        'pad_token': {'__type': 'AddedToken', **token('<sep>', rstrip=True)},
      }
    },
    [262, 223, 265, 67, 223, 266, 267, 2],
    'in a ',
    (),
  ),
  'the newer of two keys': (
    {
      'tokenizer_config': {
        'additional_special_tokens': ['<b>'],
        'extra_special_tokens': ['<c>', '<sep>'],
      }
    },
    [262, 223, 266, 223, 67, 223, 30, 68, 32, 265, 2],
    'in  a <b>',
    (),
  ),
}


def write(folder, files) -> None:
  (folder / 'tokenizer.json').write_text(tokenizer_json(), encoding='utf-8')
  for name, values in files.items():
    usual = BACKEND if name == 'tokenizer_config' else {}
    (folder / f'{name}.json').write_text(json.dumps(usual | values))


@pytest.mark.parametrize('case', CASES)
def test_ids_are_those_of_transformers(tmp_path, case):
  files, ids, text, eos_ids = CASES[case]
  write(tmp_path, files)
  vocabulary = vocabulary_files.read(tmp_path)
  assert vocabulary.encode(TEXT) == ids
  assert vocabulary.decode(ids) == text
  assert vocabulary.eos_ids == tuple(dict.fromkeys((*eos_ids, 0, 2)))


@pytest.fixture
def t5_folder(tmp_path):
  """A T5 whose <sep> was added: spiece.model has no such piece."""
  shutil.copy(tiny_t5.T5X / 'tiny_sp.model', tmp_path / 'spiece.model')
  return tmp_path


def t5_tokenizer(added=('<sep>',)):
  """As `T5Tokenizer` of transformers 5 makes it of spiece.model."""
  pieces = sentencepiece_vocabulary.load(tiny_t5.T5X / 'tiny_sp.model')
  scores = map(pieces.processor.get_score, range(pieces.vocab_size))
  vocab = list(zip(pieces.tokens(), scores, strict=True))
  sentinels = [f'<extra_id_{i}>' for i in reversed(range(100))]
  vocab[-100:] = [(sentinel, 0.0) for sentinel in sentinels]
  tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=2))
  space = tokenizers.pre_tokenizers.Metaspace(prepend_scheme='always')
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [tokenizers.pre_tokenizers.WhitespaceSplit(), space]
  )
  tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme='always')
  tokenizer.add_special_tokens(['<pad>', '</s>', '<unk>', *sentinels])
  tokenizer.add_tokens(list(added))
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single='$A </s>', special_tokens=[('</s>', 1)]
  )
  return tokenizer


def test_tokenizer_json_has_what_spiece_model_lacks(t5_folder):
  t5_tokenizer().save(str(t5_folder / 'tokenizer.json'))
  found = vocabulary_files.read(t5_folder)
  text = 'the house <sep> jumps two<sep>nine <extra_id_0> the<extra_id_1>house'
  ids = [28, 9, 185, 7, 8, 185, 84, 184, 28, 183, 9, 1]
  assert found.encode(text) == ids
  vocabularies.check_same_vocabulary(
    dataclasses.replace(found, tokenizer=t5_tokenizer(added=())),
    vocabulary_files.read(t5_folder / 'spiece.model'),
  )


def test_added_tokens_without_tokenizer_json_are_refused(t5_folder):
  (t5_folder / 'added_tokens.json').write_text('{"<sep>": 185}')
  with pytest.raises(ValueError, match='<sep>'):
    vocabulary_files.read(t5_folder)
  (t5_folder / 'added_tokens.json').unlink()
  sentinels = [f'<extra_id_{i}>' for i in range(100)]
  stated = {'pad_token': '<pad>', 'additional_special_tokens': sentinels}
  (t5_folder / 'special_tokens_map.json').write_text(json.dumps(stated))
  assert vocabulary_files.read(t5_folder).vocab_size == 185


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'added_tokens_decoder': {'x': token('<b>')}}, 'decoder.x'),
    ({'additional_special_tokens': [5]}, r'tokens\.0 is 5'),
    ({'pad_token': {'content': 'a', 'lstrip': 1}}, 'lstrip is 1'),
    ({'extra_special_tokens': {'image_token': 5}}, 'image_token is 5'),
  ],
)
def test_other_values_are_refused(tmp_path, changes, message):
  write(tmp_path, {'tokenizer_config': changes})
  with pytest.raises(ValueError, match=message):
    vocabulary_files.read(tmp_path)
