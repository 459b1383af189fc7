"""The commands of `infer` that tests/kills kills."""

import functools
import re
from pathlib import Path

from specdec_jax.infer import output
from specdec_jax.infer.marks import Counts, Mark
from specdec_jax.infer.output import Shard
from tests.checkpoints import tiny_t5
from tests.infer import infer_runs
from tests.infer.infer_runs import gin_file
from tests.kills.campaign import Campaign, files, is_any, is_new
from tests.kills.places import Bucket, Disk

NUM_EXAMPLES = 320  # In 40 chunks.
NUM_SHARDS = 4
FINAL = infer_runs.result('').name


def write_model_and_task(folder: Path) -> None:
  infer_runs.write_task(folder / 'task.jsonl', NUM_EXAMPLES)
  tiny_t5.write_model(folder / 't5')


def infer(
  place: Disk | Bucket, *, temperature: float, num_processes: int, regex: str
) -> Campaign:
  """T5X's tiny checkpoint, drafts that are mostly wrong, chunks of 8 rows; all
  texts match a regular expression unless that is empty."""
  is_marked_chunk = re.compile(r'-chunk\d{5}\.COMPLETED$').search
  is_chunk = re.compile(r'-chunk\d{5}$').search
  mesh = {}
  grammar = {'Decoding__regex': repr(regex)} if regex else {}
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
      **grammar,
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


COMMANDS = {
  'infer': (write_model_and_task, infer),
  'eval': (write_shards, evaluate),
  'merge': (write_shards, merge),
}
