"""SentencePiece vocabularies: as T5 reads them, with the usual interface."""

import pathlib

import pytest

pytest.importorskip('sentencepiece')

from specdec_jax.text import sentencepiece_vocabulary, vocabularies

MODEL = pathlib.Path(__file__).parent.parent / 'golden' / 't5x/tiny_sp.model'
TEXT = 'the house jumps two nine'


@pytest.fixture(scope='module')
def plain():
  return sentencepiece_vocabulary.load(MODEL, extra_ids=0)


@pytest.fixture(scope='module')
def t5():
  return sentencepiece_vocabulary.load(MODEL)


def test_sizes_and_special_ids(plain, t5):
  assert (plain.vocab_size, t5.vocab_size) == (85, 185)
  for vocabulary in (plain, t5):
    assert vocabulary.tokens()[:3] == ['<pad>', '</s>', '<unk>']
    assert vocabulary.eos_ids == (1,)
    assert vocabulary.roles == {'eos_token': '</s>'}
    assert vocabulary.special_ids == {0, 1}
    assert len(vocabulary.tokens()) == vocabulary.vocab_size


def test_sentinels_count_down_to_the_last_id(plain, t5):
  sentinels = [f'▁<extra_id_{i}>' for i in reversed(range(100))]
  assert t5.tokens() == plain.tokens() + sentinels
  ids = t5.encode('the <extra_id_0> two <extra_id_1>', add_special_tokens=False)
  assert [t5.tokens()[i] for i in ids] == [
    '▁the',
    '▁<extra_id_0>',
    '▁two',
    '▁<extra_id_1>',
  ]
  assert ids[1] == 184
  assert t5.decode(ids) == 'the <extra_id_0> two <extra_id_1>'


def test_a_model_with_sentinels_of_its_own_gets_no_more(t5, tmp_path):
  path = tmp_path / 'own.model'
  path.write_bytes(t5.model + sentencepiece_vocabulary._sentinels(7))
  vocabulary = sentencepiece_vocabulary.load(path)
  assert (vocabulary.vocab_size, vocabulary.extra_ids) == (92, 0)


@pytest.mark.parametrize(
  ('num_rows', 'vocab_size'),
  [
    (None, 185),
    (256, 185),  # With room for T5's sentinels, it has them.
    (185, 185),
    (85, 85),
    (128, 85),  # As T5X pads 85.
  ],
)
def test_sentinels_are_those_that_fill_the_embeddings(num_rows, vocab_size):
  vocabulary = sentencepiece_vocabulary.load(MODEL, num_rows=num_rows)
  assert vocabulary.vocab_size == vocab_size
  assert vocabulary.extra_ids == vocab_size - 85


@pytest.mark.parametrize(
  'num_rows',
  [
    84,  # Fewer than pieces.
    100,  # How many of the 15 are sentinels, nobody knows.
    257,
    384,  # As T5X pads 85 and 200 sentinels, or as umT5 has 300.
    512,
  ],
)
def test_embeddings_that_do_not_tell_the_number_of_sentinels(num_rows):
  with pytest.raises(
    ValueError, match=rf'85 pieces for {num_rows} .*"extra_ids": N'
  ):
    sentencepiece_vocabulary.load(MODEL, num_rows=num_rows)
  stated = sentencepiece_vocabulary.load(MODEL, num_rows=num_rows, extra_ids=7)
  assert stated.vocab_size == 92


def test_two_numbers_of_sentinels_that_are_padded_alike(plain, tmp_path):
  """Both 130 ids and 230 are padded to 256."""
  path = tmp_path / 'larger.model'
  model = plain.model
  for i in range(130 - plain.vocab_size):
    name = f'q{i:02}'.encode()
    # Field 1 of a piece is its name, field 2 (0x15) a float32 score.
    piece = b'\x0a' + bytes([len(name)]) + name + b'\x15' + bytes(4)
    model += b'\x0a' + bytes([len(piece)]) + piece
  path.write_bytes(model)
  with pytest.raises(ValueError, match='130 pieces for 256'):
    sentencepiece_vocabulary.load(path, num_rows=256)
  for num_rows in (130, 230):
    found = sentencepiece_vocabulary.load(path, num_rows=num_rows)
    assert found.vocab_size == num_rows


def test_too_many_sentinels_are_refused():
  with pytest.raises(ValueError, match='1000000000 sentinels'):
    sentencepiece_vocabulary.load(MODEL, extra_ids=10**9)


def test_texts_end_with_the_end_id(t5):
  ids = t5.encode(TEXT)
  assert ids[-1] == 1
  assert t5.encode(TEXT, add_special_tokens=False) == ids[:-1]
  assert t5.decode(ids) == TEXT
  assert t5.decode([*ids, 0, 0]) == TEXT
  assert t5.decode(ids, keep_special=True) == TEXT + '</s>'
  assert t5.encode('') == [1]
  assert t5.decode([]) == ''


def test_ids_beyond_the_vocabulary_are_unknown(t5):
  assert t5.decode([185, -1, 10**6]) == t5.decode([2, 2, 2])
  assert t5.id_to_text(185) == '<id 185>'
  assert t5.id_to_text(4) == ' then'


@pytest.mark.parametrize('ids', [[], [1], [28, 1, 28], [0, 4, 4, 1, 0]])
def test_pieces_are_the_text(t5, ids):
  whole = t5.decode(ids, keep_special=True)
  assert ''.join(t5.pieces(ids)) == whole
  assert len(t5.pieces(ids)) == len(ids)


def test_streaming_gives_the_whole_text(t5):
  ids = t5.encode(TEXT + ' qux!')
  state, shown = vocabularies.TextStream(), ''
  for token_id in ids:
    text, state = vocabularies.stream_text(t5, state, [token_id])
    shown += text
  shown += vocabularies.flush_text(t5, state)
  assert shown == t5.decode(ids)


def test_vocabularies_of_two_models_are_compared(plain, t5):
  vocabularies.check_same_vocabulary(plain, plain)
  with pytest.raises(ValueError, match=r'id 85 .*draft model'):
    vocabularies.check_same_vocabulary(plain, t5)


def test_there_is_no_chat_template(t5):
  with pytest.raises(ValueError, match='no chat template'):
    t5.encode_chat('hello')


# A piece that is no UTF-8; twice, the library's own error names it.
PIECE = b'\x0a\x09\x0a\x02\xc0\xc1\x15' + bytes(4)


@pytest.mark.parametrize(
  'edit',
  [
    lambda model: b'',
    lambda model: b'abc',
    lambda model: model[:1000],
    lambda model: model + PIECE,
    lambda model: model + PIECE * 2,
  ],
  ids=['empty', 'text', 'cut', 'no UTF-8', 'no UTF-8 twice'],
)
def test_files_that_are_no_model(tmp_path, edit):
  path = tmp_path / 'bad.model'
  path.write_bytes(edit(MODEL.read_bytes()))
  with pytest.raises(ValueError, match='no SentencePiece'):
    sentencepiece_vocabulary.load(path)


def test_a_file_that_is_not_there(tmp_path):
  with pytest.raises(FileNotFoundError, match='No such file'):
    sentencepiece_vocabulary.load(tmp_path / 'bad.model')
