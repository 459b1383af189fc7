"""Batches of one example per row and of similar lengths: little is padding.

A Spec-Drafter's block follows a prefix of its own in every row, so that no
other example can share the row, as they do in packed batches.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from specdec_jax.data import token_files, training_batches
from specdec_jax.data.datasets import Dataset, Features
from specdec_jax.files.paths import user_path


def from_token_files(
  folder: str,
  *,
  batch_tokens: int,
  limits: Sequence[int] = (16, 32, 64),
  seed: int = 0,
  max_validation_examples: int | None = None,
) -> Dataset:
  """Batches of `train.npz` and `validation.npz`, with inputs, in a folder.

  An example is in the first bucket whose limit neither its inputs nor its
  targets exceed. A batch is of one bucket and has `batch_tokens / limit` rows,
  over all devices; in every epoch each full batch of each bucket comes once, in
  an order of (seed, epoch). One step is compiled per bucket. The limits,
  columns of the rows, ascend. `max_validation_examples` None validates on all.

  Raises ValueError if there are no such files, an example is longer than the
  last limit, or a batch has not even one row.
  """
  if list(limits) != sorted(set(limits)) or not limits or limits[0] < 1:
    raise ValueError(f'limits should ascend from 1, got {list(limits)}')
  sizes = [batch_tokens // limit for limit in limits]
  if min(sizes) < 1:
    raise ValueError(f'{batch_tokens} tokens are no row of {limits[-1]}')
  buckets = _read(user_path(folder) / 'train.npz', limits, seed)
  counts = [
    training_batches.num_rows(rows) // size
    for rows, size in zip(buckets, sizes, strict=True)
  ]
  if not sum(counts):
    raise ValueError(f'{folder} has no full batch of {batch_tokens} tokens')

  def batch(position: int) -> Features:
    epoch, index = divmod(position, sum(counts))
    order = training_batches.generator(seed, epoch).permutation(sum(counts))
    nth, bucket = int(order[index]), 0
    while nth >= counts[bucket]:
      nth, bucket = nth - counts[bucket], bucket + 1
    return training_batches.batch(
      buckets[bucket],
      epoch * counts[bucket] + nth,
      batch_size=sizes[bucket],
      seed=seed,
    )

  def validation() -> Iterator[Features]:
    held_out = _read(path, limits, seed, max_validation_examples)
    for rows, size in zip(held_out, sizes, strict=True):
      yield from training_batches.in_order(rows, batch_size=size)

  path = user_path(folder) / 'validation.npz'
  ids = [
    int(rows[name].max(initial=0))
    for rows in buckets
    for name in ('encoder_input_tokens', 'decoder_target_tokens')
  ]
  return Dataset(
    batch=batch,
    validation=validation if path.is_file() else None,
    num_ids=1 + max(ids),
    vocabulary=token_files.find_vocabulary([user_path(folder)]),
    contents=buckets,
  )


def _read(
  path: Path, limits: Sequence[int], seed: int, count: int | None = None
) -> list[Features]:
  """The rows of every bucket, possibly none."""
  tokens = token_files.load(path)
  if tokens.inputs is None:
    raise ValueError(f'{path} has no inputs to be read by an encoder')
  sides = [np.diff(offsets) for _, offsets in tokens.sides.values()]
  lengths = np.max(sides, axis=0)[:count]
  if (longest := lengths.max(initial=0)) > limits[-1]:
    raise ValueError(
      f'{path} has an example of {longest} tokens, the last limit is '
      f'{limits[-1]}'
    )
  buckets = np.searchsorted(limits, lengths)
  return [
    training_batches.pack(
      token_files.take(tokens, np.flatnonzero(buckets == bucket)),
      input_length=limit,
      target_length=limit,
      seed=seed,
      max_examples=1,
    )
    for bucket, limit in enumerate(limits)
  ]
