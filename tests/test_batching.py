"""Lists of tokens as buffers."""

import numpy as np
import pytest

from specdec_jax.text import batching


def test_pack():
  tokens, lengths = batching.pack([[5, 6], [7], [8, 9, 1]], pad_id=-1)
  np.testing.assert_array_equal(tokens, [[5, 6, -1], [7, -1, -1], [8, 9, 1]])
  np.testing.assert_array_equal(lengths, [2, 1, 3])
  assert tokens.dtype == lengths.dtype == np.int32
  assert batching.pack([[5]], width=4)[0].shape == (1, 4)


@pytest.mark.parametrize(
  ('rows', 'width', 'message'),
  [
    ([], None, 'no rows'),
    ([[1], []], None, 'row 2 is empty'),
    ([[1], [1, 2, 3]], 2, 'row 2 has 3 tokens, the buffer has room for 2'),
  ],
)
def test_pack_names_the_row_at_fault(rows, width, message):
  with pytest.raises(ValueError, match=message):
    batching.pack(rows, width=width)
