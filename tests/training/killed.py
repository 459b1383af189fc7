"""The command `train`, which tests/kills kills."""

import json
import re
from pathlib import Path

import numpy as np

from specdec_jax.checkpoints import orbax
from specdec_jax.files.paths import user_path
from specdec_jax.training import metrics_log
from tests.kills.campaign import Campaign, digest, is_any, is_new
from tests.kills.places import Bucket, Disk
from tests.training import tiny_runs
from tests.training.test_command import GIN

TRAIN_STEPS = 30
CHECKPOINT_PERIOD = 3
# What Orbax writes last in a bucket.
COMMITTED = 'commit_success.txt'


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
      line.pop('targets_per_processor_second', None)
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


COMMANDS = {'train': (write_tokens, train)}
