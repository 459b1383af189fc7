"""A folder with config.json and safetensors, of any network that is known."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.checkpoints import safetensors_folder, settings
from specdec_jax.checkpoints.huggingface import llama, t5
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.models import families
from specdec_jax.models.families import Config, DrafterConfig

CONFIG = 'config.json'


class _Network(NamedTuple):
  """What Hugging Face calls a network of ours, and how it stores it.

  Attributes:
    model_types: values of `model_type` in config.json.
    read_config: `(config.json, dtype)` to the sizes.
    read_params: `(folder, sizes)` to the tree of parameters.
    parameters: `(sizes)` to every parameter under both names.
    config_json: `(sizes, name of the dtype)` to what config.json states.
  """

  model_types: tuple[str, ...]
  read_config: Callable[[Settings, Any], Config]
  read_params: Callable[[str | os.PathLike[str], Any], dict[str, Any]]
  parameters: Callable[[Any], tuple[Parameter, ...]]
  config_json: Callable[[Any, str], dict[str, Any]]


# By the names that model.json has for them.
_NETWORKS = {
  'llama': _Network(
    model_types=llama.MODEL_TYPES,
    read_config=llama.read_config,
    read_params=llama.read_params,
    parameters=llama.parameters_of,
    config_json=llama.config_json,
  ),
  't5': _Network(
    model_types=t5.MODEL_TYPES,
    read_config=t5.read_config,
    read_params=t5.read_params,
    parameters=t5.parameters_of,
    config_json=t5.config_json,
  ),
}


def is_folder(path: str | os.PathLike[str]) -> bool:
  """Whether a path is a folder with config.json."""
  return (Path(path) / CONFIG).is_file()


def read_config(
  folder: str | os.PathLike[str], *, dtype: jnp.dtype = jnp.float32
) -> Config:
  """The sizes that a folder's config.json states.

  Args:
    folder: with config.json.
    dtype: of the parameters, activations and cache.

  Raises:
    ValueError: if config.json is missing or broken, describes a network that
      `models.llama` and `models.t5` do not compute, or its weights are
      quantised.
  """
  values = settings.read(Path(folder) / CONFIG)
  kind = values.text('model_type')
  known = [(n, each) for n in _NETWORKS.values() for each in n.model_types]
  network = next((n for n, each in known if each == kind), None)
  if network is None:
    raise ValueError(
      f'{values.path} describes a model of type {kind!r}; supported are '
      f'{", ".join(each for _, each in known)}'
    )
  for key in ('quantization_config', 'compression_config'):
    if values.has(key):
      raise ValueError(
        f'{values.path} describes a {kind} not supported: its weights are '
        f'quantised ({key})'
      )
  return network.read_config(values, dtype)


def read_params(
  folder: str | os.PathLike[str], config: Config
) -> dict[str, Any]:
  """The parameters in a folder's safetensors, of one file or several.

  Args:
    folder: with model.safetensors, or model.safetensors.index.json and the
      files that it names.
    config: their sizes; parameters get its dtype.

  Returns:
    The tree of `models.llama.Llama` or `models.t5.T5`.

  Raises:
    ValueError: if a file or a tensor is missing, or a tensor is unexpected, of
      another shape, not floating point, or not finite.
  """
  return _network_of(config).read_params(folder, config)


def save(
  folder: str | os.PathLike[str],
  config: Config | DrafterConfig,
  params: dict[str, Any],
) -> None:
  """Writes a folder that this module and transformers read.

  Args:
    folder: made if it does not exist; files in it are overwritten.
    config: sizes.
    params: the tree of `models.llama.Llama` or `models.t5.T5`; tensors keep its
      dtype.

  Raises:
    ValueError: if a parameter is missing or of another shape, or the network
      is one that transformers does not compute.
  """
  network = _network_of(config)
  parameters = network.parameters(config)
  dtype = safetensors_folder.write_params(folder, params, parameters)
  values = network.config_json(config, dtype)
  (Path(folder) / CONFIG).write_text(
    json.dumps(values, indent=2) + '\n', encoding='utf-8'
  )


def _network_of(config: Config | DrafterConfig) -> _Network:
  network = _NETWORKS.get(families.of(config).name)
  if network is None:
    raise ValueError('Hugging Face has no network that only drafts')
  return network
