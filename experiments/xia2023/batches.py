"""Batches of one example per row and of similar lengths: little is padding."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specdec_jax.files.paths import user_path
from specdec_jax.training.data import datasets, token_files, training_batches
from specdec_jax.training.data.datasets import Dataset
from specdec_jax.training.data.training_batches import Group


def from_length_buckets(
  folder: str | Sequence[str],
  *,
  batch_tokens: int,
  limits: Sequence[int] = (16, 32, 64),
  seed: int = 0,
  max_validation_examples: int | None = None,
) -> Dataset:
  """Makes batches of one example per row and of similar lengths, as of
  `datasets.from_token_files`: the block of a Spec-Drafter follows a prefix of
  its own in every row, so that no other example can share the row. Examples of
  several folders are mixed.

  An example is in the first bucket whose limit neither its inputs nor its
  targets exceed. A batch is of one bucket and has `batch_tokens / limit` rows,
  over all devices; in every epoch each full batch of each bucket comes once, in
  an order of (seed, epoch). One step is compiled per bucket.

  Raises ValueError if there are no such files or inputs, limits do not ascend,
  an example is longer than the last, or a batch has not even one row.
  """
  if list(limits) != sorted(set(limits)) or not limits or limits[0] < 1:
    raise ValueError(f'limits should ascend from 1, got {list(limits)}')
  if batch_tokens < limits[-1]:
    raise ValueError(f'{batch_tokens} tokens are no row of {limits[-1]}')

  names = [folder] if isinstance(folder, str) else folder
  folders = [user_path(name) for name in names]

  def groups(files: list[Path], count: int | None = None) -> list[Group]:
    tokens = token_files.concatenate([token_files.load(x) for x in files])
    if tokens.inputs is None:
      raise ValueError(f'{files[0]} has no inputs to be read by an encoder')
    lengths = [texts.lengths for texts in tokens.features.values()]
    # Lengths [3, 16, 17] are in buckets [0, 0, 1] of limits [16, 32]; what is
    # longer than the last has no room there either, as `pack` says.
    buckets = np.searchsorted(limits[:-1], np.max(lengths, axis=0)[:count])
    return [
      Group(
        training_batches.pack(
          token_files.take(tokens, np.flatnonzero(buckets == bucket)),
          input_length=limit,
          target_length=limit,
          seed=seed,
          max_examples=1,
        ),
        batch_tokens // limit,
      )
      for bucket, limit in enumerate(limits)
    ]

  held_out = [path / 'validation.npz' for path in folders]
  held_out = [path for path in held_out if path.is_file()]
  return datasets.of_groups(
    groups([path / 'train.npz' for path in folders]),
    groups(held_out, max_validation_examples) if held_out else (),
    seed=seed,
  )._replace(vocabulary=token_files.find_vocabulary(folders))
