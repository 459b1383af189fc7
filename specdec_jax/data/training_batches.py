"""Batches for training: several examples per row, in a resumable order.

Features have T5X's names and meanings (https://github.com/google/seqio,
feature_converters.py): tokens are 0 where padded, segments are numbered from 1
in each row, positions count from 0 in each segment, and the decoder's input is
its target shifted right within the segment, from 0.
"""

import functools
from collections.abc import Iterator, Mapping

import numpy as np

from specdec_jax.data.token_files import Side, TokenFile

Rows = Mapping[str, np.ndarray]
# Rows that are still open while examples are packed. More fill the rows better,
# and take longer: 64 leave a few hundredths of a row empty.
_NUM_OPEN_ROWS = 64


def pack(
  tokens: TokenFile,
  *,
  input_length: int,
  target_length: int,
  seed: int = 0,
  max_examples: int | None = None,
) -> Rows:
  """Puts several examples into each row, as many as fit.

  Examples are taken in a shuffled order, since neighbours in a file are
  similar, and each goes into the open row that it fills best. Every example is
  in exactly one row.

  Args:
    tokens: N examples.
    input_length: E, columns of the encoder; ignored without inputs.
    target_length: T, columns of the decoder.
    seed: of the shuffled order.
    max_examples: in a row; 1 packs nothing, None sets no limit.

  Returns:
    By feature, R rows: int32 `[R, E]` named `encoder_input_tokens`,
    `encoder_segment_ids`, `encoder_positions` if there are inputs; int32
    `[R, T]` named `decoder_target_tokens`, `decoder_input_tokens`,
    `decoder_segment_ids`, `decoder_positions`; float32 `[R, T]` named
    `decoder_loss_weights`. ValueError if an example is longer than a row.
  """
  sides = {'decoder_target': (tokens.sides['target'], target_length)}
  if 'input' in tokens.sides:
    sides['encoder_input'] = (tokens.sides['input'], input_length)
  all_lengths, limits = [], []
  for name, ((_, offsets), limit) in sides.items():
    lengths = np.diff(offsets)
    if (longest := lengths.max(initial=0)) > limit:
      raise ValueError(
        f'an example has {longest} {name} tokens, a row has room for {limit}'
      )
    all_lengths.append(lengths)
    limits.append(limit)
  order = np.random.Generator(np.random.Philox(seed)).permutation(len(tokens))
  lengths = np.stack(all_lengths, 1)[order]
  groups = _assign(lengths, np.array(limits), max_examples)
  members = [order[group] for group in groups]
  rows: dict[str, np.ndarray] = {}
  for name, (side, limit) in sides.items():
    rows |= _fill(name, side, members, limit)
  targets = rows['decoder_target_tokens']
  shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
  is_first = rows['decoder_positions'] == 0
  rows['decoder_input_tokens'] = np.where(is_first, 0, shifted)
  is_text = rows['decoder_segment_ids'] > 0
  rows['decoder_loss_weights'] = is_text.astype(np.float32)
  return rows


def num_rows(rows: Rows) -> int:
  """How many rows are packed, R."""
  return len(rows['decoder_target_tokens'])


def batches_per_epoch(rows: Rows, batch_size: int) -> int:
  """Full batches, or ValueError if there is none; what is left over differs
  from epoch to epoch."""
  if not 1 <= batch_size <= num_rows(rows):
    raise ValueError(
      f'a batch of {batch_size} rows cannot be had of {num_rows(rows)}'
    )
  return num_rows(rows) // batch_size


def batch(rows: Rows, position: int, *, batch_size: int, seed: int = 0) -> Rows:
  """The batch at a position of an endless stream, which needs no other state:
  as many come before it, over all epochs. Each epoch has an order of its own,
  from (seed, epoch)."""
  epoch, index = divmod(position, batches_per_epoch(rows, batch_size))
  order = _epoch_order(num_rows(rows), seed, epoch)
  chosen = order[index * batch_size :][:batch_size]
  return {name: array[chosen] for name, array in rows.items()}


def in_order(rows: Rows, *, batch_size: int) -> Iterator[Rows]:
  """Every row once, for evaluation; the last batch is filled with empty rows,
  which have no loss weight."""
  for first in range(0, num_rows(rows), batch_size):
    missing = max(first + batch_size - num_rows(rows), 0)
    yield {
      name: np.pad(array[first:][:batch_size], ((0, missing), (0, 0)))
      for name, array in rows.items()
    }


def generator(seed: int, index: int) -> np.random.Generator:
  """Draws of their own for each epoch, or each batch, of a stream."""
  sequence = np.random.SeedSequence([seed, index])
  return np.random.Generator(np.random.Philox(sequence))


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
  return generator(seed, epoch).permutation(count)


def _assign(
  lengths: np.ndarray, limits: np.ndarray, max_examples: int | None
) -> list[list[int]]:
  """Indices of examples `[N, sides]` by row: best fit among the open rows."""
  room = np.tile(limits, (_NUM_OPEN_ROWS, 1))
  open_rows: list[list[int]] = [[] for _ in range(_NUM_OPEN_ROWS)]
  closed = []
  for i, length in enumerate(lengths):
    left = (room - length).min(axis=1)
    fits = left >= 0
    if fits.any():
      chosen = int(np.where(fits, left, limits.max() + 1).argmin())
    else:
      chosen = int(room.sum(axis=1).argmin())
      closed.append(open_rows[chosen])
      open_rows[chosen], room[chosen] = [], limits
    open_rows[chosen].append(i)
    room[chosen] -= length
    if max_examples is not None and len(open_rows[chosen]) >= max_examples:
      room[chosen] = 0
  return [*closed, *filter(None, open_rows)]


def _fill(
  name: str, side: Side, members: list[np.ndarray], limit: int
) -> dict[str, np.ndarray]:
  """Tokens, segments and positions of one side."""
  flat, offsets = side
  tokens, segments, positions = np.zeros((3, len(members), limit), np.int32)
  for row, examples in enumerate(members):
    start = 0
    for segment, i in enumerate(examples, start=1):
      ids = flat[offsets[i] : offsets[i + 1]]
      end = start + len(ids)
      tokens[row, start:end] = ids
      segments[row, start:end] = segment
      positions[row, start:end] = np.arange(len(ids))
      start = end
  network = name.split('_')[0]
  return {
    f'{name}_tokens': tokens,
    f'{network}_segment_ids': segments,
    f'{network}_positions': positions,
  }
