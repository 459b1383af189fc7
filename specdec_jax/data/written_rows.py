"""Batches of texts that a model wrote, with its residual streams."""

import dataclasses
import itertools

import numpy as np

from specdec_jax.data import datasets, token_files, training_batches
from specdec_jax.data import written_texts as texts_lib
from specdec_jax.data.datasets import Dataset
from specdec_jax.data.training_batches import Group, Rows
from specdec_jax.data.written_texts import WrittenTexts


def from_written_texts(
  folder: str,
  *,
  batch_size: int,
  length: int = 512,
  num_parts: int | None = None,
  held_out: int = 64,
  seed: int = 0,
  max_validation_rows: int | None = None,
) -> Dataset:
  """Makes packed batches of a folder of `specdec data write --prompts
  --layers`.

  Features are `decoder_target_tokens`, `decoder_segment_ids`, and
  `decoder_loss_weights`, 1 for tokens that the model wrote, as in
  `training_batches`; `log_probs`, float32 `[B, T]`; `streams`, bfloat16 `[B, T,
  F]`, read from the files when a batch is made.

  Args:
    batch_size: rows of a batch, over all devices.
    length: columns of a row; longer texts are cut.
    num_parts: trains on the first so many parts; None on all that are complete.
    held_out: one of so many texts of a part is for validation; at least 2.
    seed: of the packing and of every epoch's order.
    max_validation_rows: validates on the first so many rows; None on all.

  Raises ValueError if there are no texts, they have no streams, there are fewer
  rows than a batch has, or `held_out` is out of range.
  """
  if held_out < 2:
    raise ValueError(
      f'held_out is {held_out}: one of so many texts is for validation, and of '
      'fewer than 2 none would be left to train on'
    )
  parts = texts_lib.load_parts(folder, num_parts)
  if any(part.streams is None for part in parts):
    raise ValueError(
      f'{folder} has no residual streams: give specdec data write --layers'
    )
  starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
  # Streams are too many to be packed, and stay in their files. So rows are
  # packed of places: a text of 3 tokens after 100 others is [100, 101, 102].
  spans = [
    (i % held_out == 0, range(begin + start, begin + min(end, start + length)))
    for begin, part in zip(starts, parts, strict=False)
    for i, (start, end) in enumerate(itertools.pairwise(part.offsets))
  ]

  def group(is_held_out: bool, count: int | None = None) -> Group:
    places = [span for is_out, span in spans if is_out == is_held_out]
    rows = training_batches.pack(
      token_files.from_rows(None, places),
      input_length=0,
      target_length=length,
      seed=seed,
    )
    return Group({name: x[:count] for name, x in rows.items()}, batch_size)

  texts = _Texts(
    starts=starts,
    parts=parts,
    tokens=np.concatenate([part.tokens for part in parts]),
    log_probs=np.concatenate([part.log_probs for part in parts]),
    is_written=np.concatenate([texts_lib.is_written(part) for part in parts]),
  )
  validation = [group(True, max_validation_rows)]
  rows = datasets.of_groups([group(False)], seed=seed)
  return Dataset(
    batch=lambda position: texts.read(rows.batch(position)),
    validation=lambda: map(texts.read, training_batches.in_order(validation)),
    num_ids=1 + int(texts.tokens.max()),
    contents=(texts.tokens, texts.log_probs),
  )


@dataclasses.dataclass(frozen=True)
class _Texts:
  """The parts of a folder end to end, and where each of them starts."""

  starts: np.ndarray
  parts: list[WrittenTexts]
  tokens: np.ndarray
  log_probs: np.ndarray
  is_written: np.ndarray

  def read(self, rows: Rows) -> Rows:
    """Reads what stands at the places of packed rows."""
    places = rows['decoder_target_tokens']
    segments = rows['decoder_segment_ids']
    # Padding has place 0, which is a token of the first text: it is masked.
    at = lambda x, dtype: np.where(segments > 0, x[places], 0).astype(dtype)
    of_parts = [np.asarray(part.streams) for part in self.parts]
    shape, dtype = (*places.shape, of_parts[0].shape[1]), of_parts[0].dtype
    streams = np.zeros(shape, dtype)
    for start, own in zip(self.starts, of_parts, strict=False):
      # Of starts [0, 100, 250], place 120 is token 20 of part 1.
      is_here = (segments > 0) & (start <= places) & (places < start + len(own))
      streams[is_here] = own[places[is_here] - start]
    return {
      'decoder_segment_ids': segments,
      'decoder_target_tokens': at(self.tokens, np.int32),
      'decoder_loss_weights': at(self.is_written, np.float32),
      'log_probs': at(self.log_probs, np.float32),
      'streams': streams,
    }
