"""Data sets: batches as functions of their position."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.files.paths import user_path
from specdec_jax.text import sentencepiece_vocabulary, tasks
from specdec_jax.training.data import preparation, token_files, training_batches
from specdec_jax.training.data.preparation import Lengths
from specdec_jax.training.data.token_files import TokenFile
from specdec_jax.training.data.training_batches import Group, Rows


class Dataset(NamedTuple):
  """Training and validation examples.

  Every process has all rows of a batch, of which `mesh.place_batch` places
  those of the process's devices. The contents of a batch therefore depend only
  on its position, not on the mesh or the number of processes.

  Attributes:
    batch: `position -> batch`; the position is the stream's only state.
    validation: each example once.
    prepare: `(position, params)`, called before the batch at a position is
      read, for text that depends on the current parameters. It must do the same
      whether or not the run was interrupted in between.
    num_ids: the least size of the network's vocabulary, if known.
    vocabulary: the SentencePiece model of its ids, if known.
    extra_ids: the number of sentinels after that model's pieces.
    contents: a tree of the data set's arrays, for a digest.
  """

  batch: Callable[[int], Rows]
  validation: Callable[[], Iterator[Rows]] | None = None
  prepare: Callable[[int, Any], None] | None = None
  num_ids: int | None = None
  vocabulary: Path | None = None
  extra_ids: int = 0
  contents: object = ()


def from_token_files(
  folder: str | Sequence[str],
  *,
  batch_size: int,
  lengths: Mapping[str, int],
  seed: int = 0,
  vocabulary: str | None = None,
  max_examples_per_row: int | None = None,
  max_examples: int | None = None,
  max_validation_rows: int | None = None,
) -> Dataset:
  """Makes packed batches of `train.npz` and `validation.npz` in a folder.

  Args:
    folder: a folder of `specdec data prepare`; or several, whose examples are
      mixed in proportion to their numbers.
    batch_size: rows of a batch, over all devices.
    lengths: columns of the encoder's and the decoder's rows, as `inputs` and
      `targets`; the first is ignored where examples have no inputs.
    seed: of the packing and of every epoch's order.
    vocabulary: the SentencePiece model of the files; by default the folder's.
    max_examples_per_row: 1 disables packing; None sets no limit.
    max_examples: trains on the first ones of every folder; None for all.
    max_validation_rows: validates on the first rows; None for all.

  Raises ValueError if there are no such files, they were made with another
  vocabulary, an example is too long, only some folders have inputs, or there
  are fewer rows than a batch has.
  """
  names = [folder] if isinstance(folder, str) else folder
  folders = [user_path(name) for name in names]
  if vocabulary is not None:
    model = user_path(vocabulary).read_bytes()
    for path in folders:
      token_files.check_vocabulary(path, model)
  model_path = token_files.find_vocabulary(folders)
  train = [token_files.load(path / 'train.npz') for path in folders]
  if max_examples is not None:
    train = [token_files.take(x, range(len(x))[:max_examples]) for x in train]
  held_out = [path / 'validation.npz' for path in folders]
  validation = [token_files.load(path) for path in held_out if path.is_file()]
  return from_tokens(
    train,
    validation,
    batch_size=batch_size,
    lengths=lengths,
    seed=seed,
    max_examples_per_row=max_examples_per_row,
    max_validation_rows=max_validation_rows,
  )._replace(vocabulary=user_path(vocabulary) if vocabulary else model_path)


def from_task(
  name: str,
  *,
  vocabulary: str,
  batch_size: int,
  lengths: Mapping[str, int],
  validation_name: str | None = None,
  train_split: str = 'train',
  validation_split: str = 'validation',
  data_dir: str | None = None,
  extra_ids: int = 0,
  seed: int = 0,
  max_validation_rows: int | None = None,
) -> Dataset:
  """Makes packed batches of a SeqIO task or a text file: see `text.tasks.find`.

  Texts that are too long are trimmed, and end in EOS all the same, as after
  SeqIO's `append_eos_after_trim`. All of the task is encoded before the first
  step. Of that packed rows stay in memory, 12 bytes for a position of the
  encoder and 20 for one of the decoder. The SentencePiece `vocabulary` has
  `extra_ids` sentinels after its pieces, 100 for T5. `validation_name` None is
  the same SeqIO task, and nothing for a file. Arguments that are not listed are
  those of `from_token_files` and of `find`.

  Raises ValueError if there is no such task, or it has no targets; ImportError
  if seqio or sentencepiece is needed and not installed.
  """
  words = sentencepiece_vocabulary.load(vocabulary, extra_ids=extra_ids)
  limits = Lengths(
    inputs=lengths.get('inputs', 0),
    targets=lengths['targets'],
    too_long='trim_both',
  )

  def read(task_name: str, split: str) -> TokenFile:
    task = tasks.find(task_name, split=split, data_dir=data_dir)
    examples = (_pair(example, task_name) for example in task.read())
    return preparation.encode(examples, words, limits, name=task.name)[0]

  # A file has no splits: validation would be on the training data.
  if validation_name is None and Path(name).suffix not in tasks.SUFFIXES:
    validation_name = name
  return from_tokens(
    [read(name, train_split)],
    [read(validation_name, validation_split)] if validation_name else (),
    batch_size=batch_size,
    lengths=lengths,
    seed=seed,
    max_validation_rows=max_validation_rows,
  )._replace(vocabulary=user_path(vocabulary), extra_ids=extra_ids)


def _pair(example: tasks.Example, name: str) -> tuple[str | None, str | None]:
  """Returns the texts of an example; ValueError for a dialogue, or tokens."""
  if example.dialogue is not None:
    raise ValueError('"messages" are for infer: training needs texts')
  if example.input_ids is not None or example.target_ids is not None:
    raise ValueError(f'{name} has tokens: training needs texts')
  # `find` calls a line of a text file an input; here it is a target.
  if Path(name).suffix == '.txt':
    return None, example.inputs
  return example.inputs or None, example.targets


def from_tokens(
  train: Sequence[TokenFile],
  validation: Sequence[TokenFile] = (),
  *,
  batch_size: int,
  lengths: Mapping[str, int],
  seed: int = 0,
  max_examples_per_row: int | None = None,
  max_validation_rows: int | None = None,
) -> Dataset:
  """Makes packed batches of examples in memory; see `from_token_files`."""

  def group(files: Sequence[TokenFile], count: int | None = None) -> Group:
    rows = training_batches.pack(
      token_files.concatenate(files),
      input_length=lengths.get('inputs', 0),
      target_length=lengths['targets'],
      seed=seed,
      max_examples=max_examples_per_row,
    )
    return Group({name: x[:count] for name, x in rows.items()}, batch_size)

  held_out = [group(validation, max_validation_rows)] if validation else []
  return of_groups([group(train)], held_out, seed=seed)


def of_groups(
  train: Sequence[Group], held_out: Sequence[Group] = (), *, seed: int = 0
) -> Dataset:
  """Makes a data set of packed rows; see `training_batches.epochs`."""
  # Ids count from 0: of tokens up to 84 the network needs 85.
  validate = functools.partial(training_batches.in_order, held_out)
  return Dataset(
    batch=training_batches.epochs(train, seed=seed),
    validation=validate if held_out else None,
    num_ids=1
    + max(
      int(array.max(initial=0))
      for rows, _ in train
      for name, array in rows.items()
      if name.endswith('_tokens')
    ),
    contents=(train, held_out),
  )


def mix(
  datasets: Sequence[Dataset], ratios: Sequence[float], *, seed: int = 0
) -> Dataset:
  """Mixes batches of several data sets, each drawn with its own probability.

  DistillSpec mixes a data set's text with generated text this way. Which one a
  batch comes from depends on the seed and its position, which is the same in
  that data set. Validation and vocabulary are those of the first. ValueError if
  `ratios` are not one probability each, or there are several vocabularies.
  """
  if len(ratios) != len(datasets):
    raise ValueError(f'{len(datasets)} data sets with ratios {list(ratios)}')
  if len({d.vocabulary.read_bytes() for d in datasets if d.vocabulary}) > 1:
    raise ValueError('the data sets were made with several vocabularies')

  # Each position has a draw of its own, not the next of a stream: a run that
  # resumes at position 1,000 needs none of the 1,000 before.
  def choose(position: int) -> Dataset:
    draws = np.random.Philox(np.random.SeedSequence([seed, position]))
    chosen = np.random.Generator(draws).choice(len(datasets), p=ratios)
    return datasets[chosen]

  choose(0)  # numpy refuses ratios that are no probabilities.

  # Prepares all data sets, whichever is read at this position: a run that
  # resumes in between then finds the same as one that was not interrupted.
  def prepare(position: int, params: Any) -> None:
    for dataset in datasets:
      if dataset.prepare is not None:
        dataset.prepare(position, params)

  return Dataset(
    batch=lambda position: choose(position).batch(position),
    validation=datasets[0].validation,
    prepare=prepare,
    num_ids=max(dataset.num_ids or 0 for dataset in datasets),
    vocabulary=datasets[0].vocabulary,
    extra_ids=datasets[0].extra_ids,
    contents=[dataset.contents for dataset in datasets],
  )
