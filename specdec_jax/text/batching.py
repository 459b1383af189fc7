"""Lists of token ids as prompts in fixed buffers."""

from collections.abc import Sequence

import numpy as np


def pack(
  rows: Sequence[Sequence[int]], *, width: int | None = None, pad_id: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Lists of token ids as one right-padded buffer.

  Args:
    rows: token ids, each row at least one long.
    width: columns of the buffer; None takes the longest row.
    pad_id: fills the rest.

  Returns:
    int32 tokens `[B, width]` and int32 lengths `[B]`, numpy.

  Raises:
    ValueError: if there is no row, a row is empty, or one exceeds `width`.
  """
  if not rows:
    raise ValueError('no rows to pack')
  lengths = np.array([len(row) for row in rows], np.int32)
  if lengths.min() == 0:
    raise ValueError(f'row {lengths.argmin() + 1} is empty')
  if width is None:
    width = int(lengths.max())
  if lengths.max() > width:
    row = int(lengths.argmax())
    raise ValueError(
      f'row {row + 1} has {lengths[row]} tokens, the buffer has room for '
      f'{width}'
    )
  tokens = np.full((len(rows), width), pad_id, np.int32)
  for row, ids in enumerate(rows):
    tokens[row, : len(ids)] = ids
  return tokens, lengths
