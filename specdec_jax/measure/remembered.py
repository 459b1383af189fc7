"""Choices of gamma that later runs on this machine go by: one file,
`gammas.json`, beside the compilation cache."""

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_jax.files import replacing
from specdec_jax.launch import compilation_cache
from specdec_jax.theory.gamma_trials import ChosenGamma

# By then drivers and the machine's load are others.
_NUM_DAYS = 90


def recall(where: Mapping[str, str]) -> ChosenGamma | None:
  """Returns what was chosen where all these are the same, of late; None if
  nothing was, or the file cannot be read."""
  for entry in _entries():
    if entry['where'] == dict(where):
      choice = ChosenGamma(**entry['choice'])
      said = f'{choice.sentence} (measured on {entry["date"]})'
      return dataclasses.replace(choice, sentence=said)
  return None


def remember(where: Mapping[str, str], choice: ChosenGamma) -> None:
  """Keeps a choice, in the place of an older one, if files can be written."""
  if (path := _path()) is None:
    return
  # Of two processes at once the last to write has its say: what the other one
  # chose is measured again.
  others = [entry for entry in _entries() if entry['where'] != dict(where)]
  today = datetime.date.today().isoformat()
  new = {'date': today, 'where': dict(where), 'choice': vars(choice)}
  with contextlib.suppress(OSError, ValueError):
    replacing.write_text(path, json.dumps([*others, new], indent=2) + '\n')


def forget() -> None:
  """Drops all choices of this machine."""
  if (path := _path()) is not None:
    path.unlink(missing_ok=True)


def _path() -> Path | None:
  folder = compilation_cache.writable_folder()
  return None if folder is None else folder / 'gammas.json'


def _entries() -> list[dict[str, Any]]:
  """Reads the choices that still count; none of a file that is no such file."""
  oldest = datetime.date.today() - datetime.timedelta(days=_NUM_DAYS)
  try:
    entries = json.loads(path.read_text('utf-8')) if (path := _path()) else []
    for entry in entries:  # An entry that lacks something is none.
      ChosenGamma(**entry['choice']).gamma + 0, dict(entry['where'])
    is_recent = lambda date: datetime.date.fromisoformat(date) >= oldest
    return [entry for entry in entries if is_recent(entry['date'])]
  except (OSError, ValueError, TypeError, KeyError):
    return []
