"""The gammas that were fastest on this machine, as `specdec bench` and
`specdec calibrate` found them.

They are kept in `gammas.json` beside the compilation cache.
"""

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_jax.files import replacing
from specdec_jax.launch import compilation_cache, platforms

# After this time drivers, libraries and the usual load are others.
_NUM_DAYS = 90


def _today() -> datetime.date:
  return datetime.date.today()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RememberedGamma:
  """A gamma, and how it was found; its fields are written as JSON.

  Attributes:
    gamma: drafted tokens per iteration; 0 is plain decoding.
    source: the command that found it, such as 'bench'.
    reason: what was measured, in a sentence.
    date: the day, as '2026-11-29'.
    load: processes that wanted a core at that time, for each core; None where
      the system does not tell.
    tokens_per_second: by gamma, as text; empty if speeds were predicted.
  """

  gamma: int
  source: str
  reason: str = ''
  date: str = dataclasses.field(default_factory=lambda: _today().isoformat())
  load: float | None = dataclasses.field(
    default_factory=platforms.load_per_core
  )
  tokens_per_second: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def sentence(self) -> str:
    """Says what was chosen, by what, and when."""
    chosen = f'{self.source} chose {self.gamma} on {self.date}'
    if self.load is not None:
      chosen += f', at a load of {self.load:.1f} per core'
    if not self.gamma:
      return f'plain decoding: {chosen}'
    return f'gamma {self.gamma}: {chosen}'


def recall(where: Mapping[str, str]) -> RememberedGamma | None:
  """Returns what was chosen where all these are the same, of late; None if
  nothing was, or the file cannot be read."""
  for entry in _entries():
    if entry['where'] == dict(where):
      return RememberedGamma(**entry['choice'])
  return None


def remember(where: Mapping[str, str], choice: RememberedGamma) -> None:
  """Keeps a choice, in the place of an older one, if files can be written."""
  path = _path()
  if path is None:
    return
  # Of two processes at once the last to write counts; what the other one
  # chose is measured again.
  entries = [entry for entry in _entries() if entry['where'] != dict(where)]
  entries.append({'where': dict(where), 'choice': dataclasses.asdict(choice)})
  with contextlib.suppress(OSError, ValueError):
    replacing.write_text(path, json.dumps(entries, indent=2) + '\n')


def forget() -> None:
  """Drops all choices of this machine."""
  path = _path()
  if path is not None:
    path.unlink(missing_ok=True)


def _path() -> Path | None:
  folder = compilation_cache.writable_folder()
  return None if folder is None else folder / 'gammas.json'


def _entries() -> list[dict[str, Any]]:
  """Reads the choices that still count; none of a file that is no such file."""
  path = _path()
  if path is None:
    return []
  oldest = _today() - datetime.timedelta(days=_NUM_DAYS)
  try:
    entries = json.loads(path.read_text('utf-8'))
    return [entry for entry in entries if _is_recent(entry, oldest)]
  except (OSError, ValueError, TypeError, KeyError):
    return []


def _is_recent(entry: dict[str, Any], oldest: datetime.date) -> bool:
  """Tells whether an entry still counts; raises for what is no entry."""
  choice = RememberedGamma(**entry['choice'])
  if not isinstance(choice.gamma, int) or not isinstance(entry['where'], dict):
    raise TypeError('an entry of another kind')
  return datetime.date.fromisoformat(choice.date) >= oldest
