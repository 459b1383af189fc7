"""The commands that are killed, each with what it reads and writes."""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec_jax.checkpoints import orbax
from specdec_jax.files.paths import user_path
from specdec_jax.infer import output
from specdec_jax.infer.marks import Counts, Mark
from specdec_jax.infer.output import Shard
from specdec_jax.training import metrics_log
from tests.checkpoints import tiny_t5
from tests.infer import infer_runs
from tests.infer.infer_runs import gin_file
from tests.kills.places import Bucket, Disk
from tests.training import tiny_runs
from tests.training.test_command import GIN

NUM_EXAMPLES = 320  # In 40 chunks.
NUM_SHARDS = 4
TRAIN_STEPS = 30
CHECKPOINT_PERIOD = 3
# What Orbax writes last in a bucket.
COMMITTED = 'commit_success.txt'
FINAL = infer_runs.result('').name
# Given the names of all files, and of those that this attempt wrote.
IsThere = Callable[[set[str], set[str]], bool]


class Campaign(NamedTuple):
  """What is killed.

  Attributes:
    argv: the command.
    place: the folder that it reads and writes.
    progress: how far it is, a number that changes.
    stages: what a kill can leave, and whether it is what there is; the first
      that is counts.
    contents: what a finished run left, by name, to be compared.
    kills_per_run: about so many times a run is killed while it writes.
    share_early: of the kills that fall anywhere, not soon after a write.
  """

  argv: list[str]
  place: Disk | Bucket
  progress: Callable[[], int]
  stages: Mapping[str, IsThere]
  contents: Callable[[], dict[str, str]]
  kills_per_run: int = 1
  share_early: float = 0.25

  def stage(self, since: float, is_early: bool) -> str:
    """Where a kill fell, of an attempt that began at a time, in seconds since
    the epoch, and that made no progress if `is_early`."""
    times = self.place.times()
    new = {name for name, time in times.items() if time >= since}
    for stage, is_there in self.stages.items():
      if is_there({*times}, new):
        return stage
    return 'before anything was written' if is_early else 'between two writes'


def is_any(part: str) -> IsThere:
  """Whether a file has this part in its name."""
  return lambda names, new: any(part in name for name in names)


def is_new(part: str) -> IsThere:
  """Whether a file that this attempt wrote has it."""
  return lambda names, new: any(part in name for name in new)


def digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


def files(place: Disk | Bucket, but: str = '$^') -> dict[str, str]:
  """All that lies there but for names with a pattern in them."""
  found = {}
  for name, data in place.contents().items():
    # Marks and config.gin have paths in them, and gin breaks its lines.
    data = data.replace(place.path.encode(), b'PLACE')
    # Those of a bucket are of the server's checksums.
    data = re.sub(rb'"digest of the [^"]*": "\w*"', b'DIGEST', data)
    if name.endswith('.gin'):
      data = re.sub(rb'\\?\s+', b'', data)
    if not re.search(but, name):
      found[name] = digest(data)
  return found


def write_model_and_task(folder: Path) -> None:
  infer_runs.write_task(folder / 'task.jsonl', NUM_EXAMPLES)
  tiny_t5.write_model(folder / 't5')


def infer(
  place: Disk | Bucket, *, temperature: float, num_processes: int
) -> Campaign:
  """T5X's tiny checkpoint, drafts that are mostly wrong, chunks of 8 rows."""
  is_marked_chunk = re.compile(r'-chunk\d{5}\.COMPLETED$').search
  is_chunk = re.compile(r'-chunk\d{5}$').search
  mesh = {}
  if num_processes > 1:
    mesh['device_mesh__num_devices'] = 'None'
    mesh['device_mesh__num_partitions'] = 2

  def has_unmarked_chunk(names: set[str], new: set[str]) -> bool:
    chunks = filter(is_chunk, names)
    return any(f'{name}.COMPLETED' not in names for name in chunks)

  return Campaign(
    argv=infer_runs.argv(
      f'{place.path}/t5',
      f'{place.path}/task.jsonl',
      f'{place.path}/out',
      gin_file('drafters/uniform.gin'),
      drafters__Uniform__gamma=4,
      Decoding__temperature=temperature,
      **mesh,
    ),
    place=place,
    progress=lambda: len([*filter(is_marked_chunk, place.times())]),
    stages={
      'the shard is complete, its chunks not removed': is_any(
        f'out/{FINAL}.COMPLETED'
      ),
      'the final file is there, its mark is not': (
        lambda names, new: f'out/{FINAL}' in names
      ),
      'a file is half written': is_new('.partial-'),
      'a chunk is there, its mark is not': has_unmarked_chunk,
    },
    contents=functools.partial(files, place),
    kills_per_run=6,
  )


def write_tokens(folder: Path) -> None:
  tiny_runs.write_tokens(folder / 'tokens', train=120, validation=12)
  (folder / 'train.gin').write_text(GIN.format(base='train'))


def train(place: Disk | Bucket) -> Campaign:
  """A tiny T5 with AdamW, a checkpoint every few steps."""
  # On a disk, what is not complete has another name.
  mark = '_CHECKPOINT_METADATA' if isinstance(place, Disk) else COMMITTED

  def steps(names: set[str]) -> list[int]:
    pattern = re.compile(rf'run/checkpoints/(\d+)/{mark}')
    return sorted(int(m[1]) for m in map(pattern.fullmatch, names) if m)

  def has_half_a_checkpoint(names: set[str], new: set[str]) -> bool:
    begun = {name.split('/')[2] for name in new if '/checkpoints/' in name}
    return bool(begun - {*map(str, steps(names))})

  def has_half_a_model(names: set[str], new: set[str]) -> bool:
    is_whole = 'run/model/model.json' in names
    in_place = is_new('run/model/')(names, new) and not is_whole
    return in_place or is_new('model.tmp-')(names, new)

  def contents() -> dict[str, str]:
    folder = user_path(place.path) / 'run'
    lines = metrics_log.read_log(folder / metrics_log.NAME)
    for line in lines:
      line.pop('targets_per_second', None)
    found = {metrics_log.NAME: json.dumps(lines)}
    trees = [f'checkpoints/{step}/default' for step in steps({*place.times()})]
    for tree in (*trees, 'model/params'):
      for name, stored in orbax.open_tree(folder / tree).items():
        found[f'{tree}/{name}'] = digest(np.asarray(stored).tobytes())
    return found

  return Campaign(
    argv=[
      'train',
      f'--gin_file={place.path}/train.gin',
      '--gin_remote_imports',
      f'--gin.TOKENS="{place.path}/tokens"',
      f'--gin.MODEL_DIR="{place.path}/run"',
      f'--gin.TRAIN_STEPS={TRAIN_STEPS}',
      f'--gin.CHECKPOINT_PERIOD={CHECKPOINT_PERIOD}',
    ],
    place=place,
    progress=lambda: max(steps({*place.times()}), default=0),
    stages={
      'a checkpoint is half written': has_half_a_checkpoint,
      'the model is half written': has_half_a_model,
      'the model is there': is_any('run/model/model.json'),
      'the log is half written': is_new('.partial-'),
    },
    contents=contents,
    kills_per_run=6,
  )


def convert(place: Disk | Bucket) -> Campaign:
  """T5X's tiny checkpoint, to a file for every array."""
  return Campaign(
    argv=[
      *('convert', f'{place.path}/t5', f'{place.path}/model'),
      *('--to=t5x_legacy', '--overwrite'),
    ],
    place=place,
    progress=lambda: len(place.times()),
    stages={
      'the model is half written': lambda names, new: (
        'model/specdec-begun' in names or is_new('model.tmp-')(names, new)
      ),
      'the model is there': is_any('model/checkpoint_'),
    },
    # On a disk, a killed command leaves its own folder.
    contents=functools.partial(files, place, but=r'^model\.tmp-'),
  )


def write_shards(folder: Path) -> None:
  """What several runs of `infer` leave."""
  words = [f'word{i}' for i in range(9)]
  target = {'targets_pretokenized': ' '.join(words)}
  settings = {'setting': 'value'}
  for i in range(NUM_SHARDS):
    shard = Shard(
      folder=folder,
      task='task',
      mode='predict',
      shard_id=i,
      num_shards=NUM_SHARDS,
    )
    lines = [
      {'inputs': target, 'prediction': ' '.join(words[: 4 + (i + j) % 6])}
      for j in range(NUM_EXAMPLES // NUM_SHARDS)
    ]
    output.begin(shard, settings)
    mark = Mark(examples=len(lines), examples_digest=f'{i:064x}')
    output.write_chunk(shard, 0, lines, mark, settings)
    output.finish(shard, 1, Counts(examples=len(lines)), settings)


def merge(place: Disk | Bucket) -> Campaign:
  """Shards of some lines, to one file."""
  return Campaign(
    argv=['merge', place.path],
    place=place,
    progress=lambda: len(place.times()),
    stages={
      'all is there': is_any(f'{FINAL}.COMPLETED'),
      'the file is there, its mark is not': lambda names, new: FINAL in names,
      'a file is half written': is_new('.partial-'),
    },
    contents=functools.partial(files, place),
    share_early=0.75,
  )


def evaluate(place: Disk | Bucket) -> Campaign:
  """BLEU and ROUGE of these lines."""
  shards = [f'{i:05}-of-{NUM_SHARDS:05}' for i in range(NUM_SHARDS)]
  names = [infer_runs.result('', shard=shard).name for shard in shards]
  figures = f'{place.path}/figures.json'
  return Campaign(
    argv=[
      'eval',
      *(f'{place.path}/{name}' for name in names),
      '--json',
      figures,
    ],
    place=place,
    progress=lambda: len(place.times()),
    stages={
      'a file is half written': is_new('figures.json.partial-'),
      'the figures are there': is_new('figures.json'),
    },
    contents=functools.partial(files, place, but=r'\.partial-'),
    share_early=0.75,
  )


# What writes the files that a command reads, and what gives the campaign.
COMMANDS: Mapping[str, tuple[Callable[[Path], None], Callable[..., Campaign]]]
COMMANDS = {
  'infer': (write_model_and_task, infer),
  'train': (write_tokens, train),
  'convert': (write_model_and_task, convert),
  'eval': (write_shards, evaluate),
  'merge': (write_shards, merge),
}
