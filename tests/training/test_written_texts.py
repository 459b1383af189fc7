"""Damaged parts of written texts are refused, and by what is wrong."""

import numpy as np
import pytest

from specdec_jax.training.data import written_texts

# Two texts of 3 and 2 tokens.
TOKENS = np.array([4, 1, 3, 2, 5], np.uint16)


@pytest.fixture
def folder(tmp_path):
  rows = [TOKENS[:3], TOKENS[3:]]
  scores = [np.zeros(len(row), np.float32) for row in rows]
  texts = written_texts.join(rows, [2, 1], scores, streams=None)
  written_texts.begin(tmp_path, {'layers': None})
  written_texts.save_part(tmp_path, 0, texts)
  return tmp_path


def test_what_killed_writers_left_is_removed(folder):
  left = folder / 'part-00001.tmp-7-1f3c'
  left.mkdir()
  (left / 'tokens.npy').write_bytes(b'half')
  written_texts.begin(folder, {'layers': None})
  assert not left.exists()
  assert written_texts.part_indices(folder) == [0]


def test_a_part_is_read_as_it_was_written(folder):
  [texts] = written_texts.load_parts(folder)
  np.testing.assert_array_equal(texts.tokens, TOKENS)
  np.testing.assert_array_equal(texts.offsets, [0, 3, 5])
  assert (texts.streams, len(texts), texts.num_written) == (None, 2, 2)
  assert written_texts.load_description(folder).counts('layers', []) == []


@pytest.mark.parametrize(
  ('name', 'array', 'message'),
  [
    ('tokens', np.array([4, 1, -3, 2, 5], np.int32), 'it has token -3'),
    ('tokens', TOKENS.astype(np.int64), r'tokens is int64 \[5\], .* or int32'),
    ('tokens', TOKENS[:4], r'log_probs is float32 \[5\], .*float32 \[4\]'),
    ('offsets', np.array([0, 9, 5]), 'offsets do not divide 5 tokens'),
    ('offsets', np.array([0, -2, 5]), 'offsets do not divide 5 tokens'),
    ('offsets', np.array([0, 3, 4]), 'offsets do not divide 5 tokens'),
    ('offsets', np.array([0, 1, 5]), 'a prompt is longer than its text'),
    ('prompt_lengths', np.array([0, 1], np.int32), 'a prompt is longer than'),
    ('log_probs', np.zeros((5, 1), np.float32), r'log_probs is .*\[5, 1\]'),
    ('streams', np.zeros(5, np.uint16), r'streams is uint16 \[5\], expected'),
    ('streams', np.zeros((4, 2), np.uint16), r'expected uint16 \[5, 2\]'),
    ('streams', np.zeros((5, 2), np.float32), 'streams is float32'),
  ],
)
def test_arrays_that_do_not_fit_are_refused(folder, name, array, message):
  np.save(written_texts.part_path(folder, 0) / f'{name}.npy', array)
  with pytest.raises(ValueError, match=f'part-00000 is damaged.*{message}'):
    written_texts.load_parts(folder)


@pytest.mark.parametrize(
  'content', [b'', b'PK\x03\x04', b'\x93NUMPY\x01\x00\x06\x00{[]:1}']
)
def test_what_is_no_array_is_refused(folder, content):
  file = written_texts.part_path(folder, 0) / 'offsets.npy'
  file.write_bytes(content)
  with pytest.raises(ValueError, match=r'offsets\.npy.*missing'):
    written_texts.load_parts(folder)


def test_tokens_of_another_vocabulary_are_refused(folder):
  counts = written_texts.token_counts(folder, 6)
  np.testing.assert_array_equal(counts, [0, 0, 0, 1, 0, 1])
  with pytest.raises(ValueError, match=r'token 5.*of 5'):
    written_texts.token_counts(folder, 5)


@pytest.mark.parametrize('text', ['[]', '{', '[' * 9000, '{"layers": "all"}'])
def test_a_damaged_description_is_refused(folder, text):
  (folder / 'written.json').write_text(text)
  with pytest.raises(ValueError, match=r'written\.json'):
    written_texts.load_description(folder).counts('layers', [])
