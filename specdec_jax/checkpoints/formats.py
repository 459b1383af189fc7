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

# The file next to the weights of a drafter with a reduced vocabulary; see
# `assembly.models`.
DRAFT_VOCABULARY = 'draft_vocabulary.json'
# From a tree of shapes to one of shardings.
Shardings = Callable[[Weights], Weights]
_ReadIds = Callable[[Path], tuple[int, ...]]
_ReadVocabulary = Callable[[Path, int | None], AnyVocabulary | None]


def _vocabulary_in(
  folders_of: Callable[[Path], Iterable[Path]],
) -> _ReadVocabulary:
  """Returns a reader of the vocabulary in the first folder that has one."""

  def read(path: Path, num_rows: int | None) -> AnyVocabulary | None:
    for folder in folders_of(path):
      if vocabulary_files.is_in(folder):
        return vocabulary_files.read(folder, num_rows=num_rows)
    return None

  return read


class Format(NamedTuple):
  """How the checkpoints of one format are recognised, read and written.

  Attributes:
    name: the format's name in `specdec convert --to`.
    matches: `(path)` to whether a file or folder is of this format.
    read_config: `(path, dtype=)` to the network's config; for a format that
      does not store it, `(path, dtype=, sizes=)`, see `needs_sizes`.
    read_params: `(path, config)` to the parameters in the config's dtype; with
      `in_slices`, `(path, tree of their shapes)`.
    read_vocabulary: `(path, number of embeddings or None)` to the vocabulary,
      or to None if the checkpoint has none.
    read_eos_ids: `(path)` to the EOS ids that the checkpoint states; used when
      it is loaded with another vocabulary.
    needs_sizes: whether the user has to pass the sizes.
    in_slices: whether each process reads only the slices of its own devices.
    write: `(folder, config, params, step)`, writes into an existing folder; the
      file that `matches` looks for comes last. None for a read-only format.
    files: names of the files that `write` writes; the first is in every folder.
    is_part: `(folder)` to whether it is a subfolder that `write` creates.
    read_step: `(path)` to the number of training steps; None if the format does
      not store it.
    add_step: `(folder, config, params, step, overwrite=)`, adds a step to a
      folder of steps; None if a folder holds a single checkpoint.
    read_weights: `(path)` to the quantization, as `quantized.bits_of` reads it;
      None for unquantized parameters.
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
  """Returns the format of a file or folder; ValueError if there is none."""
  checkpoint_format = find_if_any(path)
  if checkpoint_format is not None:
    return checkpoint_format
  safetensors_folder.refuse_adapter(path)
  raise ValueError(
    f'{path} has no {generation_config.CONFIG} of Hugging Face, no finished '
    f'checkpoint_N of T5X and no {model_file.NAME} of ours'
  )


def find_if_any(path: Path) -> Format | None:
  """Returns the format of a file or folder, or None."""
  matching = (format for format in FORMATS if format.matches(path))
  return next(matching, None)


def read_config(
  path: Path,
  dtype: jnp.dtype = jnp.float32,
  sizes: Config | str | None = None,
) -> Any:
  """Returns the config of a network. `sizes` are the user's, for a format that
  does not store them; ValueError if the files state them."""
  checkpoint_format = find(path)
  if checkpoint_format.needs_sizes:
    return checkpoint_format.read_config(path, dtype=dtype, sizes=sizes)
  if sizes is not None:
    raise ValueError(f'{path} states its sizes: pass no config for it')
  return checkpoint_format.read_config(path, dtype=dtype)


def read_params(
  path: Path, config: AnyConfig, shardings: Shardings | None = None
) -> Weights:
  """Reads the parameters of a network, in the config's dtype or quantized as
  stored, onto the devices of `shardings`. Raises ValueError if they do not fit
  the config, or as `Family.check_params` does."""
  checkpoint_format = find(path)
  expected: Any = config
  if checkpoint_format.in_slices:
    # The shapes state each slice's device before anything is read.
    expected = model_file.param_shapes(
      config, checkpoint_format.read_weights(path)
    )
    if shardings is not None:
      expected = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        expected,
        shardings(expected),
      )
  divided = None if checkpoint_format.in_slices else shardings
  # An unsharded array may exceed one device: it is read, and then divided, on
  # the host.
  with on_host() if divided else contextlib.nullcontext():
    params = checkpoint_format.read_params(path, expected)
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
  """Reads the unquantized parameters of a model in training, or of the target
  that a drafter is trained for; ValueError if they are quantized."""
  if weights := find(path).read_weights(path):
    raise ValueError(
      f'{path} is quantized to {weights}: pass the unquantized weights'
    )
  return read_params(path, config)


def parts(path: Path) -> list[Path]:
  """Returns the files with a model's config and parameters; ValueError if
  there are none."""
  # A digest is taken of these files; others in the folder may change.
  checkpoint_format = find(path)
  if checkpoint_format.is_part(path):
    return [t5x.find(path)]
  if path.is_file():
    return container.shard_paths(path)
  # A folder of T5X may hold several steps, of which one is read.
  step = t5x.find(path).name if checkpoint_format.add_step else None
  names = (
    *checkpoint_format.files,
    DRAFT_VOCABULARY,
    safetensors_folder.INDEX_FILE,
  )
  return [
    child
    for child in path.iterdir()
    if child.name in names
    or child.suffix == '.safetensors'
    or (checkpoint_format.is_part(child) and step in (None, child.name))
  ]


def _without_step(save: Callable[..., None]) -> Callable[..., None]:
  """Adapts the writer of a format that does not store the training step."""
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
