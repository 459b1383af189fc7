"""Encodes text into token files."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from specdec_jax.files import text_lines
from specdec_jax.text import sentencepiece_vocabulary, tasks
from specdec_jax.text.sentencepiece_vocabulary import SentencePieceVocabulary
from specdec_jax.training.data import token_files
from specdec_jax.training.data.token_files import TokenFile

TooLong = Literal['drop', 'trim', 'trim_both', 'split']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
  """Maximum lengths of examples, in tokens with EOS, and how to treat longer
  ones.

  'drop' leaves the example out; 'trim' cuts it, with EOS at the end of inputs,
  but not of targets, which continue; 'trim_both' also puts EOS at the end of
  targets, as SeqIO's `append_eos_after_trim`; 'split' splits a text without
  inputs into several.
  """

  inputs: int
  targets: int
  too_long: TooLong = 'drop'


def find(path: Path) -> dict[str, Path]:
  """Returns text files by split, the name without its suffix: those of a
  folder, or one file; ValueError if there is none, or two are of one split."""
  files = sorted(path.iterdir()) if path.is_dir() else [path]
  by_split: dict[str, Path] = {}
  for file in files:
    if file.suffix not in tasks.SUFFIXES:
      continue
    if by_split.setdefault(file.stem, file) != file:
      raise ValueError(f'{by_split[file.stem]} and {file} are of one split')
  if not by_split:
    suffixes = ', '.join(tasks.SUFFIXES)
    raise ValueError(
      f'{path} is neither a text file ({suffixes}) nor a folder with one'
    )
  return by_split


def read(path: Path) -> Iterator[tuple[str | None, str]]:
  """Yields inputs, or None, and targets of a text file.

  A .jsonl has an object per line, with `inputs` and `targets`, or with `text`;
  a .tsv has two columns; a .txt has a text per line. ValueError for others.
  """
  if path.suffix == '.jsonl':
    for place, record in text_lines.read_objects(path):
      keys = [key for key in ('inputs', 'targets', 'text') if key in record]
      if keys not in (['inputs', 'targets'], ['text']):
        raise ValueError(
          f'{place} needs the strings "inputs" and "targets", or "text" alone; '
          f'{text_lines.keys_of(record)}'
        )
      values = [text_lines.text_under(record, key, place) for key in keys]
      yield values[0] if len(values) > 1 else None, values[-1]
    return
  for place, line in text_lines.read(path):
    if path.suffix == '.txt':
      yield None, line
      continue
    columns = line.split('\t')
    if len(columns) != 2:
      raise ValueError(f'{place} has {len(columns)} columns, and 2 are needed')
    yield columns[0], columns[1]


def texts(paths: Sequence[Path]) -> Iterator[str]:
  """Yields every text of some files: inputs, targets and plain texts."""
  pairs = itertools.chain.from_iterable(map(read, paths))
  return (text for pair in pairs for text in pair if text is not None)


def encode(
  examples: Iterable[tuple[str | None, str | None]],
  vocabulary: SentencePieceVocabulary,
  lengths: Lengths,
  *,
  name: str,
  prefix: str = '',
) -> tuple[TokenFile, dict[str, int]]:
  """Encodes inputs, or None, and targets, the examples of a `name`.

  Returns their tokens, and counts of examples, of tokens and of examples that
  were too long. Raises ValueError if an example has no targets, only some have
  inputs, there is a prefix but no inputs, or no example is left.
  """
  counts = Counter(read=0, dropped=0, trimmed=0, split=0)
  inputs: list[list[int]] = []
  targets: list[list[int]] = []
  has_inputs = set()
  for source, target in examples:
    counts['read'] += 1
    if target is None:
      raise ValueError(f'example {counts["read"]} of {name} has no targets')
    has_inputs.add(source is not None)
    if len(has_inputs) > 1:
      raise ValueError(f'{name} has lines with inputs and lines without')
    if source is None and prefix:
      raise ValueError(f'{name} has no inputs to put {prefix!r} before')
    ids = None if source is None else vocabulary.encode(prefix + source)
    target_ids = vocabulary.encode(target)
    for fitted_ids, fitted_target in _fit(ids, target_ids, lengths, counts):
      if fitted_ids is not None:
        inputs.append(fitted_ids)
      targets.append(fitted_target)
  if not counts['read']:
    raise ValueError(f'{name} holds no example')
  if not targets:
    raise ValueError(
      f'{name} has no example left of {counts["read"]}: {counts["dropped"]} '
      f'exceed {lengths.inputs} input or {lengths.targets} target tokens'
    )
  return token_files.from_rows(inputs or None, targets), counts | {
    'examples': len(targets),
    'input_tokens': sum(map(len, inputs)),
    'target_tokens': sum(map(len, targets)),
  }


def prepare(
  folder: Path,
  sources: Mapping[str, Path],
  vocabulary_path: Path,
  lengths: Lengths,
  *,
  prefix: str = '',
) -> dict[str, Any]:
  """Writes `{split}.npz` for the text file of every split, a description in
  JSON, and the vocabulary; returns the description.

  `prefix` is put before every input, as T5 names its tasks. ValueError if the
  vocabulary has no EOS, or as of `read` and `encode`.
  """
  vocabulary = sentencepiece_vocabulary.load(vocabulary_path, extra_ids=0)
  if not vocabulary.eos_ids:
    raise ValueError(f'{vocabulary_path} has no EOS')
  splits = {}
  for split, path in sources.items():
    tokens, counts = encode(
      read(path), vocabulary, lengths, name=str(path), prefix=prefix
    )
    file = folder / f'{split}.npz'
    token_files.save(file, tokens)
    checksum = token_files.sha256_of(file.read_bytes())
    splits[split] = counts | {'sha256': checksum}
  description = {
    'vocabulary': {
      'sha256': token_files.sha256_of(vocabulary.model),
      'size': vocabulary.vocab_size,
      'eos_id': vocabulary.eos_ids[0],
    },
    'lengths': dataclasses.asdict(lengths),
    'prefix': prefix,
    'splits': splits,
  }
  (folder / token_files.VOCABULARY).write_bytes(vocabulary.model)
  token_files.save_description(folder, description)
  return description


def _fit(
  source: list[int] | None,
  target: list[int],
  lengths: Lengths,
  counts: Counter[str],
) -> Iterator[tuple[list[int] | None, list[int]]]:
  """Yields the example once, shortened, in parts, or not at all."""
  is_source_long = source is not None and len(source) > lengths.inputs
  if not is_source_long and len(target) <= lengths.targets:
    yield source, target
  elif lengths.too_long == 'split' and source is None:
    counts['split'] += 1
    num_parts = -(-len(target) // lengths.targets)
    # Parts of similar length: 10 tokens in parts of up to 4 end at [3, 6, 10].
    ends = [len(target) * i // num_parts for i in range(num_parts + 1)]
    for start, end in itertools.pairwise(ends):
      yield None, target[start:end]
  elif lengths.too_long in ('trim', 'trim_both'):
    counts['trimmed'] += 1
    trimmed_target = target[: lengths.targets]
    if lengths.too_long == 'trim_both':
      trimmed_target = _trimmed(target, lengths.targets)
    yield source and _trimmed(source, lengths.inputs), trimmed_target
  else:
    counts['dropped'] += 1


def _trimmed(ids: list[int], length: int) -> list[int]:
  """Cuts ids to a length, of which the last is EOS."""
  # [5, 6, 7, 1] of length 3 is [5, 6, 1].
  return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
