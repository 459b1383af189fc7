"""Streamed text: joined, its pieces are the whole text, whatever bytes a model
spells."""

import random

import pytest

from specdec_jax.text import sentencepiece_vocabulary
from specdec_jax.text.vocabularies import (
  TextStream,
  Vocabulary,
  flush_text,
  stream_text,
)

tokenizers = pytest.importorskip('tokenizers')
sentencepiece = pytest.importorskip('sentencepiece')

NUM_SEQUENCES = 2000
CHARACTERS = ['é', '😀', '€', 'a', ' ', '▁', '<0x41>', '\ufffd']
TEXTS = [
  'the cat sat on the mat, and a dog lay beside it in the sun',
  'naïve café: 日本語 (and 한국어), says the sign on the door',
  'numbers are 0123456789, twice; letters are abcdefghijklmnopqrstuvwxyz',
]


@pytest.fixture(scope='module')
def processor():
  model = sentencepiece_vocabulary.train(TEXTS * 3, size=320)
  processor = sentencepiece.SentencePieceProcessor()
  processor.LoadFromSerializedProto(model)
  return processor


@pytest.fixture(scope='module')
def vocabularies(processor):
  """Vocabularies by name, and of each the id of a byte."""
  pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
  decoders = tokenizers.decoders
  gemma = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
  llama = [*gemma, decoders.Strip(' ', 1, 0)]
  of_byte = {i: pieces.index(f'<0x{i:02X}>') for i in range(256)}
  of_pieces = sentencepiece_vocabulary.SentencePieceVocabulary(
    processor=processor, model=b''
  )
  return {
    'gemma': (of_tokens(pieces, decoders.Sequence(gemma)), of_byte),
    'llama': (of_tokens(pieces, decoders.Sequence(llama)), of_byte),
    'sentencepiece': (of_pieces, of_byte),
    'byte level': byte_level(),
    'metaspace': (of_tokens(pieces, decoders.Metaspace()), None),
    'word pieces': (
      of_tokens(
        ['[UNK]', '</s>', 'a', '##b', '.', '##é'], decoders.WordPiece()
      ),
      None,
    ),
  }


def of_tokens(tokens, decoder):
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={token: i for i, token in enumerate(tokens)}, merges=[]
    )
  )
  tokenizer.decoder = decoder
  special = {'<pad>', '</s>', '<unk>'} & set(tokens)
  tokenizer.add_special_tokens(sorted(special))
  return Vocabulary(tokenizer=tokenizer, eos_ids=(1,))


def byte_level():
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokens = ['<pad>', '</s>', *alphabet, 'Ġthe']
  vocabulary = of_tokens(tokens, tokenizers.decoders.ByteLevel())
  # The package itself says which token a byte of a text is.
  spell = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  text = ''.join(CHARACTERS)
  [(spelled, _)] = spell.pre_tokenize_str(text)
  ids = [tokens.index(token) for token in spelled]
  of_byte = dict(zip(text.encode(), ids, strict=True))
  return vocabulary, of_byte


def random_ids(rng, vocabulary, of_byte):
  """Tokens, characters, and characters that lack their first or last bytes."""
  ids = []
  for _ in range(rng.randint(1, 8)):
    if of_byte is None or rng.random() < 0.3:
      ids.append(rng.randrange(vocabulary.vocab_size))
      continue
    spelled = rng.choice(CHARACTERS).encode()
    start = rng.choice([0, 0, rng.randrange(len(spelled))])
    end = rng.choice([len(spelled), rng.randint(start, len(spelled))])
    ids += [of_byte[byte] for byte in spelled[start:end]]
  return ids


NAMES = (
  'gemma', 'llama', 'sentencepiece', 'byte level', 'metaspace', 'word pieces',
)  # fmt: skip


@pytest.mark.parametrize('name', NAMES)
def test_pieces_joined_are_the_whole_text(vocabularies, name):
  vocabulary, of_byte = vocabularies[name]
  rng = random.Random(0)
  for _ in range(NUM_SEQUENCES):
    ids = random_ids(rng, vocabulary, of_byte)
    keep_special = rng.random() < 0.5
    whole = vocabulary.decode(ids, keep_special=keep_special)
    state, shown, rest = TextStream(), '', ids
    while rest:
      count = rng.choice([1, 1, 2, 5])
      new, state = stream_text(
        vocabulary, state, rest[:count], keep_special=keep_special
      )
      shown, rest = shown + new, rest[count:]
      assert whole.startswith(shown), (ids, shown, whole)
    shown += flush_text(vocabulary, state, keep_special=keep_special)
    assert shown == whole, ids
    if keep_special:
      assert ''.join(vocabulary.pieces(ids)) == whole, ids


@pytest.mark.parametrize('name', ['gemma', 'llama'])
def test_bytes_decode_as_sentencepiece_decodes_them(
  vocabularies, processor, name
):
  vocabulary, of_byte = vocabularies[name]
  unknown = processor.unk_id()
  rng = random.Random(1)
  num_broken = 0
  for _ in range(NUM_SEQUENCES):
    ids = random_ids(rng, vocabulary, of_byte)
    # Whose text is a sign of its own; and Gemma keeps the space in front.
    ids = [of_byte[0x2D], *(i for i in ids if i != unknown)]
    expected = processor.decode(ids)
    assert vocabulary.decode(ids) == expected, ids
    num_broken += '\ufffd' in expected
  assert num_broken > NUM_SEQUENCES / 4


def test_a_cut_character_takes_no_other_with_it(vocabularies):
  for name in ('gemma', 'llama', 'sentencepiece'):
    vocabulary, of_byte = vocabularies[name]
    ids = [of_byte[byte] for byte in 'a😀é'.encode()[:-1]]
    assert vocabulary.decode(ids) == 'a😀\ufffd'
    # What is finished comes at once, also in front of what is not.
    new, state = stream_text(vocabulary, TextStream(), ids)
    assert new == 'a😀'
    assert flush_text(vocabulary, state) == '\ufffd'
    new, state = stream_text(vocabulary, state, [of_byte[0xA9]])
    assert (new, flush_text(vocabulary, state)) == ('é', '')
