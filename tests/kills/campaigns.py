"""The commands that are killed, each with what it reads and writes."""

import functools
from collections.abc import Callable
from pathlib import Path

from specdec_jax import lazy
from tests.checkpoints import tiny_t5
from tests.kills.campaign import Campaign, files, is_any, is_new
from tests.kills.places import Bucket, Disk


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


def write_model(folder: Path) -> None:
  tiny_t5.write_model(folder / 't5')


# What writes the files that a command reads, and what gives the campaign.
COMMANDS: dict[str, tuple[Callable[[Path], None], Callable[..., Campaign]]]
COMMANDS = {'convert': (write_model, convert)}
for commands in lazy.installed(
  'tests.infer.killed:COMMANDS', 'tests.training.killed:COMMANDS'
):
  COMMANDS |= commands
