"""Marks of complete files of results: `FILE.COMPLETED`, JSON.

Later versions read these files and keys, on any host: do not rename them.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from specdec_jax.files import replacing

SUFFIX = '.COMPLETED'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
  """Counts of decoded examples and tokens, the same in every run."""

  examples: int = 0
  trimmed_examples: int = 0
  trimmed_tokens: int = 0
  tokens: int = 0
  target_runs: int = 0
  nan_examples: int = 0

  def __add__(self, other: 'Counts') -> 'Counts':
    return Counts(**{k: v + getattr(other, k) for k, v in vars(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark(Counts):
  """The mark of a file; fields are the keys of its JSON.

  Attributes:
    settings: all settings that results depend on, by name, of a final file.
    gamma: the chosen gamma of a chunk, if none was given. A restart uses the
      same, since sampled texts depend on it.
    examples_digest: of the examples; see `add_digests`.
    settings_digest: of the settings of a chunk, whose folder has them.
    digest: of the bytes of the file (`of_bytes`); None in marks of earlier
      versions. The file has `examples` lines.
  """

  settings: Mapping[str, str] | None = None
  gamma: int | None = None
  examples_digest: str
  settings_digest: str | None = None
  digest: str | None = None

  def to_json(self) -> str:
    """Returns the text of the file, without fields that are None."""
    values = dataclasses.asdict(self)
    fields = {key: x for key, x in values.items() if x is not None}
    return json.dumps(fields, indent=2) + '\n'

  @classmethod
  def from_json(cls, text: str) -> 'Mark':
    """Parses a mark; ValueError, TypeError or KeyError if it is not valid."""
    record = dict(json.loads(text))
    # Required: these decide whether a chunk is complete.
    int(record['examples_digest'], 16)
    int(record['examples'])
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: record[name] for name in names if name in record})


def path_of(path: Path) -> Path:
  """Returns the path of the mark of a file."""
  return path.with_name(path.name + SUFFIX)


def read(path: Path) -> Mark | None:
  """Reads the mark of a file; None if it has none."""
  mark = path_of(path)
  if not mark.is_file():
    return None
  try:
    return Mark.from_json(mark.read_text('utf-8'))
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f'{mark} is not what specdec writes: remove it, or choose another folder'
    ) from error


def write(path: Path, mark: Mark) -> None:
  """Marks a file as complete."""
  replacing.write_text(path_of(path), mark.to_json())


def write_first(path: Path, mark: Mark) -> Mark:
  """Marks a file, unless another host has marked it in a bucket; returns the
  stored mark: this one, or the earlier one of the other host."""
  if replacing.create_text(path_of(path), mark.to_json()):
    return mark
  stored = read(path)
  if stored is not None and stored.digest == mark.digest:
    return stored
  # The file of the other mark was replaced since.
  write(path, mark)
  return mark


def of_bytes(data: bytes) -> str:
  """Returns the digest of a file's bytes."""
  return hashlib.sha256(data).hexdigest()


def is_whole(path: Path, mark: Mark) -> bool:
  """Returns whether a file matches its mark."""
  data = path.read_bytes() if path.is_file() else None
  return _fault(data, mark) is None


def read_whole(path: Path, mark: Mark) -> bytes:
  """Returns the bytes of a file; ValueError unless it matches its mark."""
  data = path.read_bytes() if path.is_file() else None
  if (fault := _fault(data, mark)) or data is None:
    raise ValueError(
      f'{path}: {fault}: remove {path_of(path)}, and give the command again'
    )
  return data


def _fault(data: bytes | None, mark: Mark) -> str | None:
  """Describes how the bytes of a file (None: no file) differ from its mark;
  None if they match."""
  # A full disk or a crash can truncate a file, and a disk can corrupt it.
  num_lines = None if data is None else data.count(b'\n')
  if data is None or num_lines != mark.examples:
    lines = 'no file' if data is None else f'{num_lines} lines'
    return f'there should be {mark.examples} lines, and there is {lines}'
  if mark.digest not in (None, of_bytes(data)):
    return 'its lines have changed since they were written'
  return None


def add_digests(digests: Iterable[str]) -> str:
  """Returns the digest of several parts, independent of their order: the sum of
  their digests, as 64 hexadecimal digits."""
  # With a sum, the digests of shards add up to that of the task.
  return f'{sum(int(digest, 16) for digest in digests) % 2**256:064x}'
