"""Kills `infer` or `train` at random moments, again and again, until they are
done, and compares what they leave with an undisturbed run's.

  python -m tests.kills infer --kills=100 [--temperature=1]
  python -m tests.kills train --kills=100

Each attempt is a process of its own, forked from this one before JAX starts, so
that it need not import anything, and it finds its programs in a compilation
cache. A run that gets done before the last kill is compared, and another begun.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'

import jax
import numpy as np
import orbax.checkpoint as ocp

from specdec_jax.cli import main
from specdec_jax.training import metrics_log
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
  out: pathlib.Path
  progress: Callable[[], int]
  place: Callable[[float, bool], str]
  contents: Callable[[], dict[str, str]]


def digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


def files(folder: pathlib.Path) -> dict[str, str]:
  """Every file below a folder, by its path."""
  return {
    str(path.relative_to(folder)): digest(path.read_bytes())
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }


def are_new(paths: Iterable[pathlib.Path], since: float) -> bool:
  """Whether one of them was written since then, not by an earlier attempt."""
  return any(path.stat().st_mtime >= since for path in paths)


def of_infer(folder: pathlib.Path, temperature: float) -> Campaign:
  """T5X's tiny checkpoint, drafts that are mostly wrong, chunks of 8 rows."""
  out, task = folder / 'out', folder / 'task.jsonl'
  infer_runs.write_task(task, NUM_EXAMPLES)
  final = infer_runs.result(out)
  chunks = out / 'tmp-task-predict-00000-of-00001'

  def place(since: float, is_early: bool) -> str:
    if final.with_name(f'{final.name}.COMPLETED').exists():
      return 'the shard is complete, its chunks not removed'
    if final.exists():
      return 'the final file is there, its mark is not'
    if are_new(out.rglob('*.partial-*'), since):
      return 'a file is half written'
    if any(
      not path.with_name(f'{path.name}.COMPLETED').exists()
      for path in chunks.glob('*-chunk?????')
    ):
      return 'a chunk is there, its mark is not'
    return 'start-up, no chunk since' if is_early else 'between two chunks'

  return Campaign(
    argv=infer_runs.argv(
      infer_runs.write_model(folder / 't5'),
      task,
      out,
      gin_file('drafters/uniform.gin'),
      Decoding__temperature=temperature,
    ),
    out=out,
    progress=lambda: len(list(chunks.glob('*-chunk*.COMPLETED'))),
    place=place,
    contents=lambda: files(out),
  )


def of_train(folder: pathlib.Path) -> Campaign:
  """A tiny T5 with AdamW, a checkpoint every few steps."""
  out = folder / 'run'
  tiny_runs.write_tokens(folder / 'tokens', train=120, validation=12)
  (folder / 'train.gin').write_text(GIN.format(base='train'))

  def steps() -> list[int]:
    found = (path.name for path in (out / 'checkpoints').glob('*'))
    return sorted(int(name) for name in found if name.isdecimal())

  def place(since: float, is_early: bool) -> str:
    if are_new((out / 'checkpoints').glob('*tmp*'), since):
      return 'a checkpoint is half written'
    if are_new(out.glob('model.tmp-*'), since):
      return 'the model is half written'
    if (out / 'model').exists():
      return 'the model is there'
    if are_new(out.glob('*.partial-*'), since):
      return 'the log is half written'
    return 'start-up, no step since' if is_early else 'between checkpoints'

  def contents() -> dict[str, str]:
    lines = metrics_log.read_log(out / metrics_log.NAME)
    for line in lines:
      line.pop('targets_per_second', None)
    found = {metrics_log.NAME: json.dumps(lines)}
    for step in steps():
      tree = ocp.StandardCheckpointer().restore(
        out / 'checkpoints' / str(step) / 'default'
      )
      found |= arrays(f'checkpoints/{step}', tree)
    params = ocp.StandardCheckpointer().restore(out / 'model' / 'params')
    return found | arrays('model', params)

  return Campaign(
    argv=[
      'train',
      f'--gin_file={folder / "train.gin"}',
      f'--gin.TOKENS="{folder / "tokens"}"',
      f'--gin.MODEL_DIR="{out}"',
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
    time.sleep(0.001)
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


def run(campaign: Campaign, folder: pathlib.Path, kills: int, seed: int) -> int:
  """The campaign; the exit status."""
  rng, said = random.Random(seed), folder / 'said'

  def undisturbed() -> float:
    shutil.rmtree(campaign.out, ignore_errors=True)
    started = time.monotonic()
    pid = forked(lambda: main.main(campaign.argv), said)
    while campaign.progress() == 0 and time.monotonic() < started + 300:
      time.sleep(0.01)
    startup = time.monotonic() - started
    finish(pid, said)
    return startup

  undisturbed()  # Compiles.
  startup = undisturbed()
  expected = contents(campaign, folder)
  shutil.rmtree(campaign.out)
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
    shutil.rmtree(campaign.out)
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
  args = parser.parse_args()
  with workplace() as place:
    sys.exit(
      run(
        of_train(place)
        if args.command == 'train'
        else of_infer(place, args.temperature),
        place,
        args.kills,
        args.seed,
      )
    )
