"""Where batches come from, as functions of their position."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.data import token_files, training_batches

Features = Mapping[str, np.ndarray]


class Dataset(NamedTuple):
  """Training and validation examples; this process's rows of every batch.

  Attributes:
    batch: `(position) -> features`: an endless stream, of which a position is
      the whole state. A run that starts again at a position sees the same.
    validation: `() -> iterator of features`, each example once; None if there
      is nothing to validate on.
    prepare: `(position, params)`, called before the batch at a position is
      read, for text that depends on what has been learned so far; or None. It
      must do the same whether or not the run was broken off in between.
    num_ids: the network's vocabulary must have as many; None if not known.
  """

  batch: Callable[[int], Features]
  validation: Callable[[], Iterator[Features]] | None = None
  prepare: Callable[[int, Any], None] | None = None
  num_ids: int | None = None


def from_token_files(
  folder: str,
  *,
  batch_size: int,
  lengths: Mapping[str, int],
  seed: int = 0,
  vocabulary: str | None = None,
  max_examples_per_row: int | None = None,
  max_examples: int | None = None,
  max_validation_rows: int | None = None,
) -> Dataset:
  """Packed batches of `train.npz` and `validation.npz` in a folder.

  Args:
    folder: what `specdec data prepare` wrote.
    batch_size: rows of a batch, over all processes.
    lengths: columns of the encoder's and the decoder's rows, as `inputs` and
      `targets`; the first is ignored where examples have no inputs.
    seed: of the packing and of every epoch's order.
    vocabulary: the SentencePiece model that the files must have been made with;
      None asks for none.
    max_examples_per_row: 1 packs nothing; None is no limit.
    max_examples: trains on the first so many; None on all.
    max_validation_rows: validates on the first so many rows; None on all.

  Raises:
    ValueError: if there are no such files, they were made with another
      vocabulary, an example is too long, or there are fewer rows than a batch
      has.
  """
  if vocabulary is not None:
    token_files.check_vocabulary(
      token_files.load_description(folder),
      hashlib.sha256(Path(vocabulary).read_bytes()).hexdigest(),
    )

  def packed(split: str, limit: int | None) -> Features:
    tokens = token_files.load(Path(folder) / f'{split}.npz')
    if limit is not None:
      tokens = token_files.take(tokens, range(min(limit, len(tokens))))
    return training_batches.pack(
      tokens,
      input_length=lengths.get('inputs', 0),
      target_length=lengths['targets'],
      seed=seed,
      max_examples=max_examples_per_row,
    )

  def validation() -> Iterator[Features]:
    return training_batches.in_order(
      held_out, batch_size=batch_size, **processes
    )

  processes = {
    'process_index': jax.process_index(),
    'process_count': jax.process_count(),
  }
  rows = packed('train', max_examples)
  training_batches.batches_per_epoch(rows, batch_size)
  has_validation = (Path(folder) / 'validation.npz').is_file()
  held_out = packed('validation', None) if has_validation else {}
  held_out = {name: x[:max_validation_rows] for name, x in held_out.items()}
  return Dataset(
    batch=lambda position: training_batches.batch(
      rows, position, batch_size=batch_size, seed=seed, **processes
    ),
    validation=validation if has_validation else None,
    num_ids=1 + max(int(x.max()) for n, x in rows.items() if 'tokens' in n),
  )


def mix(
  datasets: Sequence[Dataset], ratios: Sequence[float], *, seed: int = 0
) -> Dataset:
  """Batches of several data sets, each drawn with its own chance.

  DistillSpec mixes a data set's text with generated text this way. Which one a
  batch comes from depends on the seed and its position; its position in that
  data set is the same.

  Args:
    datasets: those to mix; the first one's validation is taken.
    ratios: chances, as many as data sets, of sum 1.
    seed: of the draws.

  Raises:
    ValueError: if the ratios are no such chances.
  """
  if len(ratios) != len(datasets) or min(ratios, default=-1.0) < 0:
    raise ValueError(f'{len(datasets)} data sets with ratios {list(ratios)}')
  if abs(sum(ratios) - 1) > 1e-6:
    raise ValueError(f'ratios {list(ratios)} have the sum {sum(ratios)}, not 1')

  def batch(position: int) -> Features:
    generator = np.random.Generator(
      np.random.Philox(np.random.SeedSequence([seed, position]))
    )
    chosen = generator.choice(len(datasets), p=np.asarray(ratios))
    return datasets[chosen].batch(position)

  def prepare(position: int, params: Any) -> None:
    for dataset in datasets:
      if dataset.prepare is not None:
        dataset.prepare(position, params)

  return Dataset(
    batch=batch,
    validation=datasets[0].validation,
    prepare=prepare,
    num_ids=max(dataset.num_ids or 0 for dataset in datasets),
  )
