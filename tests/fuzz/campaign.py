"""Runs workers until all inputs are done, and counts what became of them."""

import collections
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.fuzz import seeds, worker
from tests.fuzz.worker import COLUMNS, OUTCOMES, RECYCLE, Task

# Without any progress, for a worker that neither ends nor works.
_STUCK_SECONDS = 120.0
_PRELOAD = ['tests.fuzz.worker']

Counts = dict[str, dict[str, int]]


def run(
  names: Sequence[str],
  *,
  num_inputs: int,
  seed: int,
  findings: Path,
  start: int = 0,
  seconds: float = float('inf'),
  cpu_seconds: float = 5.0,
  progress: Callable[[Counts], None] | None = None,
  period: float = 30.0,
) -> Counts:
  """Fuzzes readers, which take turns.

  Args:
    names: of `readers.READERS`.
    num_inputs: over all of them.
    seed: of the inputs.
    findings: a folder, made if it does not exist.
    start: the first input of each reader.
    seconds: when to end at the latest.
    cpu_seconds: of an input; one that takes more processor time is a hang.
    progress: called every `period` seconds.
    period: in seconds.

  Returns:
    By reader, how many inputs had each outcome.
  """
  findings.mkdir(parents=True, exist_ok=True)
  (findings / 'findings.jsonl').unlink(missing_ok=True)
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(_PRELOAD)
  counts = context.Array('q', len(names) * len(COLUMNS), lock=False)
  at = context.Array('q', 1, lock=False)
  table = lambda: _table(names, counts)
  with tempfile.TemporaryDirectory(dir=_memory_folder()) as root:
    folder = Path(root) / 'seeds'
    seeds.extract(folder)
    first = start * len(names)
    task = Task(
      tuple(names),
      seed,
      first,
      first + num_inputs,
      time.time() + seconds,
      folder,
      findings,
      cpu_seconds,
      os.getpid(),
    )
    _run_workers(
      context,
      task,
      counts,
      at,
      progress and (lambda: progress(table())),
      period,
    )
  return table()


def _run_workers(context, task, counts, at, progress, period) -> None:
  turn, shown = task.start, time.time()
  while turn < task.stop and time.time() < task.deadline:
    at[0] = turn
    task = dataclasses.replace(task, start=turn)
    process = context.Process(target=worker.run, args=(task, counts, at))
    process.start()
    last, moved = turn, time.time()
    while process.is_alive():
      process.join(1.0)
      if at[0] != last:
        last, moved = at[0], time.time()
      if time.time() - moved > _STUCK_SECONDS:
        process.kill()
      if progress and time.time() - shown > period:
        progress()
        shown = time.time()
    if process.exitcode == 0:
      return
    if process.exitcode == 1:
      log = (task.findings / worker.LOG).read_text(errors='replace')
      raise RuntimeError(f'the fuzzer itself failed:\n{log[-2000:]}')
    if process.exitcode != RECYCLE:
      _count_death(task, at[0], -process.exitcode, counts)
    turn = at[0] + 1


def _count_death(task: Task, turn: int, number: int, counts) -> None:
  is_hang = number in (signal.SIGPROF, signal.SIGKILL)
  outcome = 'hang' if is_hang else 'death'
  name, k = task.reader_of(turn)
  which = turn % len(task.names)
  counts[which * len(COLUMNS) + COLUMNS.index(outcome)] += 1
  note = signal.Signals(number).name if number > 0 else f'status {-number}'
  worker.record_finding(task, name, k, outcome, note)


def _table(names: Sequence[str], counts) -> Counts:
  size = len(COLUMNS)
  return {
    name: dict(zip(COLUMNS, counts[i * size : (i + 1) * size], strict=True))
    for i, name in enumerate(names)
  }


def num_undocumented(counts: Counts) -> int:
  """Inputs that were neither read nor refused as documented."""
  return sum(
    row[outcome] for row in counts.values() for outcome in OUTCOMES[2:]
  )


def format_table(counts: Counts) -> str:
  """A line for each reader, and one for all."""
  total = {c: sum(row[c] for row in counts.values()) for c in COLUMNS}
  lines = [['reader', 'inputs', *OUTCOMES, 'ms each']]
  for name, row in [*counts.items(), ('all', total)]:
    numbers = [row[outcome] for outcome in OUTCOMES]
    each = row['microseconds'] / 1000 / max(1, sum(numbers))
    cells = [f'{number:,}' for number in (sum(numbers), *numbers)]
    lines.append([name, *cells, f'{each:.2f}'])
  return '\n'.join(
    line[0].ljust(17) + ''.join(cell.rjust(10) for cell in line[1:])
    for line in lines
  )


def format_findings(findings: Path) -> str:
  """What was found, the most frequent first, each with an input to replay."""
  path = findings / 'findings.jsonl'
  if not path.is_file():
    return ''
  kinds: dict[tuple, list[dict]] = collections.defaultdict(list)
  for line in path.read_text().splitlines():
    record = json.loads(line)
    note = (record['note'].splitlines() or [''])[0]
    kinds[record['reader'], record['outcome'], note].append(record)
  return '\n'.join(
    f'{len(found):6,}  {" ".join(kind)}  (--reader {kind[0]} --seed '
    f'{found[0]["seed"]} --start {found[0]["k"]} --inputs 1)'
    for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1]))
  )


def _memory_folder() -> str | None:
  """A folder in memory, where there is one: every input writes a file."""
  return (
    '/dev/shm'
    if sys.platform == 'linux' and Path('/dev/shm').is_dir()
    else None
  )
