"""Batches for training: several examples per row, in a resumable order.

Features have T5X's names and meanings (https://github.com/google/seqio,
feature_converters.py): tokens are 0 where padded, segments are numbered from 1
in each row, positions count from 0 in each segment, and the decoder's input is
its target shifted right within the segment, from 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax.files.require import require
from specdec_jax.training.data.token_files import Texts, TokenFile

Rows = Mapping[str, np.ndarray]
# Rows that are still open while examples are packed. More fill the rows better,
# and take longer: 64 leave a few hundredths of a row empty.
_NUM_OPEN_ROWS = 64
# The prefixes of the names of T5X's features.
_FEATURES = {'inputs': 'encoder_input', 'targets': 'decoder_target'}


def pack(
  tokens: TokenFile,
  *,
  input_length: int,
  target_length: int,
  seed: int = 0,
  max_examples: int | None = None,
) -> Rows:
  """Puts several examples into each row, as many as fit.

  Examples are taken in an order shuffled by `seed`, and each goes into the one
  open row that it fills best. A row has E = `input_length` columns for the
  encoder, ignored without inputs, T = `target_length` for the decoder, and at
  most `max_examples`; 1 packs nothing, None sets no limit.

  Returns R rows by feature: int32 `[R, E]` named `encoder_input_tokens`,
  `encoder_segment_ids`, `encoder_positions` if there are inputs; int32 `[R, T]`
  named `decoder_target_tokens`, `decoder_input_tokens`, `decoder_segment_ids`,
  `decoder_positions`; float32 `[R, T]` named `decoder_loss_weights`. ValueError
  if an example is longer than a row.
  """
  limits = {'inputs': input_length, 'targets': target_length}
  features = tokens.features
  for name, feature in features.items():
    if (longest := feature.lengths.max(initial=0)) > limits[name]:
      raise ValueError(
        f'an example has {longest} {name} tokens, a row has room for '
        f'{limits[name]}'
      )
  # Neighbours in a file are similar. Philox is one stream on every machine.
  order = np.random.Generator(np.random.Philox(seed)).permutation(len(tokens))
  lengths = np.stack([feature.lengths for feature in features.values()], 1)[
    order
  ]
  room = np.array([limits[name] for name in features])
  members = [order[group] for group in _assign(lengths, room, max_examples)]
  rows: dict[str, np.ndarray] = {}
  for name, feature in features.items():
    rows |= _fill(_FEATURES[name], feature, members, limits[name])
  # Targets [5, 6, 1, 7, 1, 0] of two examples become inputs
  # [0, 5, 6, 0, 7, 0]: each example begins from 0, not from the last one's EOS.
  targets = rows['decoder_target_tokens']
  shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
  is_first = rows['decoder_positions'] == 0
  rows['decoder_input_tokens'] = np.where(is_first, 0, shifted)
  is_text = rows['decoder_segment_ids'] > 0
  rows['decoder_loss_weights'] = is_text.astype(np.float32)
  return rows


def num_rows(rows: Rows) -> int:
  """Counts the packed rows, R."""
  return len(rows['decoder_target_tokens'])


class Group(NamedTuple):
  """Rows of one shape, and how many of them a batch has, over all devices."""

  rows: Rows
  batch_size: int


def epochs(groups: Sequence[Group], *, seed: int = 0) -> Callable[[int], Rows]:
  """Makes an endless stream of batches: the one at a position, by it alone.

  A batch is of one group. Each epoch has an order of its own and every row at
  most once; those that fill no batch differ from epoch to epoch. ValueError if
  there is not one full batch.
  """
  # Imported late, as it takes most of a second.
  grain = require('grain', extra='train', purpose='training')
  # Of rows 0 to 4 in batches of two, one epoch is [3, 0], [4, 1], and the next,
  # seeded anew by `repeat`, is [1, 2], [0, 3]. Batches are then shuffled too,
  # so that those of several groups alternate.
  one_epoch = [
    grain.MapDataset.range(num_rows(rows))
    .shuffle(seed)
    .batch(batch_size, drop_remainder=True)
    .map(lambda chosen, rows=rows: {k: x[chosen] for k, x in rows.items()})
    for rows, batch_size in groups
    if num_rows(rows) >= batch_size
  ]
  if not one_epoch:
    raise ValueError(
      'not one full batch: '
      + ', '.join(f'{num_rows(rows)} rows of {n}' for rows, n in groups)
    )
  stream = grain.MapDataset.concatenate(one_epoch).shuffle(seed).repeat()
  return stream.__getitem__


def in_order(groups: Sequence[Group]) -> Iterator[Rows]:
  """Yields every row once, for evaluation; the last batch of a group is filled
  with empty rows, which have no loss weight."""
  for rows, batch_size in groups:
    # Of 5 rows in batches of 2 the third has a row, and one that is empty.
    for first in range(0, num_rows(rows), batch_size):
      missing = max(first + batch_size - num_rows(rows), 0)
      yield {
        name: np.pad(array[first:][:batch_size], ((0, missing), (0, 0)))
        for name, array in rows.items()
      }


def _assign(
  lengths: np.ndarray, limits: np.ndarray, max_examples: int | None
) -> list[list[int]]:
  """Assigns examples to rows; returns the indices of each row's."""
  # An example goes into the open row in which it leaves the least room, of
  # inputs or of targets. If it fits none, the fullest row is closed: rows
  # with room for [3], [9] and [5] tokens take one of 4 into the last of them,
  # and one of 10 closes the first. The packers of grain, which are experimental
  # still, took five times as long for 30,000 examples.
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
  name: str, texts: Texts, members: list[np.ndarray], limit: int
) -> dict[str, np.ndarray]:
  """Returns the tokens, segments and positions of inputs or of targets."""
  # Of texts [5, 6, 1] and [7, 1] in a row of 6, tokens are [5, 6, 1, 7, 1, 0],
  # segments [1, 1, 1, 2, 2, 0] and positions [0, 1, 2, 0, 1, 0].
  tokens, segments, positions = np.zeros((3, len(members), limit), np.int32)
  for row, examples in enumerate(members):
    start = 0
    for segment, i in enumerate(examples, start=1):
      ids = texts[i]
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
