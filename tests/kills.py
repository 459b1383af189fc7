"""Kills `infer` or `train` at random moments, again and again, until they are
done, and compares what they leave with an undisturbed run's.

  python -m tests.kills infer --kills=100 [--temperature=1]
  python -m tests.kills train --kills=100
  python -m tests.kills infer --kills=20 --bucket

Each attempt is a process of its own, forked from this one before JAX starts, so
that it need not import anything, and it finds its programs in a compilation
cache. A run that gets done before the last kill is compared, and another begun.
One in a bucket is compared with one on a disk.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
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
import numpy as np
import orbax.checkpoint as ocp

from specdec_jax.cli import main
from specdec_jax.training import metrics_log
from tests.buckets import server as servers
from tests.buckets.server import Server
from tests.cli import infer_runs
from tests.cli.infer_runs import gin_file
from tests.training import tiny_runs
from tests.training.test_command import GIN

NUM_EXAMPLES = 320  # In 40 chunks.
TRAIN_STEPS = 60
CHECKPOINT_PERIOD = 3
# Most kills wait for something new, and then this long at most, in seconds.
LAG = {'infer': 0.15, 'train': 0.5}
SHARE_OF_EARLY_KILLS = 0.25
# What Orbax writes last in a bucket.
COMMITTED = 'commit_success.txt'


class Disk:
  """A folder on a disk."""

  def __init__(self, path: pathlib.Path):
    self.path = str(path)

  def times(self) -> dict[str, float]:
    """When each file below it was written, by its name."""
    found = {}
    for path in sorted(pathlib.Path(self.path).rglob('*')):
      with contextlib.suppress(FileNotFoundError):  # It is being renamed.
        if path.is_file():
          name = path.relative_to(self.path).as_posix()
          found[name] = path.stat().st_mtime
    return found

  def contents(self) -> dict[str, bytes]:
    folder = pathlib.Path(self.path)
    return {name: (folder / name).read_bytes() for name in self.times()}

  def remove(self) -> None:
    shutil.rmtree(self.path, ignore_errors=True)


class Bucket:
  """A folder in a bucket of a stand-in server."""

  def __init__(self, server: Server, name: str):
    self.server, self.path = server, f'{server.make_bucket(name)}/out'

  def times(self) -> dict[str, float]:
    return self.server.times(self.path)

  def contents(self) -> dict[str, bytes]:
    return self.server.objects(self.path)

  def remove(self) -> None:
    self.server.remove(self.path)


class Campaign(NamedTuple):
  """What is killed.

  Attributes:
    argv: the command.
    out: the folder that it writes.
    progress: how far it is, a number that grows.
    place: where a kill fell, given when the attempt began, in seconds since
      the epoch, and whether it made no progress.
    contents: what a finished run left, by name, to be compared.
  """

  argv: list[str]
  out: Disk | Bucket
  progress: Callable[[], int]
  place: Callable[[float, bool], str]
  contents: Callable[[], dict[str, str]]


def digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


def of_infer(
  folder: pathlib.Path, out: Disk | Bucket, temperature: float
) -> Campaign:
  """T5X's tiny checkpoint, drafts that are mostly wrong, chunks of 8 rows."""
  task = folder / 'task.jsonl'
  if not task.exists():
    infer_runs.write_task(task, NUM_EXAMPLES)
    infer_runs.write_model(folder / 't5')
  final = infer_runs.result('').name
  is_mark = lambda name: name.endswith('.COMPLETED')

  def place(since: float, is_early: bool) -> str:
    times = out.times()
    if f'{final}.COMPLETED' in times:
      return 'the shard is complete, its chunks not removed'
    if final in times:
      return 'the final file is there, its mark is not'
    if any('.partial-' in k and times[k] >= since for k in times):
      return 'a file is half written'
    chunks = [name for name in times if re.search(r'-chunk\d{5}$', name)]
    if any(f'{name}.COMPLETED' not in times for name in chunks):
      return 'a chunk is there, its mark is not'
    return 'start-up, no chunk since' if is_early else 'between two chunks'

  def contents() -> dict[str, str]:
    # config.gin has the folder's name in it, and breaks its line.
    found = out.contents()
    found['config.gin'] = b''.join(
      found['config.gin'].replace(out.path.encode(), b'OUT').split()
    )
    return {name: digest(data) for name, data in found.items()}

  return Campaign(
    argv=infer_runs.argv(
      folder / 't5',
      task,
      out.path,
      gin_file('drafters/uniform.gin'),
      Decoding__temperature=temperature,
    ),
    out=out,
    progress=lambda: sum('-chunk' in k and is_mark(k) for k in out.times()),
    place=place,
    contents=contents,
  )


def of_train(folder: pathlib.Path, out: Disk | Bucket) -> Campaign:
  """A tiny T5 with AdamW, a checkpoint every few steps."""
  if not (folder / 'train.gin').exists():
    tiny_runs.write_tokens(folder / 'tokens', train=120, validation=12)
    (folder / 'train.gin').write_text(GIN.format(base='train'))
  # On a disk, what is not complete has another name.
  mark = '_CHECKPOINT_METADATA' if isinstance(out, Disk) else COMMITTED

  def steps() -> list[int]:
    pattern = re.compile(rf'checkpoints/(\d+)/{mark}')
    return sorted(int(m[1]) for m in map(pattern.fullmatch, out.times()) if m)

  def place(since: float, is_early: bool) -> str:
    times = out.times()
    new = [name for name in times if times[name] >= since]
    parts = {name.split('/')[1] for name in new if 'checkpoints/' in name}
    done = {*map(str, steps())}
    if parts - done:
      return 'a checkpoint is half written'
    if any('model.tmp-' in name for name in new) or (
      any(name.startswith('model/') for name in new)
      and 'model/model.json' not in times
    ):
      return 'the model is half written'
    if 'model/model.json' in times:
      return 'the model is there'
    if any('.partial-' in name for name in new):
      return 'the log is half written'
    return 'start-up, no step since' if is_early else 'between checkpoints'

  def contents() -> dict[str, str]:
    text = out.contents()[metrics_log.NAME].decode()
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
      line.pop('targets_per_second', None)
    found = {metrics_log.NAME: json.dumps(lines)}
    restore = ocp.StandardCheckpointer().restore
    for step in steps():
      tree = restore(f'{out.path}/checkpoints/{step}/default')
      found |= arrays(f'checkpoints/{step}', tree)
    return found | arrays('model', restore(f'{out.path}/model/params'))

  return Campaign(
    argv=[
      'train',
      f'--gin_file={folder / "train.gin"}',
      f'--gin.TOKENS="{folder / "tokens"}"',
      f'--gin.MODEL_DIR="{out.path}"',
      f'--gin.TRAIN_STEPS={TRAIN_STEPS}',
      f'--gin.CHECKPOINT_PERIOD={CHECKPOINT_PERIOD}',
    ],
    out=out,
    progress=lambda: max(steps(), default=0),
    place=place,
    contents=contents,
  )


def arrays(name: str, tree) -> dict[str, str]:
  """The bytes of every array of a tree, by its path."""
  return {
    name + jax.tree_util.keystr(path): digest(np.asarray(leaf).tobytes())
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


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


def finish(pid: int, said: pathlib.Path) -> None:
  """Waits for a process that should end well."""
  _, status = os.waitpid(pid, 0)
  if status:
    sys.exit(f'an attempt failed with status {status}:\n{said.read_text()}')


def attempt(
  campaign: Campaign, rng: random.Random, startup: float, said: pathlib.Path
) -> str | None:
  """Starts the command and kills it; where that fell, or None if it was done
  before."""
  before, epoch = campaign.progress(), time.time()
  started = time.monotonic()
  pid = forked(lambda: main.main(campaign.argv), said)
  is_early = rng.random() < SHARE_OF_EARLY_KILLS
  wait = rng.uniform(0, startup if is_early else LAG[campaign.argv[0]])
  since = started if is_early else None
  while since is None or time.monotonic() < since + wait:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
      if status:
        sys.exit(f'an attempt failed with status {status}:\n{said.read_text()}')
      return None
    if since is None and campaign.progress() != before:
      since = time.monotonic()
    time.sleep(0.001 if isinstance(campaign.out, Disk) else 0.02)
  os.kill(pid, signal.SIGKILL)
  _, status = os.waitpid(pid, 0)
  if status != signal.SIGKILL:
    return None
  return campaign.place(epoch, campaign.progress() == before)


def contents(campaign: Campaign, folder: pathlib.Path) -> dict[str, str]:
  """What a finished run left, read in a process of its own."""
  found, said = folder / 'contents.json', folder / 'said'

  def read() -> int:
    found.write_text(json.dumps(campaign.contents()))
    return 0

  finish(forked(read, said), said)
  return json.loads(found.read_text())


def run(
  campaigns: list[Campaign], folder: pathlib.Path, kills: int, seed: int
) -> int:
  """Kills the last campaign, and compares it with what the first one leaves
  undisturbed; the exit status."""
  rng, said = random.Random(seed), folder / 'said'

  def undisturbed(campaign: Campaign) -> float:
    campaign.out.remove()
    started = time.monotonic()
    pid = forked(lambda: main.main(campaign.argv), said)
    while campaign.progress() == 0 and time.monotonic() < started + 300:
      time.sleep(0.01)
    startup = time.monotonic() - started
    finish(pid, said)
    return startup

  undisturbed(campaigns[0])  # Compiles.
  expected = contents(campaigns[0], folder)
  campaign = campaigns[-1]
  startup = undisturbed(campaign)
  campaign.out.remove()
  places: collections.Counter[str] = collections.Counter()
  num_runs = num_different = in_a_row = 0
  started = time.monotonic()
  while places.total() < kills or in_a_row:
    place = None
    if places.total() < kills:
      place = attempt(campaign, rng, startup, said)
    else:
      finish(forked(lambda: main.main(campaign.argv), said), said)
    if place is not None:
      places[place] += 1
      in_a_row += 1
      continue
    found = contents(campaign, folder)
    different = [k for k in expected | found if expected.get(k) != found.get(k)]
    num_runs += 1
    num_different += bool(different)
    print(
      f'run {num_runs}: {in_a_row} kills, {len(found)} files or arrays, '
      f'{len(different)} different {different[:3] or ""}',
      flush=True,
    )
    campaign.out.remove()
    in_a_row = 0
  print(
    f'{places.total()} kills in {num_runs} runs, '
    f'{time.monotonic() - started:.0f} s; {num_different} runs were different'
  )
  for place, count in places.most_common():
    print(f'  {count:4} {place}')
  return 1 if num_different else 0


@contextlib.contextmanager
def workplace() -> Iterator[pathlib.Path]:
  """A folder, with the compilation cache in it."""
  with tempfile.TemporaryDirectory() as name:
    jax.config.update('jax_compilation_cache_dir', f'{name}/compiled')
    yield pathlib.Path(name)


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('command', choices=('infer', 'train'))
  parser.add_argument('--kills', type=int, default=100)
  parser.add_argument('--temperature', type=float, default=0.0)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument(
    '--bucket', action='store_true', help='write to a stand-in for gs://'
  )
  args = parser.parse_args()
  with contextlib.ExitStack() as stack:
    place = stack.enter_context(workplace())
    outs: list[Disk | Bucket] = [Disk(place / 'out')]
    if args.bucket:
      server = stack.enter_context(servers.running())
      servers.use(server.port)
      outs.append(Bucket(server, 'kills'))
    campaigns = [
      of_train(place, out)
      if args.command == 'train'
      else of_infer(place, out, args.temperature)
      for out in outs
    ]
    sys.exit(run(campaigns, place, args.kills, args.seed))
