"""What is beside a file of results once it is whole: `FILE.COMPLETED`, JSON.

Names of files and of keys are read by later versions, on any host: they stay.
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
  """What was decoded, the same in every run; those of chunks add up."""

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
  """What the mark of a file states, by the keys of its JSON.

  A file has `examples` lines, and bytes with this `digest` (`of_bytes`), which
  marks of earlier versions lack. For `examples_digest` see `add_digests`.
  `settings` are by name all that the results of a whole shard depend on; the
  mark of a chunk, whose folder has them, states their digest. `gamma` is what a
  chunk was decoded with, where none was given: a restart goes on with it, since
  sampled texts depend on it.
  """

  settings: Mapping[str, str] | None = None
  gamma: int | None = None
  examples_digest: str
  settings_digest: str | None = None
  digest: str | None = None

  def to_json(self) -> str:
    """Returns the text of the file, without what is None."""
    stated = dataclasses.asdict(self)
    known = {key: x for key, x in stated.items() if x is not None}
    return json.dumps(known, indent=2) + '\n'

  @classmethod
  def from_json(cls, text: str) -> 'Mark':
    """Reads the text of a mark; ValueError, TypeError or KeyError if it is
    none."""
    record = dict(json.loads(text))
    # These two decide whether a chunk is done: without them it is no mark.
    int(record['examples_digest'], 16)
    int(record['examples'])
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: record[name] for name in names if name in record})


def path_of(path: Path) -> Path:
  """Returns where the mark of a file is."""
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
  """Marks a file as whole."""
  replacing.write_text(path_of(path), mark.to_json())


def write_first(path: Path, mark: Mark) -> Mark:
  """Marks a file, unless another host has in a bucket; returns the mark that is
  now stored: this one, or the other host's earlier one."""
  if replacing.create_text(path_of(path), mark.to_json()):
    return mark
  stored = read(path)
  if stored is not None and stored.digest == mark.digest:
    return stored
  # What the other mark is of was replaced since.
  write(path, mark)
  return mark


def of_bytes(data: bytes) -> str:
  """Returns the digest of a file's bytes."""
  return hashlib.sha256(data).hexdigest()


def is_whole(path: Path, mark: Mark) -> bool:
  """Tells whether a file is what its mark says."""
  data = path.read_bytes() if path.is_file() else None
  return _fault(data, mark) is None


def read_whole(path: Path, mark: Mark) -> bytes:
  """Returns the bytes of a file; ValueError, with what to remove, unless they
  are what its mark says."""
  data = path.read_bytes() if path.is_file() else None
  if (fault := _fault(data, mark)) or data is None:
    raise ValueError(
      f'{path}: {fault}: remove {path_of(path)}, and give the command again'
    )
  return data


def _fault(data: bytes | None, mark: Mark) -> str | None:
  """Says how the bytes of a file, None without one, differ from its mark."""
  # A full disk or a crash can cut a file short, and a disk can change it.
  num_lines = None if data is None else data.count(b'\n')
  if data is None or num_lines != mark.examples:
    lines = 'no file' if data is None else f'{num_lines} lines'
    return f'there should be {mark.examples} lines, and there is {lines}'
  if mark.digest not in (None, of_bytes(data)):
    return 'its lines have changed since they were written'
  return None


def add_digests(digests: Iterable[str]) -> str:
  """Returns the digest of examples together, in whatever parts and order they
  come: the sum of their own, as 64 hexadecimal digits."""
  # A sum, so that the digests of shards add up to that of the task, in any
  # order.
  return f'{sum(int(digest, 16) for digest in digests) % 2**256:064x}'
