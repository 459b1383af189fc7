"""Kills a command at random moments, again and again, until it is done, and
compares what it leaves with an undisturbed run's.

  python -m tests.kills infer --kills=100 [--temperature=1] [--regex='[a-z ]+']
  python -m tests.kills train --kills=100
  python -m tests.kills convert --kills=20 --bucket
  python -m tests.kills infer --kills=20 --bucket --processes=2 --fault=one
  python -m tests.kills infer --kills=5 --bucket --processes=2 --fault=503

Each attempt is a process of its own, forked from this one before JAX starts, so
that it need not import anything, and it finds its programs in a compilation
cache. A run that gets done before the last kill is compared, and another begun.
One in a bucket is compared with one on a disk. Several processes, of four
devices each, compile every time: one of them is killed, and then the others, or
these are left to end by themselves in mid-decode, as all are of a server that
has begun to answer with a fault; how they ended, and when, is printed.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'

import jax

from specdec_jax.cli import main
from tests.files import door as doors
from tests.files import server as servers
from tests.kills.campaign import Campaign
from tests.kills.campaigns import COMMANDS
from tests.kills.places import Bucket, Disk

ALL, ONE = 'all', 'one'
NUM_DEVICES = 4  # Of each process, if there are several.
# Some attempts are to end.
LONGER = 1.25
# What is left alone ends within one of these, in seconds.
LIMITS = (5, 15, 30, 60, 90, 120, 240)
ENDS_SECONDS = LIMITS[-1]


class Durations(NamedTuple):
  """Seconds of an undisturbed run: until it has written something, and from
  there to its end."""

  startup: float
  writing: float


class Job:
  """A command that runs, in one process or several; what they say is in
  `folder`, and so are the names of all modules that the first one imported."""

  def __init__(self, argv: list[str], num_processes: int, folder: pathlib.Path):
    self.folder = folder
    places: list[list[str]] = [[]]
    if num_processes > 1:
      together = [
        f'--coordinator_address=localhost:{servers.free_port()}',
        f'--process_count={num_processes}',
      ]
      indices = range(num_processes)
      places = [[*together, f'--process_index={i}'] for i in indices]
    self.pids = [
      forked(functools.partial(self._work, argv + more), self._said(i))
      for i, more in enumerate(places)
    ]
    self.statuses: dict[int, int] = {}

  def _said(self, index: int) -> pathlib.Path:
    return self.folder / f'said{index}'

  def _work(self, argv: list[str]) -> int:
    status = main.main(argv)
    (self.folder / 'modules').write_text('\n'.join(sys.modules))
    return status

  def running(self, *, may_fail: bool = False) -> list[int]:
    """The processes that have not ended; exits if one has failed."""
    for index, pid in enumerate(self.pids):
      if pid not in self.statuses:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
          self.statuses[pid] = os.waitstatus_to_exitcode(status)
          if status and not may_fail:
            said = self._said(index).read_text()
            sys.exit(f'an attempt failed with status {status}:\n{said}')
    return [pid for pid in self.pids if pid not in self.statuses]

  def finish(self) -> None:
    """Waits for all."""
    while self.running():
      time.sleep(0.01)
    for name in (self.folder / 'modules').read_text().splitlines():
      # So that those that are forked later need not import it.
      with contextlib.suppress(Exception):
        importlib.import_module(name)

  def outlive(self) -> str:
    """Waits until all have ended by themselves; how, and within which time."""
    started = time.monotonic()
    while victims := self.running(may_fail=True):
      if time.monotonic() > started + ENDS_SECONDS:
        said = [self._said(i).read_text() for i in range(len(self.pids))]
        for pid in victims:
          os.kill(pid, signal.SIGKILL)
        sys.exit(f'{len(victims)} did not end in {ENDS_SECONDS} s:\n{said}')
      time.sleep(0.1)
    seconds = time.monotonic() - started
    limit = next(limit for limit in LIMITS if seconds <= limit)
    statuses = [self.statuses[pid] for pid in self.pids]
    return f'ended with {statuses} within {limit} s'

  def kill(self, rng: random.Random) -> bool:
    """Kills a process, and the others a moment later; whether one was left."""
    victims = self.running()
    rng.shuffle(victims)
    for pid in victims:
      os.kill(pid, signal.SIGKILL)
      if len(victims) > 1:
        time.sleep(rng.uniform(0, 0.5))
    statuses = [os.waitpid(pid, 0)[1] for pid in victims]
    return signal.SIGKILL in statuses


def forked(function: Callable[[], int], said: pathlib.Path) -> int:
  """Starts a process that calls a function, and ends with its status."""
  pid = os.fork()
  if pid:
    return pid
  status = 1
  with contextlib.suppress(BaseException), said.open('w') as file:
    for stream in (1, 2):
      os.dup2(file.fileno(), stream)
    status = function()
  os._exit(status)


class Killer(NamedTuple):
  """A campaign, the number of its processes, and a folder of its own."""

  campaign: Campaign
  num_processes: int
  inputs: pathlib.Path
  folder: pathlib.Path
  fault: str
  door: doors.Door | None
  ends: collections.Counter[str]

  def start(self) -> Job:
    return Job(self.campaign.argv, self.num_processes, self.folder)

  def begin(self) -> None:
    """Makes the place what it is before a run."""
    self.campaign.place.remove()
    self.campaign.place.put(self.inputs)

  def undisturbed(self) -> Durations:
    self.begin()
    started, before = time.monotonic(), self.campaign.progress()
    job = self.start()
    while job.running() and self.campaign.progress() == before:
      time.sleep(0.005)
    written = time.monotonic()
    job.finish()
    return Durations(written - started, time.monotonic() - written)

  def attempt(self, rng: random.Random, usual: Durations) -> str | None:
    """Starts the command and kills it; where that fell, or None if it was done
    before."""
    campaign = self.campaign
    before, epoch = campaign.progress(), time.time()
    started = time.monotonic()
    is_early = rng.random() < campaign.share_early
    wait = usual.startup if is_early else usual.writing / campaign.kills_per_run
    wait = rng.uniform(0, LONGER * wait)
    since = started if is_early else None
    job = self.start()
    while since is None or time.monotonic() < since + wait:
      if not job.running():
        return None
      if since is None and campaign.progress() != before:
        since = time.monotonic()
      time.sleep(0.001 if isinstance(campaign.place, Disk) else 0.01)
    if not self.strike(job, rng):
      return None
    return campaign.stage(epoch, campaign.progress() == before)

  def strike(self, job: Job, rng: random.Random) -> bool:
    """Does to the processes what is asked for; whether one did not get done."""
    if self.fault == ALL:
      return job.kill(rng)
    if self.fault == ONE:
      if victims := job.running():
        os.kill(rng.choice(victims), signal.SIGKILL)
    elif self.door is not None:
      status = int(self.fault)
      self.door.refusal = lambda method, path, body: status
    end = job.outlive()
    if self.door is not None:
      self.door.refusal = lambda method, path, body: None
    if not any(job.statuses.values()):
      return False
    self.ends[end] += 1
    return True

  def contents(self) -> dict[str, str]:
    """What a finished run left, read in a process of its own."""
    found, said = self.folder / 'contents.json', self.folder / 'said'

    def read() -> int:
      found.write_text(json.dumps(self.campaign.contents()))
      return 0

    _, status = os.waitpid(forked(read, said), 0)
    if status:
      sys.exit(f'what there is cannot be read:\n{said.read_text()}')
    return json.loads(found.read_text())


def run(reference: Killer, killer: Killer, kills: int, seed: int) -> int:
  """Kills a campaign, and compares it with what another one leaves undisturbed;
  the exit status."""
  rng = random.Random(seed)
  reference.undisturbed()  # Compiles.
  expected = reference.contents()
  killer.undisturbed()  # Imports what the others need not.
  usual = killer.undisturbed()
  print(
    f'undisturbed: {usual.startup:.1f} s, and {usual.writing:.1f} s that write',
    flush=True,
  )
  places: collections.Counter[str] = collections.Counter()
  num_runs = num_different = 0
  started = time.monotonic()
  while places.total() < kills:
    killer.begin()
    in_a_row = 0
    while places.total() < kills:
      place = killer.attempt(rng, usual)
      if place is None:
        break
      places[place] += 1
      in_a_row += 1
    else:
      killer.start().finish()
    found = killer.contents()
    different = [k for k in expected | found if expected.get(k) != found.get(k)]
    num_runs += 1
    num_different += bool(different)
    print(
      f'run {num_runs}: {in_a_row} kills, {len(found)} files or arrays, '
      f'{len(different)} different {different[:3] or ""}',
      flush=True,
    )
  print(
    f'{places.total()} kills in {num_runs} runs, '
    f'{time.monotonic() - started:.0f} s; {num_different} runs were different'
  )
  for place, count in (*places.most_common(), *killer.ends.most_common()):
    print(f'  {count:4} {place}')
  return 1 if num_different else 0


@contextlib.contextmanager
def workplace() -> Iterator[pathlib.Path]:
  """A folder, with the compilation cache in it."""
  with tempfile.TemporaryDirectory() as name:
    jax.config.update('jax_compilation_cache_dir', f'{name}/compiled')
    yield pathlib.Path(name)


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('command', choices=tuple(COMMANDS))
  parser.add_argument('--kills', type=int, default=100)
  parser.add_argument('--temperature', type=float, default=0.0, help='of infer')
  parser.add_argument('--regex', default='', help='of infer: of its texts')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument(
    '--bucket', action='store_true', help='read and write a stand-in for gs://'
  )
  parser.add_argument(
    '--processes', type=int, default=1, help='of infer and train'
  )
  parser.add_argument(
    '--fault',
    choices=(ALL, ONE, *map(str, doors.REASONS)),
    default=ALL,
    help='kill all processes, or one of several; or what the server answers',
  )
  args = parser.parse_args()
  if args.fault.isdigit() and not args.bucket:
    parser.error(f'--fault={args.fault} is of a --bucket')
  if args.fault == ONE and args.processes == 1:
    parser.error(f'--fault={ONE} is of several --processes')
  if args.processes > 1 and args.command not in ('infer', 'train'):
    parser.error(f'{args.command} is of one process')
  return args


if __name__ == '__main__':
  args = arguments()
  if args.processes > 1:
    os.environ['XLA_FLAGS'] = (
      f'--xla_force_host_platform_device_count={NUM_DEVICES}'
    )
  write, make = COMMANDS[args.command]
  if args.command == 'infer':
    make = functools.partial(
      make,
      temperature=args.temperature,
      num_processes=args.processes,
      regex=args.regex,
    )
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(workplace())
    (folder / 'inputs').mkdir()
    write(folder / 'inputs')
    places: list[Disk | Bucket] = [Disk(folder / 'place')]
    door = None
    if args.bucket:
      server = stack.enter_context(servers.running())
      port = server.port
      if args.fault.isdigit():
        door = stack.enter_context(doors.opened(port))
        port = door.port
      servers.use(port)
      places.append(Bucket(server, f'{server.make_bucket("kills")}/place'))
    killers = [
      Killer(
        campaign if args.fault == ALL else campaign._replace(share_early=0),
        *(args.processes, folder / 'inputs', folder),
        *(args.fault, door, collections.Counter()),
      )
      for campaign in map(make, places)
    ]
    sys.exit(run(killers[0], killers[-1], args.kills, args.seed))
