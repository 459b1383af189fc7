"""Token files: examples as token ids on disk, read with numpy alone."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.files import settings
from specdec_jax.files.paths import user_path
from specdec_jax.files.settings import Settings

DESCRIPTION = 'tokens.json'
# The SentencePiece model that the files were made with.
VOCABULARY = 'spiece.model'


@dataclasses.dataclass(frozen=True)
class Texts:
  """N texts end to end: text i is `tokens[offsets[i]:offsets[i + 1]]`.

  Tokens are uint16 or int32 `[*]`, offsets int64 `[N + 1]`.
  """

  # Texts [5, 6, 1] and [7, 1]: tokens [5, 6, 1, 7, 1] and offsets [0, 3, 5].
  tokens: np.ndarray
  offsets: np.ndarray

  def __len__(self) -> int:
    return len(self.offsets) - 1

  def __getitem__(self, i: int) -> np.ndarray:
    return self.tokens[self.offsets[i] : self.offsets[i + 1]]

  @property
  def lengths(self) -> np.ndarray:
    """Counts the tokens of each text, int64 `[N]`."""
    # Of offsets [0, 3, 5]: [3, 2].
    return np.diff(self.offsets)


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """The N examples of one split.

  Inputs and targets end in EOS; those of a language model have no inputs.
  Raises ValueError if the numbers of inputs and targets differ.
  """

  targets: Texts
  inputs: Texts | None = None

  def __post_init__(self):
    if self.inputs is not None and len(self.inputs) != len(self.targets):
      raise ValueError(
        f'{len(self.inputs)} inputs and {len(self.targets)} targets'
      )

  def __len__(self) -> int:
    return len(self.targets)

  @property
  def features(self) -> dict[str, Texts]:
    """Returns inputs, if any, and targets by name, in SeqIO's sense."""
    if self.inputs is None:
      return {'targets': self.targets}
    return {'inputs': self.inputs, 'targets': self.targets}


def from_rows(
  inputs: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]]
) -> TokenFile:
  """Puts examples end to end."""
  return TokenFile(texts(targets), None if inputs is None else texts(inputs))


def texts(rows: Sequence[Sequence[int] | np.ndarray]) -> Texts:
  """Puts rows end to end, in the smallest type of two."""
  lengths = list(map(len, rows))
  every_id = itertools.chain.from_iterable(rows)
  flat = np.fromiter(every_id, np.int32, sum(lengths))
  # Half the bytes, for vocabularies of up to 65,536 ids.
  is_small = flat.max(initial=0) < 2**16
  return _end_to_end([flat.astype(np.uint16) if is_small else flat], lengths)


def take(tokens: TokenFile, chosen: Sequence[int] | np.ndarray) -> TokenFile:
  """Selects examples, in the order of `chosen`."""
  features = {}
  for name, feature in tokens.features.items():
    parts = [feature[i] for i in chosen]
    # An empty part sets the dtype if no example is chosen.
    lengths = list(map(len, parts))
    features[name] = _end_to_end([feature.tokens[:0], *parts], lengths)
  return TokenFile(**features)


def concatenate(files: Sequence[TokenFile]) -> TokenFile:
  """Puts files end to end; ValueError if there is none, or some lack inputs."""
  if not files:
    raise ValueError('there are no token files')
  if len({len(tokens.features) for tokens in files}) > 1:
    raise ValueError('expected files that all have inputs, or all have none')
  features = {}
  for name in files[0].features:
    parts = [tokens.features[name] for tokens in files]
    lengths = np.concatenate([part.lengths for part in parts])
    features[name] = _end_to_end([part.tokens for part in parts], lengths)
  return TokenFile(**features)


def save(path: Path, tokens: TokenFile) -> None:
  """Writes an .npz; equal examples give equal bytes."""
  # `savez` stamps no time, unlike `zipfile` by itself.
  arrays: dict[str, Any] = {}
  for name, feature in tokens.features.items():
    arrays |= {name: feature.tokens, _offsets_of(name): feature.offsets}
  with path.open('wb') as file:
    np.savez(file, **arrays)


def load(path: str | Path) -> TokenFile:
  """Reads an .npz of `save`; ValueError if it is none, or is damaged."""
  path = user_path(path)
  if not path.is_file():
    raise ValueError(f'there is no {path}')
  with path.open('rb') as file:
    try:
      with np.load(file, allow_pickle=False) as stored:
        # numpy returns entries that are no arrays as bytes.
        arrays = {name: np.asarray(stored[name]) for name in stored.files}
    except Exception as error:  # numpy and zipfile raise many types.
      raise ValueError(f'{path} is not a token file, or is damaged') from error
  names = [name for name in ('targets', 'inputs') if name in arrays]
  expected = {*names, *map(_offsets_of, names)}
  if 'targets' not in names or arrays.keys() != expected:
    raise ValueError(f'{path} is not a token file: it has {sorted(arrays)}')
  features = [Texts(arrays[name], arrays[_offsets_of(name)]) for name in names]
  for feature in features:
    offsets, size = feature.offsets, feature.tokens.size
    layout = (
      feature.tokens.dtype.name,
      offsets.dtype.name,
      feature.tokens.ndim,
      offsets.ndim,
    )
    is_known = layout in [(x, 'int64', 1, 1) for x in ('uint16', 'int32')]
    if not is_known or feature.tokens.min(initial=0) < 0:
      raise ValueError(f'{path} is damaged: its arrays hold no token ids')
    if (
      not offsets.size
      or offsets[0]
      or offsets[-1] != size
      or (feature.lengths < 1).any()
    ):
      raise ValueError(
        f'{path} is damaged: its offsets do not divide {size} tokens'
      )
  try:
    return TokenFile(*features)
  except ValueError as error:
    raise ValueError(f'{path} has {error}') from error


def load_description(folder: str | Path) -> Settings:
  """Reads what `save_description` wrote; ValueError if missing or damaged."""
  return settings.read(user_path(folder) / DESCRIPTION)


def save_description(folder: Path, description: Mapping[str, object]) -> None:
  """Writes a folder's description: its files, and what they were made from."""
  text = json.dumps(dict(description), indent=2, ensure_ascii=False) + '\n'
  (folder / DESCRIPTION).write_text(text, encoding='utf-8')


def find_vocabulary(folders: Sequence[Path]) -> Path | None:
  """Returns the SentencePiece model of token files: that of the first folder
  that has one, or None; ValueError if the folders have several vocabularies, or
  the model does not fit their descriptions."""
  folders_by_digest: dict[str, Path] = {}
  model_path = None
  for folder in folders:
    if not (folder / DESCRIPTION).is_file():
      continue
    folders_by_digest.setdefault(_vocabulary_digest(folder), folder)
    if model_path is None and (folder / VOCABULARY).is_file():
      model_path = folder / VOCABULARY
      check_vocabulary(folder, model_path.read_bytes())
  if len(folders_by_digest) > 1:
    raise ValueError(
      'the token files were made with several vocabularies: '
      + ', '.join(
        f'{path} with {d[:12]}' for d, path in folders_by_digest.items()
      )
    )
  return model_path


def check_vocabulary(folder: str | Path, model: bytes) -> None:
  """Raises ValueError unless files were made with that SentencePiece model."""
  sha256, expected = sha256_of(model), _vocabulary_digest(folder)
  if sha256 != expected:
    raise ValueError(
      f'{folder}: the token files were made with vocabulary {expected[:12]}, '
      f'not {sha256[:12]}'
    )


def sha256_of(content: bytes) -> str:
  """Computes the digest by which descriptions name files and vocabularies."""
  return hashlib.sha256(content).hexdigest()


def _vocabulary_digest(folder: str | Path) -> str:
  return load_description(folder).at('vocabulary').text('sha256')


def _offsets_of(feature: str) -> str:
  return f'{feature.removesuffix("s")}_offsets'


def _end_to_end(
  parts: Sequence[np.ndarray], lengths: Sequence[int] | np.ndarray
) -> Texts:
  offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
  return Texts(np.concatenate(parts), offsets)
