"""A process that runs inputs one after another, and may die of them.

What an input must not do: raise anything but ValueError, open a file outside
its folder, take more memory or more time than its share.
"""

import concurrent.futures
import ctypes
import dataclasses
import functools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import specdec_jax
from specdec_jax.models import families
from tests.fuzz.readers import Inputs

# All that a reader raises because of what a file contains; see
# docs/design/values.md.
DOCUMENTED = (ValueError,)
OUTCOMES = (
  'read', 'refused', 'unnamed', 'error', 'panic', 'outside', 'memory', 'hang',
  'death',
)  # fmt: skip
_FINE = ('read', 'refused')
# What is counted of each reader; the time is the processor's.
COLUMNS = (*OUTCOMES, 'microseconds')
# What an input may take: of memory, times its file and beyond that; of
# addresses, more than the worker had before.
MEMORY_FACTOR = 4
MEMORY_FLOOR = 32 * 2**20
_ADDRESSES = 2**31
# The worker ends itself in this way after what may have spoilt it.
RECYCLE = 17
# What it printed, in the folder of findings.
LOG = 'worker.log'
_LOG_BYTES = 2**20
_KEPT_PER_KIND = 2
_IN_OPEN = 0x20
# A clone's folder can have the package's name, too.
_PACKAGE = f'{Path(specdec_jax.__file__).parent}/'


@dataclasses.dataclass(frozen=True)
class Task:
  """What a worker is to do.

  Attributes:
    names: of the readers, which take turns.
    seed: of the inputs.
    start: the first turn.
    stop: behind the last turn.
    deadline: seconds of `time.time`, when to end.
    seeds: the folder of `seeds.extract`.
    findings: the folder where findings are kept.
    cpu_seconds: of an input; one that takes more is a hang.
    parent: the process that started the campaign.
  """

  names: tuple[str, ...]
  seed: int
  start: int
  stop: int
  deadline: float
  seeds: Path
  findings: Path
  cpu_seconds: float
  parent: int

  def reader_of(self, turn: int) -> tuple[str, int]:
    """Whose turn it is, and which of its inputs it takes."""
    k, which = divmod(turn, len(self.names))
    return self.names[which], k


def run(task: Task, counts: Any, at: Any) -> None:
  """Runs inputs until all are done, time is over, or one has spoilt it.

  Args:
    task: what to do.
    counts: int64 `[readers * len(COLUMNS)]`, shared; counted up.
    at: int64 `[1]`, shared: the turn that is taken now.
  """
  with tempfile.TemporaryDirectory(dir=task.seeds.parent) as folder:
    _Worker(task, Path(folder), counts, at).run()


class _Serial(concurrent.futures.Executor):
  """A pool without threads: starting them takes most of a small read."""

  def __init__(self, max_workers: int | None = None):
    pass

  def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    future: concurrent.futures.Future = concurrent.futures.Future()
    try:
      future.set_result(fn(*args, **kwargs))
    except BaseException as error:
      future.set_exception(error)
    return future


class _Worker:
  def __init__(self, task: Task, folder: Path, counts: Any, at: Any):
    self.task, self.counts, self.at = task, counts, at
    self.folder = folder
    self.inputs = {name: Inputs(name, task.seeds) for name in task.names}
    for name in {each.reader.folder for each in self.inputs.values()}:
      shutil.copytree(task.seeds / name, folder / name)
    for name in ('gguf', 'llama', 'ours', 't5x'):
      shutil.copytree(task.seeds / name, folder / 'outside', dirs_exist_ok=True)
    self.kept: dict[str, int] = {}
    self.opened: list[str] = []
    self.is_reading = False
    _prepare_process(task.findings / LOG)
    for each in self.inputs.values():
      each.reader.read(folder / each.reader.folder)  # It must be readable.
    sys.addaudithook(self._audit)
    self.watch = _watch(folder / 'outside')
    used = int(Path('/proc/self/statm').read_text().split()[0])
    limit = used * resource.getpagesize() + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

  def run(self) -> None:
    for turn in range(self.task.start, self.task.stop):
      self.at[0] = turn
      name, k = self.task.reader_of(turn)
      begun = time.process_time_ns()
      outcome = self._input(name, k)
      first = turn % len(self.task.names) * len(COLUMNS)
      self.counts[first + COLUMNS.index(outcome)] += 1
      taken = time.process_time_ns() - begun
      self.counts[first + COLUMNS.index('microseconds')] += taken // 1000
      if outcome in ('memory', 'panic'):
        os._exit(RECYCLE)
      if turn % 64 == 0:
        if time.time() > self.task.deadline:
          return
        os.kill(
          self.task.parent, 0
        )  # An error if there is nobody to report to.
        if os.fstat(2).st_size > _LOG_BYTES:
          os.ftruncate(2, 0)

  def _input(self, name: str, k: int) -> str:
    """Runs one input; its outcome."""
    inputs = self.inputs[name]
    folder = self.folder / inputs.reader.folder
    changed, content = inputs.at(self.task.seed, k)
    path = folder / changed
    path.unlink() if content is None else path.write_bytes(content)
    before = _peak_bytes()
    outcome, error, left = self._read(inputs, folder)
    grown = _peak_bytes() - before
    note = _note(error)
    if isinstance(error, FileNotFoundError) and content is None:
      outcome = 'refused'  # That it is not there can be said as Python says it.
    # Another program may look through the folders, but not just then again.
    if outcome in _FINE and left and (left := self._read(inputs, folder)[2]):
      outcome, note = 'outside', f'opened {left}'
    allowed = MEMORY_FACTOR * len(content or b'') + MEMORY_FLOOR
    if grown > allowed:  # A package's table may have doubled, but not again.
      grown = self._growth(inputs, folder)
    if grown > allowed:
      outcome, note = 'memory', f'grew by {grown / 2**20:.0f} MiB; {note}'
    if outcome not in _FINE:
      self._keep(name, k, outcome, note, error, changed, content)
    path.write_bytes(inputs.files[changed])
    return outcome

  def _growth(self, inputs: Inputs, folder: Path) -> int:
    """How many bytes more the process has at most while a folder is read."""
    Path('/proc/self/clear_refs').write_text('5')  # Forgets the peak so far.
    before = _peak_bytes()
    self._read(inputs, folder)
    return _peak_bytes() - before

  def _read(
    self, inputs: Inputs, folder: Path
  ) -> tuple[str, BaseException | None, list[str]]:
    """What a reader made of a folder: outcome, error, what it opened beside."""
    _was_opened(self.watch)
    self.opened.clear()
    signal.setitimer(signal.ITIMER_PROF, self.task.cpu_seconds)
    outcome, error = 'read', None
    self.is_reading = True
    try:
      inputs.reader.read(folder)
    except DOCUMENTED as caught:
      # A refusal says of which file it speaks.
      outcome = 'refused' if str(folder) in str(caught) else 'unnamed'
      error = caught
    except Exception as caught:
      outcome, error = 'error', caught
    except BaseException as caught:  # A panic in Rust is no Exception.
      outcome, error = 'panic', caught
    self.is_reading = False
    signal.setitimer(signal.ITIMER_PROF, 0)
    beneath = ['a file, beneath Python'] if _was_opened(self.watch) else []
    return outcome, error, [*self.opened, *beneath]

  def _audit(self, event: str, args: tuple) -> None:
    if event != 'open' or not self.is_reading:
      return
    path = args[0]
    if not isinstance(path, (str, bytes, os.PathLike)):
      return
    path = os.path.abspath(os.fsdecode(path))
    if not path.startswith((f'{self.folder}/', *_OWN_FILES)) or (
      path.startswith(f'{self.folder}/outside')
    ):
      self.opened.append(path)

  def _keep(
    self,
    name: str,
    k: int,
    outcome: str,
    note: str,
    error: BaseException | None,
    changed: str,
    content: bytes | None,
  ) -> None:
    """One line for a finding; for the first of a kind, all that it needs."""
    kind = f'{name} {outcome} {note.splitlines()[0]}' if note else outcome
    number = self.kept[kind] = self.kept.get(kind, 0) + 1
    record_finding(self.task, name, k, outcome, note)
    if number > _KEPT_PER_KIND:
      return
    folder = self.task.findings / f'{name}-{self.task.seed}-{k}'
    folder.mkdir(exist_ok=True)
    (folder / 'why.txt').write_text(
      f'{outcome}: {note}\n{changed}\n'
      + ''.join(traceback.format_exception(error) if error else []),
      errors='backslashreplace',
    )
    if content is not None:
      (folder / Path(changed).name).write_bytes(content)


def record_finding(
  task: Task, name: str, k: int, outcome: str, note: str
) -> None:
  """Appends a line to the list of findings."""
  record = {'reader': name, 'seed': task.seed, 'k': k, 'outcome': outcome}
  with open(task.findings / 'findings.jsonl', 'a') as file:
    file.write(json.dumps({**record, 'note': note}) + '\n')


def _note(error: BaseException | None) -> str:
  """Type, place and message of an error."""
  if error is None:
    return ''
  frames = [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    if frame.filename.startswith(_PACKAGE)
  ]
  last = frames[-1] if frames else None
  place = f' at {Path(last.filename).name}:{last.lineno}' if last else ''
  return f'{type(error).__name__}{place}\n{str(error)[:200]}'


# Modules that are loaded late, what belongs to the process, and devices.
_OWN_FILES = (
  sys.prefix, sys.base_prefix, str(Path(__file__).parent.parent.parent),
  '/proc/', '/sys/', '/dev/', '/usr/', '/etc/localtime',
)  # fmt: skip


def _prepare_process(log: Path) -> None:
  signal.signal(signal.SIGPROF, signal.SIG_DFL)
  concurrent.futures.ThreadPoolExecutor = _Serial  # type: ignore
  # Tracing a T5 for its shapes takes 60 ms, and its sizes rarely change.
  families.param_shapes = functools.lru_cache(64)(families.param_shapes)
  # Looking up the names of a panic's functions takes 50 MB.
  os.environ['RUST_BACKTRACE'] = '0'
  # What Rust and C++ print of each refusal, and why a worker ended.
  flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
  os.dup2(os.open(log, flags), 2)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _peak_bytes() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _watch(folder: Path) -> int:
  """A descriptor that has something to read when a file here is opened."""
  libc = ctypes.CDLL(None, use_errno=True)
  watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
  for path in (folder, *(p for p in folder.rglob('*') if p.is_dir())):
    wd = libc.inotify_add_watch(watch, os.fsencode(path), _IN_OPEN)
    assert wd >= 0, os.strerror(ctypes.get_errno())
  return watch


def _was_opened(watch: int) -> bool:
  try:
    return bool(os.read(watch, 65536))
  except BlockingIOError:
    return False
