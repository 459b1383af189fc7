"""Lists of tokens as one prompt, for every kind of model."""

import numpy as np
import pytest

from specdec_jax.text import prompts
from tests import toy, toy_t5

ROWS = [[5, 6, 7], None, [8]]
LLAMA = toy.llama_config(9)
CONFIGS = {
  'llama': LLAMA,
  'decoder-only T5': toy_t5.config(9, num_encoder_layers=0),
  'T5': toy_t5.config(9),
}
TOKENS = {
  'llama': [[5, 6, 7, 0], [0, 0, 0, 0], [8, 0, 0, 0]],
  'decoder-only T5': [[0, 5, 6, 7, 0], [0, 0, 0, 0, 0], [0, 8, 0, 0, 0]],
  'T5': [[0], [0], [0]],
}
LENGTHS = {
  'llama': [3, 1, 1], 'decoder-only T5': [4, 1, 2], 'T5': [1, 1, 1]
}  # fmt: skip


@pytest.mark.parametrize('name', CONFIGS)
def test_rows_are_where_their_network_reads_them(name):
  prompt = prompts.pack(
    ROWS, config=CONFIGS[name], max_new_tokens=10, width=4, row_ids=[7, 0, 2]
  )
  np.testing.assert_array_equal(prompt.decoder_tokens, TOKENS[name])
  np.testing.assert_array_equal(prompt.decoder_lengths, LENGTHS[name])
  np.testing.assert_array_equal(
    prompt.max_lengths, np.add(LENGTHS[name], [10, 0, 10])
  )
  np.testing.assert_array_equal(prompt.row_ids, [7, 0, 2])
  if name == 'T5':
    np.testing.assert_array_equal(prompt.encoder_tokens, TOKENS['llama'])
  else:
    assert prompt.encoder_tokens is None
  assert {leaf.dtype for leaf in vars(prompt).values() if leaf is not None} == {
    np.dtype('int32')
  }


def test_the_longest_row_is_the_width():
  prompt = prompts.pack(ROWS, config=LLAMA, max_new_tokens=1)
  assert prompt.decoder_tokens.shape == (3, 3)
  np.testing.assert_array_equal(prompt.row_ids, [0, 1, 2])


@pytest.mark.parametrize(
  ('rows', 'width', 'message'),
  [
    ([], None, 'no rows'),
    ([[1], []], None, 'row 2.*empty'),
    ([[1], [1, 2, 3]], 2, 'row 2 .*3 tokens'),
  ],
)
def test_the_row_at_fault_is_named(rows, width, message):
  with pytest.raises(ValueError, match=message):
    prompts.pack(rows, config=LLAMA, max_new_tokens=1, width=width)


def test_a_start_token_is_enough():
  prompt = prompts.pack([[]], config=CONFIGS['T5'], max_new_tokens=1, width=2)
  np.testing.assert_array_equal(prompt.decoder_lengths, [1])
