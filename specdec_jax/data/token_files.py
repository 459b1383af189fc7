"""Token files: examples as token ids on disk, read with numpy alone."""

import dataclasses
import hashlib
import itertools
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.files.paths import user_path

DESCRIPTION = 'tokens.json'
# The SentencePiece model that the files were made with.
VOCABULARY = 'spiece.model'

Side = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """Examples of one split, N of them, end to end.

  Example i is `inputs[input_offsets[i]:input_offsets[i + 1]]` and the same of
  `targets`. Both end in EOS. A language model's examples have no inputs. Tokens
  are uint16 or int32 `[*]`, offsets int64 `[N + 1]`.
  """

  inputs: np.ndarray | None
  input_offsets: np.ndarray | None
  targets: np.ndarray
  target_offsets: np.ndarray

  def __len__(self) -> int:
    return len(self.target_offsets) - 1

  @property
  def sides(self) -> dict[str, Side]:
    """The tokens and offsets of 'input', if there are any, and of 'target'."""
    target = self.targets, self.target_offsets
    if self.inputs is None or self.input_offsets is None:
      return {'target': target}
    return {'input': (self.inputs, self.input_offsets), 'target': target}

  def example(self, i: int) -> tuple[np.ndarray | None, np.ndarray]:
    """Inputs, or None, and targets of example i."""
    rows = {name: _row(side, i) for name, side in self.sides.items()}
    return rows.get('input'), rows['target']


def from_rows(
  inputs: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]]
) -> TokenFile:
  """Examples as lists of ids, put end to end; ValueError if there are not as
  many inputs as targets."""
  if inputs is not None and len(inputs) != len(targets):
    raise ValueError(f'{len(inputs)} inputs and {len(targets)} targets')
  sides = {'target': _flatten(targets)}
  if inputs is not None:
    sides['input'] = _flatten(inputs)
  return _of_sides(sides)


def take(tokens: TokenFile, chosen: Sequence[int] | np.ndarray) -> TokenFile:
  """Some of the examples, in the order that they are named."""

  def of(side: Side) -> Side:
    parts = [_row(side, i) for i in chosen]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return np.concatenate([side[0][:0], *parts]), ends

  return _of_sides({name: of(side) for name, side in tokens.sides.items()})


def concatenate(files: Sequence[TokenFile]) -> TokenFile:
  """The examples of several files, one file after the other; ValueError if
  there is no file, or only some have inputs."""
  if len({len(tokens.sides) for tokens in files}) != 1:
    raise ValueError('expected files that all have inputs, or all have none')

  def of(name: str) -> Side:
    flat, offsets = zip(*(tokens.sides[name] for tokens in files), strict=True)
    ends = np.concatenate([[0], *map(np.diff, offsets)])
    return np.concatenate(flat), ends.cumsum(dtype=np.int64)

  return _of_sides({name: of(name) for name in files[0].sides})


def save(path: Path, tokens: TokenFile) -> None:
  """Writes an .npz; equal examples give equal bytes."""
  arrays = {name: x for name, x in vars(tokens).items() if x is not None}
  with path.open('wb') as file:
    np.savez(file, **arrays)


def load(path: str | Path) -> TokenFile:
  """Reads and checks an .npz of `save`; ValueError if it is not a token file,
  or is damaged."""
  path = user_path(path)
  try:
    with path.open('rb') as file, np.load(file, allow_pickle=False) as stored:
      arrays = {name: stored[name] for name in stored.files}
  except (ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
    raise ValueError(f'{path} is not a token file, or is damaged') from error
  names = {field.name for field in dataclasses.fields(TokenFile)}
  if not {'targets', 'target_offsets'} <= arrays.keys() <= names:
    raise ValueError(f'{path} is not a token file: it has {sorted(arrays)}')
  sides = {}
  for name in ('input', 'target'):
    pair = arrays.get(f'{name}s'), arrays.get(f'{name}_offsets')
    if any(array is not None for array in pair):
      sides[name] = _checked(path, *pair)
  tokens = _of_sides(sides)
  num_inputs = len(sides.get('input', sides['target'])[1]) - 1
  if num_inputs != len(tokens):
    raise ValueError(
      f'{path} has {num_inputs} inputs and {len(tokens)} targets'
    )
  return tokens


def load_description(folder: str | Path) -> dict[str, Any]:
  """What `specdec data prepare` wrote about the files of a folder; ValueError
  if it has no such description, or a damaged one."""
  path = user_path(folder) / DESCRIPTION
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise ValueError(
      f'{folder} has no {DESCRIPTION}: specdec data prepare writes one'
    ) from None
  except ValueError as error:
    raise ValueError(f'{path} is damaged: {error}') from error


def save_description(folder: Path, description: dict[str, Any]) -> None:
  """Writes what `load_description` reads."""
  text = json.dumps(description, indent=2, ensure_ascii=False) + '\n'
  (folder / DESCRIPTION).write_text(text, encoding='utf-8')


def find_vocabulary(folders: Sequence[Path]) -> Path | None:
  """The SentencePiece model that token files were made with: that of the first
  folder that has one, or None; ValueError if the folders are of several
  vocabularies, or the model is another than their descriptions say."""
  of_digest: dict[str, Path] = {}
  found = None
  for folder in folders:
    if not (folder / DESCRIPTION).is_file():
      continue
    description, path = load_description(folder), folder / VOCABULARY
    of_digest.setdefault(description['vocabulary']['sha256'], folder)
    if found is None and path.is_file():
      digest = hashlib.sha256(path.read_bytes()).hexdigest()
      check_vocabulary(description, digest)
      found = path
  if len(of_digest) > 1:
    raise ValueError(
      'the token files were made with several vocabularies: '
      + ', '.join(f'{path} with {d[:12]}' for d, path in of_digest.items())
    )
  return found


def check_vocabulary(description: dict[str, Any], sha256: str) -> None:
  """Raises ValueError unless the files were made with that vocabulary."""
  expected = description['vocabulary']['sha256']
  if sha256 != expected:
    raise ValueError(
      f'the token files were made with vocabulary {expected[:12]}, not '
      f'{sha256[:12]}'
    )


def _of_sides(sides: dict[str, Side]) -> TokenFile:
  source: tuple[Any, Any] = sides.get('input', (None, None))
  return TokenFile(*source, *sides['target'])


def _row(side: Side, i: int) -> np.ndarray:
  tokens, offsets = side
  return tokens[offsets[i] : offsets[i + 1]]


def _flatten(rows: Sequence[Sequence[int]]) -> Side:
  """Rows end to end in the smallest type of two, and their offsets."""
  offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
  flat = np.fromiter(itertools.chain.from_iterable(rows), np.int32, offsets[-1])
  is_small = flat.size == 0 or flat.max() < 2**16
  return (flat.astype(np.uint16) if is_small else flat), offsets


def _checked(
  path: Path, tokens: np.ndarray | None, offsets: np.ndarray | None
) -> Side:
  if tokens is None or offsets is None or not offsets.size:
    raise ValueError(f'{path} is damaged: tokens or their offsets are missing')
  if offsets[0] or offsets[-1] != tokens.size or (np.diff(offsets) < 1).any():
    raise ValueError(
      f'{path} is damaged: its offsets do not divide {tokens.size} tokens'
    )
  return tokens, offsets
