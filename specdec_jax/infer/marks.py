"""What is beside a file of results once it is whole: `FILE.COMPLETED`, JSON.

Names of files and of keys are read by later versions, on any host: they stay.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from specdec_jax.files import replacing
from specdec_jax.theory.gamma_trials import ChosenGamma

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

  A file has `examples` lines; for `examples_digest` see `add_digests`.
  `settings` are by name all that the results of a whole shard depend on; the
  mark of a chunk, whose folder has them, states their digest. `gamma` is the
  choice that `gamma='auto'` made.
  """

  settings: Mapping[str, str] | None = None
  gamma: ChosenGamma | None = None
  examples_digest: str
  settings_digest: str | None = None

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
    if (gamma := record.get('gamma')) is not None:
      record['gamma'] = ChosenGamma(**gamma)
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
  is_first = replacing.create_text(path_of(path), mark.to_json())
  return mark if is_first else read(path) or mark


def check_whole(path: Path, mark: Mark) -> None:
  """Raises ValueError unless a file has as many lines as its mark says."""
  # Lines are counted, not hashed: a full disk cuts files short, but changes
  # none.
  if (found := num_lines(path)) != mark.examples:
    lines = 'no file' if found is None else f'{found} lines'
    raise ValueError(
      f'{path}: there should be {mark.examples} lines, and there is '
      f'{lines}: remove {path_of(path)}, and give the command again'
    )


def num_lines(path: Path) -> int | None:
  """Counts the lines of a file; None if there is none."""
  return path.read_bytes().count(b'\n') if path.is_file() else None


def add_digests(digests: Iterable[str]) -> str:
  """Returns the digest of examples together, in whatever parts and order they
  come: the sum of their own, as 64 hexadecimal digits."""
  # A sum, so that the digests of shards add up to that of the task, in any
  # order.
  return f'{sum(int(digest, 16) for digest in digests) % 2**256:064x}'
