"""T5X checkpoints, in T5X's own format (`legacy`) and in Orbax's.

`DIR/checkpoint_N` is of T5X's own format if it has a file `checkpoint`, and of
Orbax's if it has a folder `state`. T5X itself
(https://github.com/google-research/t5x) tells them apart in this way.
"""

import dataclasses
import re
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import model_file, orbax, stored_arrays
from specdec_jax.checkpoints.stored_arrays import Stored
from specdec_jax.checkpoints.t5x import legacy, scanned
from specdec_jax.files.paths import user_path
from specdec_jax.files.replacing import new_folder
from specdec_jax.models import presets, quantized
from specdec_jax.models.families import Config
from specdec_jax.models.products import Weights

Layout = Literal['legacy', 'orbax']
_STEP = re.compile(r'checkpoint_(\d+)')
_STATE = 'state'


def read_config(
  path: Path, *, sizes: Config | str | None = None, dtype: jnp.dtype
) -> Config:
  """Returns the config of a checkpoint, which does not store it. `sizes` is a
  config, a name of `models.presets` or the path of a model.json; by default the
  model.json in one of `folders`. Raises ValueError otherwise."""
  if isinstance(sizes, str) and sizes in presets.PRESETS:
    return presets.preset(sizes, dtype=dtype)
  if isinstance(sizes, str):
    if user_path(sizes).exists():
      return model_file.read(user_path(sizes), dtype=dtype)
    raise ValueError(
      f'{sizes!r} is neither a file nor a preset; presets are '
      f'{", ".join(presets.PRESETS)}'
    )
  if sizes is not None:
    return dataclasses.replace(sizes, dtype=dtype)
  checkpoint, parent = folders(path)
  for folder in (checkpoint, parent):
    if (folder / model_file.NAME).is_file():
      return model_file.read(folder, dtype=dtype)
  raise ValueError(
    f'{checkpoint} does not state its sizes: give a config, such as '
    f't5_1_1_small (--config), or put a {model_file.NAME} beside it'
  )


def read_target(path: Path | str, expected: Weights) -> Weights:
  """Reads the parameters of a checkpoint, never its optimizer state; layers may
  be scanned. See `find` and `stored_arrays.read_tree`."""
  folder = find(path)
  # Opening reads names and shapes only.
  arrays = open_target(folder)
  leaves = stored_arrays.flatten(expected)
  if not scanned.is_scanned(arrays) or scanned.is_scanned(leaves):
    return stored_arrays.read_tree(arrays, expected, source=str(folder))
  try:
    shapes = scanned.stacked_shapes(leaves)
  except ValueError as error:
    raise ValueError(f'{folder}: {error}') from error
  # Nothing else refers to this tree: `unstack` frees each array it has split.
  return scanned.unstack(
    stored_arrays.read_tree(arrays, shapes, source=str(folder)), leaves
  )


def open_target(folder: Path) -> dict[str, Stored]:
  """Opens the stored parameters of a checkpoint, by name; `folder` is that of
  `find`."""
  if _layout(folder) == 'legacy':
    arrays = legacy.open_target(folder)
  else:
    arrays = orbax.open_tree(folder / _STATE, 'target/')
  if not arrays:
    raise ValueError(f'{folder} holds no parameters')
  return arrays


def read_step(path: Path | str) -> int:
  """Reads the number of training steps; ValueError if the checkpoint is
  unfinished or damaged."""
  folder = find(path)
  if _layout(folder) == 'legacy':
    stored = legacy.open_step(folder)
  else:
    stored = orbax.open_tree(folder / _STATE, 'state/').get('step')
  if stored is None:
    raise ValueError(f'{folder} does not say how many steps were taken')
  return stored_arrays.read_integer(stored, source=str(folder), name='step')


def step_path(path: Path | str, step: int) -> Path:
  """Returns where a folder has the checkpoint of a step."""
  return user_path(path) / f'checkpoint_{step}'


def write_target(
  path: Path | str,
  params: Weights,
  *,
  step: int,
  format: Layout = 'legacy',
  overwrite: bool = False,
) -> Path:
  """Writes parameters, in their dtypes, as a checkpoint that T5X restores with
  `restore_optimizer=False` or for inference; returns its path.

  It appears as `checkpoint_STEP` in `path`, which is created, once it is
  complete, and replaces an existing one of this step if `overwrite`; other
  steps stay. Layers with relative positions per layer are stacked, see
  `scanned`. Raises ValueError if there is a checkpoint of this step or the
  weights are quantized, RuntimeError if an array is spread over several
  processes, and ImportError without the package that writes it.
  """
  final = step_path(path, step)
  if quantized.name_of(params):
    raise ValueError('T5X has no quantized weights: write orbax or safetensors')
  params = jax.tree.map(np.asarray, params)
  # T5X has relative positions in every layer only in scanned stacks.
  if any('/layers_0/relpos_bias/' in x for x in stored_arrays.flatten(params)):
    params = scanned.stack(params)
  with new_folder(final, overwrite=overwrite) as folder:
    if format == 'legacy':
      legacy.write(folder, params, step=step)
    else:
      state = {'param_states': {}, 'step': np.int32(step)}
      orbax.write_tree(folder / _STATE, {'state': state, 'target': params})
  return final


def layout_of(path: Path | str) -> Layout | None:
  """Returns the format of a finished checkpoint, or None."""
  try:
    return _layout(find(path))
  except ValueError:
    return None


def folders(path: Path | str) -> tuple[Path, Path]:
  """Returns the folders that may hold a checkpoint's model.json and vocabulary:
  its own and the parent."""
  checkpoint = find(path)
  return checkpoint, checkpoint.parent


def find(path: Path | str) -> Path:
  """Returns the folder of a checkpoint: `path` itself, the folder of the file
  `checkpoint`, or the newest step in `path`. ValueError if none is finished."""
  folder = user_path(path)
  if folder.is_file() and folder.name == legacy.FILE:
    folder = folder.parent
  # Writers rename a folder when it is complete; a killed one leaves this name.
  if '.tmp-' in folder.name or 'orbax-checkpoint-tmp' in folder.name:
    raise ValueError(f'{folder} is an unfinished, temporary checkpoint')
  if _layout(folder):
    return folder
  if not folder.is_dir():
    raise ValueError(f'there is no folder {folder}')
  # The newest by number: checkpoint_1000, not checkpoint_900.
  steps = {
    int(match[1]): child
    for child in folder.iterdir()
    if (match := _STEP.fullmatch(child.name)) and _layout(child)
  }
  if steps:
    return steps[max(steps)]
  raise ValueError(
    f'{folder} has neither a file {legacy.FILE} nor a folder {_STATE}, and no '
    'finished checkpoint_N of T5X'
  )


def _layout(folder: Path) -> Layout | None:
  """Returns which of the two formats is in a folder itself, if any."""
  if (folder / legacy.FILE).is_file():
    return 'legacy'
  return 'orbax' if (folder / _STATE).is_dir() else None
