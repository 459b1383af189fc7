"""Folders of T5X, in both of its formats.

`DIR/checkpoint_N` is of T5X's own format (`legacy`) if it has a file
`checkpoint`, and of Orbax's if it has a folder `state`. T5X itself
(https://github.com/google-research/t5x) tells them apart in this way.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import model_file, orbax, stored_arrays
from specdec_jax.checkpoints.stored_arrays import Stored
from specdec_jax.checkpoints.t5x import legacy
from specdec_jax.files.local_path import local_path
from specdec_jax.files.replacing import new_folder
from specdec_jax.models import presets
from specdec_jax.models.families import Config

Layout = Literal['legacy', 'orbax']
_STEP = re.compile(r'checkpoint_(\d+)')
_STATE = 'state'


def read_config(path: Path, *, sizes: Any, dtype: jnp.dtype) -> Config:
  """The sizes of a checkpoint, which does not state them.

  Args:
    path: as for `read_target`.
    sizes: a config, a name of `models.presets`, or the path of a model.json;
      None for a model.json in the checkpoint's folder or the one above.
    dtype: of the parameters, activations and cache.

  Raises:
    ValueError: if the sizes are none of these, or there are none.
  """
  if sizes is not None and not isinstance(sizes, str):
    return dataclasses.replace(sizes, dtype=dtype)
  if sizes in presets.PRESETS:
    return presets.preset(sizes, dtype=dtype)
  if sizes is not None:
    if not local_path(sizes).exists():
      raise ValueError(
        f'{sizes!r} is neither a file nor the name of sizes; names are '
        f'{", ".join(presets.PRESETS)}'
      )
    return model_file.read(local_path(sizes), dtype=dtype)
  checkpoint = find(path)
  for folder in (checkpoint, checkpoint.parent):
    if (folder / model_file.NAME).is_file():
      return model_file.read(folder, dtype=dtype)
  raise ValueError(
    f'{checkpoint} does not state its sizes: give a config, such as '
    f't5_1_1_small (--config), or put a {model_file.NAME} beside it'
  )


def read_target(
  path: str | os.PathLike[str],
  expected: Any,
  *,
  dtype: jnp.dtype | None = None,
) -> Any:
  """Reads the parameters of a checkpoint.

  Where a leaf of `expected` has a sharding, this process reads the slices of
  its own devices and no others. The optimizer's state is never read.

  Args:
    path: of `checkpoint_N`, or of the folder around it, for its newest step.
    expected: a tree of dicts of `jax.ShapeDtypeStruct`, as
      `models.families.param_shapes` gives.
    dtype: of the results; None takes that of each expected leaf.

  Returns:
    A tree like `expected`, of arrays.

  Raises:
    ValueError: if there is no finished checkpoint, if it is damaged, or if
      its arrays have other names or shapes.
    ImportError: if the tensorstore package is not installed.
  """
  folder = find(path)
  return stored_arrays.read_tree(
    open_target(folder), expected, source=str(folder), dtype=dtype
  )


def read_step(path: str | os.PathLike[str]) -> int:
  """Training steps taken, as the checkpoint itself says.

  Raises:
    ValueError: if there is no finished checkpoint, or it is damaged.
  """
  folder = find(path)
  if _layout_of(folder) == 'legacy':
    stored = legacy.open_step(folder)
  else:
    stored = orbax.open_tree(folder / _STATE, 'state/').get('step')
  if stored is None:
    raise ValueError(f'{folder} does not say how many steps were taken')
  return stored_arrays.whole_number(stored, source=str(folder), name='step')


def write_target(
  path: str | os.PathLike[str],
  params: Any,
  *,
  step: int,
  format: Layout = 'legacy',
) -> Path:
  """Writes parameters as a checkpoint that T5X restores.

  It holds no optimizer state: in T5X, restore it with
  `restore_optimizer=False` or for inference. It appears under its name when
  it is complete.

  Args:
    path: of the folder around `checkpoint_N`, made if it does not exist.
    params: a tree of dicts of arrays; they keep their dtypes.
    step: N, training steps taken.
    format: T5X's own, or Orbax's.

  Returns:
    The path of `checkpoint_N`.

  Raises:
    ValueError: if there already is a checkpoint of this step, or an array is
      spread over several processes.
    ImportError: if tensorstore, or orbax-checkpoint, is not installed.
  """
  final = local_path(path) / f'checkpoint_{step}'
  params = stored_arrays.on_host(params)
  with new_folder(final) as folder:
    if format == 'legacy':
      legacy.write(folder, params, step=step)
    else:
      state = {'param_states': {}, 'step': np.int32(step)}
      orbax.write_tree(folder / _STATE, {'state': state, 'target': params})
  return final


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
  """Whether a path holds a finished checkpoint of T5X."""
  return layout_of(path) is not None


def layout_of(path: str | os.PathLike[str]) -> Layout | None:
  """Which of the two formats a finished checkpoint is of; None without one."""
  try:
    return _layout_of(find(path))
  except ValueError:
    return None


def find(path: str | os.PathLike[str]) -> Path:
  """The folder of a checkpoint: `path` itself, or the newest step in it.

  Args:
    path: of `checkpoint_N`, of the folder around it, or of the file
      `checkpoint` in it.

  Raises:
    ValueError: if there is no finished checkpoint.
  """
  folder = local_path(path)
  if folder.is_file() and folder.name == legacy.FILE:
    folder = folder.parent
  if '.tmp-' in folder.name or 'orbax-checkpoint-tmp' in folder.name:
    raise ValueError(f'{folder} was not written to its end: its name says so')
  if _is_one(folder):
    return folder
  if not folder.is_dir():
    raise ValueError(f'there is no folder {folder}')
  steps = {
    int(match[1]): child
    for child in folder.iterdir()
    if (match := _STEP.fullmatch(child.name)) and _is_one(child)
  }
  if steps:
    return steps[max(steps)]
  raise ValueError(_why_none(folder))


def _is_one(folder: Path) -> bool:
  return (folder / legacy.FILE).is_file() or (folder / _STATE).is_dir()


def _why_none(folder: Path) -> str:
  """What is in a folder that holds no finished checkpoint."""
  names = sorted(child.name for child in folder.iterdir())
  if _STEP.fullmatch(folder.name) or any(
    name.startswith('target.') for name in names
  ):
    return (
      f'{folder} has neither a file {legacy.FILE} nor a folder {_STATE}: '
      'it was not written to its end, or not by T5X'
    )
  begun = [name for name in names if name.startswith('checkpoint_')]
  if begun:
    return (
      f'{folder} has no finished checkpoint; not written to their end: '
      f'{stored_arrays.some(begun)}'
    )
  return f'{folder} has no checkpoint_N of T5X'


def _layout_of(folder: Path) -> Layout:
  """Which of the two formats a folder that `find` found is of."""
  return 'legacy' if (folder / legacy.FILE).is_file() else 'orbax'


def open_target(folder: Path) -> dict[str, Stored]:
  """The stored parameters of a checkpoint that `find` found, by name."""
  if _layout_of(folder) == 'legacy':
    return legacy.open_target(folder)
  arrays = orbax.open_tree(folder / _STATE, 'target/')
  if not arrays:
    raise ValueError(f'{folder} holds no parameters')
  return arrays
