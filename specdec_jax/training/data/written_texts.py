"""Texts that a model wrote, with the states it had meanwhile, in parts on disk.

A folder has a description and parts, `part-00000` and so on, with one file per
array, which is memory-mapped. A part appears when it is complete, so that a
writer may be killed at any moment.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specdec_jax.files import replacing, settings
from specdec_jax.files.paths import local_path, remove_tree
from specdec_jax.files.settings import Settings
from specdec_jax.launch import agreement
from specdec_jax.training.data import datasets, token_files
from specdec_jax.training.data.datasets import Dataset
from specdec_jax.training.data.training_batches import Rows

DESCRIPTION = 'written.json'
# One folder of written texts, or several.
Folders = str | Path | Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenTexts:
  """M texts of N tokens together, end to end.

  Attributes:
    tokens: uint16 or int32 `[N]`, each text's prompt and what followed it.
    offsets: int64 `[M + 1]`, where texts begin.
    prompt_lengths: int32 `[M]`, tokens of a text that the model did not write.
    log_probs: float32 `[N]`, under the model's own softmax; 0 for a prompt's.
    streams: bfloat16 `[N, F]`, residual streams at every token, one after
      another; zeros at the last token of a text, which the model never read.
      None if they were not kept.
  """

  tokens: np.ndarray
  offsets: np.ndarray
  prompt_lengths: np.ndarray
  log_probs: np.ndarray
  streams: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.prompt_lengths)

  @property
  def num_written(self) -> int:
    """Counts the tokens that the model wrote."""
    return len(self.tokens) - int(self.prompt_lengths.sum())


def join(
  tokens: Sequence[np.ndarray],
  prompt_lengths: Sequence[int],
  log_probs: Sequence[np.ndarray],
  streams: Sequence[np.ndarray] | None,
) -> WrittenTexts:
  """Puts texts end to end, from the arrays of each."""
  return WrittenTexts(
    **vars(token_files.texts(tokens)),
    prompt_lengths=np.array(prompt_lengths, np.int32),
    log_probs=np.concatenate(log_probs).astype(np.float32),
    streams=None if streams is None else np.concatenate(streams),
  )


def part_path(folder: str | Path, index: int) -> Path:
  """Names the folder of a part."""
  return local_path(folder) / f'part-{index:05}'


def save_part(folder: str | Path, index: int, texts: WrittenTexts) -> None:
  """Writes a part, complete or not at all; equal texts give equal bytes."""
  with replacing.new_folder(part_path(folder, index)) as partial:
    for name, array in vars(texts).items():
      if array is not None:
        # numpy's files have no type bfloat16.
        bits = array.view(np.uint16) if name == 'streams' else array
        np.save(partial / f'{name}.npy', bits)


def load_part(folder: str | Path, index: int) -> WrittenTexts:
  """Maps a part into memory; ValueError if it is damaged."""
  path = part_path(folder, index)
  arrays: dict[str, np.ndarray] = {}
  for field in dataclasses.fields(WrittenTexts):
    file = path / f'{field.name}.npy'
    if field.name == 'streams' and not file.is_file():
      continue
    try:
      # A memory map keeps no file open; a process may open only so many.
      arrays[field.name] = np.lib.format.open_memmap(file, mode='r')
    except Exception as error:  # Also what parsing a header raises.
      raise ValueError(f'{file} is missing or damaged: {error}') from error
  damage = _damage(arrays)
  if damage:
    raise ValueError(f'{path} is damaged: {damage}')
  if 'streams' in arrays:
    arrays['streams'] = arrays['streams'].view(jnp.bfloat16)
  return WrittenTexts(**arrays)


def _damage(arrays: Mapping[str, np.ndarray]) -> str | None:
  """Describes the first thing wrong with a part's arrays, streams in uint16."""
  tokens, offsets = arrays['tokens'], arrays['offsets']
  prompt_lengths = arrays['prompt_lengths']
  width = arrays['streams'].shape[-1:] if 'streams' in arrays else ()
  for name, array in arrays.items():
    shape, dtypes = {
      'tokens': ((tokens.size,), 'uint16 or int32'),
      'offsets': ((prompt_lengths.size + 1,), 'int64'),
      'prompt_lengths': ((prompt_lengths.size,), 'int32'),
      'log_probs': ((tokens.size,), 'float32'),
      'streams': ((tokens.size, *width), 'uint16'),
    }[name]
    if array.shape != shape or str(array.dtype) not in dtypes.split(' or '):
      description = f'{array.dtype} {list(array.shape)}'
      return f'{name} is {description}, expected {dtypes} {list(shape)}'
  is_within = offsets.min() >= 0 and offsets.max() <= tokens.size
  if offsets[0] or offsets[-1] != tokens.size or not is_within:
    return f'its offsets do not divide {tokens.size} tokens'
  # Offsets [0, 3, 5] have room for prompts of 3 and 2 tokens.
  if ((prompt_lengths < 1) | (prompt_lengths > np.diff(offsets))).any():
    return 'a prompt is longer than its text'
  return f'it has token {tokens.min()}' if tokens.min(initial=0) < 0 else None


def part_indices(folder: str | Path) -> list[int]:
  """Lists the complete parts of a folder, in order."""
  names = [path.name for path in local_path(folder).glob('part-*')]
  # Others, such as `part-00002.tmp-7-1f3c`, are begun.
  return sorted(int(x[5:]) for x in names if re.fullmatch(r'part-\d{5,}', x))


def load_description(folder: str | Path) -> Settings:
  """Reads what `specdec data write --prompts` wrote about a folder, to be read
  key by key; ValueError if there is none, or it is damaged."""
  return settings.read(local_path(folder) / DESCRIPTION)


def begin(folder: str | Path, description: Mapping[str, object]) -> None:
  """Starts or resumes a folder; ValueError if it has anything else."""
  path = local_path(folder)
  if (path / DESCRIPTION).is_file():
    stored = load_description(path).values
    before = {name: str(value) for name, value in stored.items()}
    now = {name: str(value) for name, value in description.items()}
    changes = agreement.differences(before, now, '{} was {}, now {}')
    if changes:
      raise ValueError(
        f'{folder} has texts of other settings: {changes}; choose another '
        'folder, or remove it'
      )
    # Remove the incomplete parts of killed writers; only one writes at a time.
    for incomplete in path.glob('part-*.tmp-*'):
      remove_tree(incomplete)
    return
  if path.exists() and any(file.name != '.lock' for file in path.iterdir()):
    raise ValueError(f'{folder} holds something else: choose another folder')
  path.mkdir(parents=True, exist_ok=True)
  text = json.dumps(dict(description), indent=2) + '\n'
  replacing.write_text(path / DESCRIPTION, text)


def token_counts(
  folders: Folders, vocab_size: int, *, num_parts: int | None = None
) -> np.ndarray:
  """Counts how often the model wrote each token, int64 `[V]`, in what
  `load_parts` loads; ValueError if a token is none of V."""
  counts = np.zeros(vocab_size, np.int64)
  for texts in load_parts(folders, num_parts):
    written = texts.tokens[is_written(texts)]
    if (largest := int(written.max(initial=0))) >= vocab_size:
      raise ValueError(
        f'{folders} has token {largest}, which is none of {vocab_size}'
      )
    counts += np.bincount(written, minlength=vocab_size)
  return counts


def most_frequent(counts: np.ndarray, size: int) -> tuple[np.ndarray, float]:
  """Picks the ids of that many tokens, ascending, and their share of the
  counts; of tokens that are equally frequent, the lower ids."""
  # Stable: of counts [2, 5, 5] the order is [1, 2, 0].
  order = np.argsort(-counts, kind='stable')
  chosen = np.sort(order[:size])
  return chosen, float(counts[chosen].sum() / max(counts.sum(), 1))


def is_written(texts: WrittenTexts) -> np.ndarray:
  """Marks the tokens that are no prompt's, bool `[N]`."""
  # Of texts of 3 and 2 tokens, places are [0, 1, 2, 0, 1]; with prompts of one
  # token each, those written are [no, yes, yes, no, yes].
  lengths = np.diff(texts.offsets)
  places = np.arange(len(texts.tokens)) - np.repeat(texts.offsets[:-1], lengths)
  return places >= np.repeat(texts.prompt_lengths, lengths)


def load_parts(
  folders: Folders, num_parts: int | None = None
) -> list[WrittenTexts]:
  """Maps the first parts of a folder or of each of several, or all; ValueError
  if there are fewer, or none."""
  parts = []
  for folder in names(folders):
    complete = part_indices(folder)
    wanted = list(range(num_parts)) if num_parts else complete
    if not wanted or not set(wanted) <= set(complete):
      raise ValueError(
        f'{folder} has {len(complete)} complete parts, {num_parts or 1} are '
        'needed: continue with specdec data write'
      )
    parts += [load_part(folder, index) for index in wanted]
  return parts


def names(folders: Folders) -> Sequence[str | Path]:
  """Lists the folders that a setting names; ValueError if it names none."""
  if not folders:
    raise ValueError('no folder of texts is named: give TEXTS one or more')
  return [folders] if isinstance(folders, str | Path) else folders


def from_written_texts(
  folder: Folders,
  *,
  batch_size: int,
  length: int = 512,
  num_parts: int | None = None,
  held_out: int = 64,
  seed: int = 0,
  max_validation_rows: int | None = None,
) -> Dataset:
  """Makes packed batches of a folder of `specdec data write --prompts
  --layers`, or of several: `_read` says of what.

  Rows have `length` columns, and longer texts are cut. It trains on the first
  `num_parts` of each folder, None being all that are complete; one of
  `held_out` texts of a part, at least 2, is for validation. Other arguments are
  those of `datasets.from_token_files`.

  Raises ValueError if there are no texts, they have no streams, there are fewer
  rows than a batch has, or `held_out` is out of range.
  """
  if held_out < 2:
    raise ValueError(f'held_out {held_out} leaves no text to train on')
  parts = load_parts(folder, num_parts)
  if any(part.streams is None for part in parts):
    raise ValueError(
      f'{folder} has no residual streams: give specdec data write --layers'
    )
  starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
  # Streams are too large to be packed, and stay in their files: rows consist of
  # places instead. A text of 3 tokens after 100 others is [100, 101, 102].
  spans = [
    (i % held_out == 0, range(begin + start, begin + min(end, start + length)))
    for begin, part in zip(starts, parts, strict=False)
    for i, (start, end) in enumerate(itertools.pairwise(part.offsets))
  ]

  train = [span for is_held_out, span in spans if not is_held_out]
  validation = [span for is_held_out, span in spans if is_held_out]
  rows = datasets.from_tokens(
    [token_files.from_rows(None, train)],
    [token_files.from_rows(None, validation)],
    batch_size=batch_size,
    lengths={'targets': length},
    seed=seed,
    max_validation_rows=max_validation_rows,
  )
  read = functools.partial(_read, parts, starts)
  return Dataset(
    batch=lambda position: read(rows.batch(position)),
    validation=lambda: map(read, rows.validation()),  # type: ignore[misc]
    num_ids=1 + max(int(part.tokens.max()) for part in parts),
    contents=[(part.tokens, part.log_probs) for part in parts],
  )


def _read(parts: list[WrittenTexts], starts: np.ndarray, rows: Rows) -> Rows:
  """Reads the features of packed rows, whose tokens are positions counted
  through all parts: `decoder_target_tokens`, `decoder_segment_ids` and
  `decoder_loss_weights`, 1 for tokens that the model wrote, as in
  `training_batches`; `log_probs`, float32 `[B, T]`; and `streams`, bfloat16
  `[B, T, F]`."""
  places, segments = rows['decoder_target_tokens'], rows['decoder_segment_ids']
  assert parts[0].streams is not None
  features: dict[str, np.ndarray] = {
    'decoder_segment_ids': segments,
    'decoder_target_tokens': np.zeros(places.shape, np.int32),
    'decoder_loss_weights': np.zeros(places.shape, np.float32),
    'log_probs': np.zeros(places.shape, np.float32),
    'streams': np.zeros(
      (*places.shape, parts[0].streams.shape[1]), parts[0].streams.dtype
    ),
  }
  for start, part in zip(starts, parts, strict=False):
    # Of starts [0, 100, 250], place 120 is token 20 of part 1. Padding has
    # place 0, which is a token of the first text: it is left out.
    is_here = (segments > 0) & (start <= places)
    is_here &= places < start + len(part.tokens)
    at = places[is_here] - start
    features['decoder_target_tokens'][is_here] = part.tokens[at]
    features['decoder_loss_weights'][is_here] = is_written(part)[at]
    features['log_probs'][is_here] = part.log_probs[at]
    features['streams'][is_here] = np.asarray(part.streams)[at]
  return features
