"""Batches of texts that a model wrote, with its residual streams."""

import itertools
from collections.abc import Sequence

import numpy as np

from specdec_jax.data import (
  datasets,
  token_files,
  training_batches,
  written_texts,
)
from specdec_jax.data.datasets import Dataset
from specdec_jax.data.token_files import TokenFile
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
  `training_batches`; `log_probs`, float32 `[B, T]`; `streams`, bfloat16
  `[B, T, F]`. Streams are read from the files when a batch is made.

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
  parts = written_texts.load_parts(folder, num_parts)
  streams = [texts.streams for texts in parts if texts.streams is not None]
  if len(streams) < len(parts):
    raise ValueError(
      f'{folder} has no residual streams: give specdec data write --layers'
    )
  texts = _Texts(parts, streams)

  def group(is_held_out: bool, count: int | None = None) -> Group:
    rows = training_batches.pack(
      texts.places(held_out, length, is_held_out=is_held_out),
      input_length=0,
      target_length=length,
      seed=seed,
    )
    return Group({name: x[:count] for name, x in rows.items()}, batch_size)

  validation = [group(True, max_validation_rows)]
  rows = datasets.of_groups([group(False)], seed=seed)
  return Dataset(
    batch=lambda position: texts.read(rows.batch(position)),
    validation=lambda: map(texts.read, training_batches.in_order(validation)),
    num_ids=1 + int(texts.tokens.max()),
    contents=(texts.tokens, texts.log_probs),
  )


class _Texts:
  """The parts of a folder end to end; rows are packed of places in them."""

  def __init__(
    self, parts: Sequence[WrittenTexts], streams: Sequence[np.ndarray]
  ):
    self.parts, self.streams = parts, streams
    self.starts = np.cumsum([0, *(len(texts.tokens) for texts in parts)])
    self.tokens = np.concatenate([texts.tokens for texts in parts])
    self.log_probs = np.concatenate([texts.log_probs for texts in parts])
    self.is_written = np.concatenate(
      [written_texts.is_written(texts) for texts in parts]
    )

  def places(
    self, held_out: int, length: int, *, is_held_out: bool
  ) -> TokenFile:
    """Lists where the tokens of each text are, instead of tokens."""
    # Streams are too many to be packed, and stay in their files. So rows are
    # packed of places: a text of 3 tokens after 100 others is [100, 101, 102].
    spans = [
      range(begin + start, begin + min(end, start + length))
      for begin, texts in zip(self.starts, self.parts, strict=False)
      for i, (start, end) in enumerate(itertools.pairwise(texts.offsets))
      if (i % held_out == 0) == is_held_out
    ]
    return token_files.from_rows(None, spans)

  def read(self, rows: Rows) -> Rows:
    """Reads what stands at the places of packed rows."""
    places = rows['decoder_target_tokens']
    segments = rows['decoder_segment_ids']
    # Padding has place 0, which is a token of the first text: it is masked.
    at = lambda x, dtype: np.where(segments > 0, x[places], 0).astype(dtype)
    first = self.streams[0]
    streams = np.zeros((*places.shape, first.shape[1]), first.dtype)
    for start, own in zip(self.starts, self.streams, strict=False):
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
