"""Readers of the extra `training` that the fuzzer damages files for, and the
files that they read."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specdec_jax.training.data import token_files, written_texts
from tests.fuzz.reader import JSON, Reader


def _read_written(folder: Path) -> None:
  written_texts.load_description(folder).counts('layers', [])
  written_texts.token_counts(folder, 12)
  texts = written_texts.from_written_texts(
    str(folder), batch_size=1, length=8, held_out=2
  )
  texts.batch(0)


def _read_tokens(folder: Path) -> None:
  token_files.load(folder / 'train.npz')


READERS = {
  'tokens': Reader('tokens', 'train.npz', _read_tokens),
  'written': Reader('written', 'part-00000/*.npy', _read_written),
  'written_json': Reader('written', 'written.json', _read_written, JSON),
}


def write_seeds(folder: Path) -> None:
  """Writes the files that the readers read, in folders of their own."""
  _write_written(folder / 'written')
  (folder / 'tokens').mkdir()
  tokens = token_files.from_rows([[5, 1], [1]], [[6, 7, 1], [70_000, 1]])
  token_files.save(folder / 'tokens' / 'train.npz', tokens)


def _write_written(folder: Path) -> None:
  rows = [np.array(row) for row in ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8])]
  texts = written_texts.join(
    rows,
    [2, 1, 3],
    [np.full(len(row), -0.5, np.float32) for row in rows],
    [np.ones((len(row), 2), jnp.bfloat16) for row in rows],
  )
  written_texts.begin(folder, {'model': 'a', 'layers': [1, 2], 'parts': 1})
  written_texts.save_part(folder, 0, texts)
