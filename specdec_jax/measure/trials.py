"""What `gamma='auto'` tries on the first rows of a run, and what they show; and
choices that later runs on this machine go by, in `gammas.json` beside the
compilation cache."""

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.files import replacing
from specdec_jax.launch import compilation_cache, processes
from specdec_jax.theory import estimates, gamma_trials
from specdec_jax.theory.gamma_trials import ChosenGamma, Trial

# Rows of a turn that suffice.
NUM_ROWS = 8
# Of the time of a run, what comparing may take: no run is to be slower than
# plain decoding by 3%, and up to 1% goes where a turn waits for its last row.
SHARE = 0.02
# Batches of a run, of several rows each, for that to be 1%.
NUM_BATCHES = 128
# A program with a drafter is larger than the plain one, which the compilation
# cache may have had.
_COMPILING = 6.0
# A turn with drafts takes up to so many plain ones, as far as is known.
_SLOWNESS = 3.0
# Of a choice; by then drivers and the load are others.
_NUM_DAYS = 90


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visit:
  """Rows that were decoded with one gamma: their counters, and the seconds of
  prefills, of iterations, and of compiling for them."""

  gamma: int
  statistics: Statistics
  num_iterations: int
  fill_seconds: float
  loop_seconds: float
  compile_seconds: float = 0.0


def trial(visits: Sequence[Visit], *, waits: bool) -> Trial:
  """Sums up what the batches of one gamma show. If a batch `waits` for its
  slowest row, rows are not refilled."""
  # 2 rows of 10 iterations are 20 slots: with 8 and 10 target runs, those that
  # took part, 0.9 of them were used.
  total: Any = metrics.joined([visit.statistics for visit in visits])
  num_slots = sum(
    v.num_iterations * v.statistics.num_tokens.size for v in visits
  )
  seconds = np.array([visit.loop_seconds for visit in visits])
  iterations = np.array([visit.num_iterations for visit in visits])
  iteration_seconds = float(seconds.sum() / iterations.sum())
  error = estimates.standard_error(seconds, iterations) or 0.0
  return Trial(
    gamma=visits[0].gamma,
    num_tokens=total.num_tokens,
    num_runs=total.num_target_runs,
    num_tested=total.num_tested,
    num_accepted=total.num_accepted,
    fill_seconds=sum(visit.fill_seconds for visit in visits)
    / total.num_tokens.size,
    iteration_seconds=iteration_seconds,
    iteration_error=error / iteration_seconds,
    utilisation=float(total.num_target_runs.sum() / num_slots)
    if waits
    else 1.0,
  )


def num_batches_of_turn(batch_size: int) -> int:
  """Returns how many batches are enough rows for a turn."""
  return -(-NUM_ROWS // batch_size)


def num_turns(gammas: Sequence[int]) -> int:
  """Returns how many turns compare gammas, 0 among them."""
  return 2 * len(gammas)


def choose(
  tried: Sequence[int],
  decode: Callable[[int], Sequence[Visit]],
  *,
  batch_size: int,
  waits: bool,
  known: ChosenGamma | None = None,
  is_worth: Callable[[float], bool] = lambda num_turns: True,
) -> ChosenGamma:
  """Chooses the gamma of a run by decoding its first rows, turn by turn.

  Args:
    tried: ascending, 0 among them.
    decode: decodes the rows of the next turn with a gamma, in batches or all
      together.
    batch_size: rows decoded at once.
    waits: whether batches wait for their slowest row, as for `trial`.
    known: what an earlier run chose; it holds unless these rows need more
      target runs than it can bear.
    is_worth: whether so many turns are left; in all processes alike.
  """
  turns: list[int] = []

  def visit(gamma: int) -> list[Visit]:
    turns.append(gamma)
    return list(decode(gamma))

  def told(choice: ChosenGamma) -> ChosenGamma:
    return dataclasses.replace(choice, turns=turns)

  if known is not None:
    counts = metrics.joined([each.statistics for each in visit(known.gamma)])
    sums = counts.num_tokens.sum(), counts.num_target_runs.sum()
    return told(known.checked(*map(int, sums)))
  visits = {0: visit(0)}
  gammas = _affordable(tried, visits[0], is_worth)
  if len(gammas) == 1:
    return told(unmeasured())
  # There and back again, so that a drift of the machine's speed cancels:
  # gammas 0, 2, 5 are tried as 0 2 5 5 2 0.
  for gamma in (*gammas[1:], *reversed(gammas)):
    visits.setdefault(gamma, []).extend(visit(gamma))
  found = [trial(each, waits=waits) for each in visits.values()]
  return told(gamma_trials.choose(found, batch_size))


def unmeasured() -> ChosenGamma:
  """Makes the choice of a run that is too short to compare anything."""
  return ChosenGamma(
    gamma=0,
    sentence='gamma auto is 0, plain decoding: this is too short to measure '
    'what pays, and nothing is remembered; give a gamma, or let `specdec '
    'bench` measure',
  )


def _affordable(
  tried: Sequence[int],
  first: Sequence[Visit],
  is_worth: Callable[[float], bool],
) -> Sequence[int]:
  """Returns the gammas that a run is long enough to try: all, the one in the
  middle, or 0 alone, which its first turn was decoded with."""
  turn = sum(visit.fill_seconds + visit.loop_seconds for visit in first)
  compile_seconds = sum(visit.compile_seconds for visit in first)
  drafting = tried[1:]
  middle = len(drafting) // 2
  for gammas in (drafting, drafting[middle : middle + 1]):
    # Of several, the best may be one between them, and is compiled as well.
    programs = len(gammas) + (len(gammas) > 1)
    compiling = _COMPILING * compile_seconds * programs / turn
    needed = compiling + 2 * len(gammas) * (_SLOWNESS - 1)
    # The clock of the first process counts; a float of 32 bits will do.
    needed = processes.number_of_first(min(round(needed / SHARE), 2**31 - 1))
    if is_worth(needed):
      return (0, *gammas)
  return (0,)


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
