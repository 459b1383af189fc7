"""The formats of checkpoints, one row each.

A new format is the file that reads it, a row of `FORMATS`, and its tests.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.checkpoints import (
  gguf,
  huggingface,
  model_file,
  orbax,
  safetensors_folder,
  safetensors_model,
  t5x,
)
from specdec_jax.checkpoints.gguf import container
from specdec_jax.models import families
from specdec_jax.models.families import AnyConfig, Config
from specdec_jax.models.products import Weights
from specdec_jax.text import generation_config, vocabulary_files
from specdec_jax.text.vocabularies import AnyVocabulary

# Lies beside weights that draft only some tokens; see `assembly.models`.
DRAFT_VOCABULARY = 'draft_vocabulary.json'
# From a tree of shapes to one of shardings.
Shardings = Callable[[Weights], Weights]
_ReadIds = Callable[[Path], tuple[int, ...]]
_ReadVocabulary = Callable[[Path, int | None], AnyVocabulary | None]


def _vocabulary_in(places: Callable[[Path], Iterable[Path]]) -> _ReadVocabulary:
  """Reads the vocabulary of the first folder that has one."""
  return lambda path, num_rows: next(
    (
      vocabulary_files.read(folder, num_rows=num_rows)
      for folder in places(path)
      if vocabulary_files.is_in(folder)
    ),
    None,
  )


class Format(NamedTuple):
  """How the checkpoints of one format are recognised, read and written.

  Attributes:
    name: what `specdec convert --to` calls it.
    matches: `(path)` to whether a file or folder is of this format.
    read_config: `(path, dtype=)` to the sizes of the network; of a format that
      does not state them `(path, dtype=, sizes=)`, see `needs_sizes`.
    read_params: `(path, config)` to the parameters, in the config's dtype, or
      with `in_slices` `(path, tree of their shapes)`.
    read_vocabulary: `(path, number of embeddings or None)` to the vocabulary,
      or to None if the checkpoint has none.
    read_eos_ids: `(path)` to the ids that end texts with another vocabulary.
    needs_sizes: whether a user says what the sizes are.
    in_slices: whether a process reads only what its own devices hold.
    write: `(folder, config, params, step)`, into an existing folder, what
      `matches` looks for last. None for a format that is only read.
    files: names of the files that `write` writes; all folders have the first.
    is_part: `(folder)` to whether `write` made a folder within another.
    read_step: `(path)` to the training steps taken; None if it is not stored.
    add_step: `(folder, config, params, step, overwrite=)`, into a folder with
      steps of such a format; None if a folder holds only one.
    read_weights: `(path)` to how the parameters are packed, as
      `quantized.bits_of` reads it; to None where they are whole.
  """

  name: str
  matches: Callable[[Path], bool]
  read_config: Callable[..., AnyConfig]
  read_params: Callable[..., Weights]
  read_vocabulary: _ReadVocabulary = _vocabulary_in(lambda path: (path,))
  read_eos_ids: Callable[[Path], tuple[int, ...]] = (
    generation_config.read_eos_ids
  )
  needs_sizes: bool = False
  in_slices: bool = False
  write: Callable[[Path, AnyConfig, Weights, int], None] | None = None
  files: tuple[str, ...] = ()
  is_part: Callable[[Path], bool] = lambda folder: False
  read_step: Callable[[Path], int] | None = None
  add_step: Callable[..., None] | None = None
  read_weights: Callable[[Path], str | None] = lambda path: None


def find(path: Path) -> Format:
  """Returns the format of a file or folder; ValueError if it is of none."""
  if found := find_if_any(path):
    return found
  safetensors_folder.refuse_adapter(path)
  raise ValueError(
    f'{path} has no {generation_config.CONFIG} of Hugging Face, no finished '
    f'checkpoint_N of T5X and no {model_file.NAME} of ours'
  )


def find_if_any(path: Path) -> Format | None:
  """Returns the format of a file or folder, or None if it is of none."""
  return next((each for each in FORMATS if each.matches(path)), None)


def read_config(
  path: Path,
  dtype: jnp.dtype = jnp.float32,
  sizes: Config | str | None = None,
) -> Any:
  """Returns the sizes of a network; `sizes` is what a user says of them,
  ValueError where files state them."""
  found = find(path)
  if found.needs_sizes:
    return found.read_config(path, dtype=dtype, sizes=sizes)
  if sizes is not None:
    raise ValueError(f'{path} states its own sizes: give no config for it')
  return found.read_config(path, dtype=dtype)


def read_params(
  path: Path, config: AnyConfig, shardings: Shardings | None = None
) -> Weights:
  """Reads the parameters of a network, in the config's dtype or as they were
  packed, onto the devices that `shardings` states for their shapes; raises
  ValueError if they are another network's, or as `Family.check_params`."""
  found = find(path)
  expected: Any = config
  if found.in_slices:
    # The shapes state each slice's device before anything is read.
    expected = model_file.param_shapes(config, found.read_weights(path))
    if shardings is not None:
      expected = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        expected,
        shardings(expected),
      )
  divided = None if found.in_slices else shardings
  # Whole arrays may exceed a device: they are divided on the host, too.
  with on_host() if divided else contextlib.nullcontext():
    params = found.read_params(path, expected)
    try:
      families.of(config).check_params(config, params)
    except ValueError as error:
      raise ValueError(f'{path}: {error}') from error
    return jax.device_put(params, divided(params)) if divided else params


def on_host() -> contextlib.AbstractContextManager[object]:
  """Makes the CPU the default device, unless JAX_PLATFORMS lacks it."""
  with contextlib.suppress(RuntimeError):
    return jax.default_device(jax.local_devices(backend='cpu')[0])
  return contextlib.nullcontext()


def read_whole_params(path: Path, config: AnyConfig) -> Weights:
  """Reads parameters to train, or to train for; ValueError if packed."""
  if weights := find(path).read_weights(path):
    raise ValueError(f'{path} is packed in {weights}: give the whole weights')
  return read_params(path, config)


def parts(path: Path) -> list[Path]:
  """Returns the files of a model's sizes and parameters; ValueError if none."""
  # These files are digested: others beside them may change.
  found = find(path)
  if found.is_part(path):
    return [t5x.find(path)]
  if path.is_file():
    return container.shard_paths(path)
  # Of several steps of T5X one is read.
  step = t5x.find(path).name if found.add_step else None
  names = (*found.files, DRAFT_VOCABULARY, safetensors_folder.INDEX_FILE)
  return [
    child
    for child in path.iterdir()
    if child.name in names
    or child.suffix == '.safetensors'
    or (found.is_part(child) and step in (None, child.name))
  ]


def _without_step(save: Callable[..., None]) -> Callable[..., None]:
  """Writes a model whose format has no place for the training steps taken."""
  return lambda folder, config, params, step: save(folder, config, params)


def _t5x(layout: t5x.Layout) -> Format:
  """T5X's own format, or Orbax's as T5X uses it."""

  def checked(config: AnyConfig) -> AnyConfig:
    if (name := families.of(config).name) != 't5':
      raise ValueError(f'T5X has no {name}: it takes T5s alone')
    return config

  def write(
    folder: Path, config: AnyConfig, params: Weights, step: int
  ) -> None:
    model_file.write(folder, checked(config))
    t5x.write_target(folder, params, step=step, format=layout)

  def add_step(
    folder: Path,
    config: AnyConfig,
    params: Weights,
    step: int,
    *,
    overwrite: bool,
  ) -> None:
    checked(config)
    t5x.write_target(
      folder, params, step=step, format=layout, overwrite=overwrite
    )

  # The functions that read are those of both layouts; only writing differs.
  is_checkpoint = lambda path: t5x.layout_of(path) == layout
  return Format(
    name=f't5x_{layout}',
    matches=is_checkpoint,
    read_config=lambda *args, **sizes: checked(t5x.read_config(*args, **sizes)),
    read_params=t5x.read_target,
    read_vocabulary=_vocabulary_in(t5x.folders),
    needs_sizes=True,
    in_slices=True,
    write=write,
    files=(model_file.NAME,),
    is_part=is_checkpoint,
    read_step=t5x.read_step,
    add_step=add_step,
  )


# In the order in which they are recognised.
FORMATS = (
  Format(
    name='gguf',
    matches=lambda path: path.suffix == '.gguf' and path.is_file(),
    read_config=gguf.read_config,
    read_params=gguf.read_params,
    read_vocabulary=lambda path, num_rows: gguf.read_vocabulary(path),
    read_eos_ids=gguf.read_eos_ids,
  ),
  Format(
    name='orbax',
    matches=orbax.is_checkpoint,
    read_config=model_file.read,
    read_params=orbax.restore,
    in_slices=True,
    write=_without_step(orbax.save),
    files=(model_file.NAME,),
    read_weights=model_file.read_weights,
    is_part=lambda folder: (
      folder.name == orbax.PARAMS and orbax.is_checkpoint(folder.parent)
    ),
  ),
  Format(
    name='safetensors',
    matches=safetensors_model.is_model,
    read_config=model_file.read,
    read_params=safetensors_model.read_params,
    write=_without_step(safetensors_model.save),
    files=(model_file.NAME, safetensors_folder.SINGLE_FILE),
    read_weights=model_file.read_weights,
  ),
  Format(
    name='huggingface',
    matches=lambda path: (path / generation_config.CONFIG).is_file(),
    read_config=huggingface.read_config,
    read_params=huggingface.read_params,
    write=_without_step(huggingface.save),
    files=(generation_config.CONFIG, safetensors_folder.SINGLE_FILE),
  ),
  _t5x('legacy'),
  _t5x('orbax'),
)
