"""Llama-type models from GGUF files, llama.cpp's format."""

import concurrent.futures
import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array
from specdec_jax.checkpoints import gguf_vocabulary, name_maps
from specdec_jax.checkpoints.gguf_file import (
  GgufFile,
  open_gguf,
  read_tensor,
  require,
)
from specdec_jax.data.vocabularies import Vocabulary
from specdec_jax.models.llama import LlamaConfig

_EMBEDDING = 'token_embd.weight'
_ROPE_FACTORS = 'rope_freqs.weight'


def load_llama(
  path: str | os.PathLike[str], *, dtype: jnp.dtype = jnp.float32
) -> tuple[LlamaConfig, dict[str, Any], Vocabulary]:
  """Reads a model from a GGUF file, dequantised.

  Args:
    path: of a GGUF file whose architecture is `llama`.
    dtype: of the parameters, activations and cache.

  Returns:
    Sizes, parameters for `models.llama.Llama`, and the vocabulary.

  Raises:
    ValueError: if the file is truncated or no GGUF file, if the network in it
      is not the one that `models.llama` computes, or if a weight is missing, of
      another shape, NaN or infinite.
  """
  file = open_gguf(path)
  config = read_config(file, dtype=dtype)
  vocabulary = gguf_vocabulary.read_vocabulary(file)
  return config, read_params(file, config), vocabulary


def read_config(
  file: GgufFile, *, dtype: jnp.dtype = jnp.float32
) -> LlamaConfig:
  """The sizes that a GGUF file's metadata and tensors state.

  Args:
    file: an open file.
    dtype: of the parameters, activations and cache.

  Raises:
    ValueError: if it is not a Llama, or one with features that `models.llama`
      does not compute (experts, scaled rotary positions, a sliding window).
  """
  architecture = file.metadata.get('general.architecture')
  if architecture != 'llama':
    raise ValueError(
      f"{file.path} holds an architecture of {architecture!r}, expected 'llama'"
    )
  embed_dim = _require_count(file, 'llama.embedding_length')
  num_heads = _require_count(file, 'llama.attention.head_count')
  num_kv_heads = num_heads
  if 'llama.attention.head_count_kv' in file.metadata:
    num_kv_heads = _require_count(file, 'llama.attention.head_count_kv')
  head_dim = embed_dim // num_heads
  if 'llama.rope.dimension_count' in file.metadata:
    head_dim = _require_count(file, 'llama.rope.dimension_count')
  num_layers = _require_count(file, 'llama.block_count')
  if num_layers > len(file.tensors):
    raise ValueError(
      f'{file.path} has {len(file.tensors)} tensors, too few for '
      f'{num_layers} layers'
    )
  max_positions = _require_count(file, 'llama.context_length')
  _check_supported(file, embed_dim, num_heads, head_dim, max_positions)
  if _EMBEDDING not in file.tensors:
    raise ValueError(f'{file.path} has no tensor {_EMBEDDING}')
  return LlamaConfig(
    vocab_size=file.tensors[_EMBEDDING].shape[0],
    embed_dim=embed_dim,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_dim=_require_count(file, 'llama.feed_forward_length'),
    rope_base=file.metadata.get('llama.rope.freq_base', 10_000.0),
    norm_epsilon=_shortest_float(
      require(file, 'llama.attention.layer_norm_rms_epsilon')
    ),
    max_positions=max_positions,
    is_tied='output.weight' not in file.tensors,
    has_attention_bias='blk.0.attn_q.bias' in file.tensors,
    dtype=dtype,
  )


def read_params(file: GgufFile, config: LlamaConfig) -> dict[str, Any]:
  """The parameters in a GGUF file, dequantised.

  Args:
    file: an open file.
    config: its sizes; parameters get its dtype.

  Returns:
    The tree of `models.llama.Llama`.

  Raises:
    ValueError: if a tensor is missing, unexpected, of another shape, of a type
      that cannot be dequantised, or not finite.
  """
  parameters = name_maps.llama_parameters(config)
  unexpected = set(file.tensors) - {p.gguf for p in parameters}
  unexpected -= {_ROPE_FACTORS}
  if unexpected:
    raise ValueError(
      f'{file.path} has tensors that a Llama has not: '
      f'{", ".join(sorted(unexpected)[:4])}'
    )
  for parameter in parameters:
    info = file.tensors.get(parameter.gguf)
    if info is None:
      raise ValueError(f'{file.path} has no tensor {parameter.gguf}')
    if info.shape != parameter.file_shape:
      raise ValueError(
        f'{file.path}: tensor {parameter.gguf} is {list(info.shape)}, expected '
        f'{list(parameter.file_shape)}'
      )

  def read(parameter: name_maps.Parameter) -> Array:
    values = read_tensor(file, parameter.gguf)
    if parameter.num_rotary_heads:
      values = split_rotary_halves(values, parameter.num_rotary_heads)
    return name_maps.to_device(values, parameter, config.dtype)

  num_threads = min(8, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    arrays = list(pool.map(read, parameters))
  return name_maps.nest(
    {p.path: array for p, array in zip(parameters, arrays, strict=True)}
  )


def split_rotary_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
  """Undoes the interleaving of llama.cpp's converter.

  Args:
    values: `[heads * D, ...]`; rows 2i and 2i + 1 of a head are a pair.
    num_heads: heads in the first axis.

  Returns:
    `[heads * D, ...]`; rows i and i + D/2 of a head are a pair.
  """
  by_pair = values.reshape(num_heads, -1, 2, *values.shape[1:])
  return by_pair.swapaxes(1, 2).reshape(values.shape)


def interleave_rotary_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
  """The inverse of `split_rotary_halves`, for writing GGUF files."""
  by_half = values.reshape(num_heads, 2, -1, *values.shape[1:])
  return by_half.swapaxes(1, 2).reshape(values.shape)


def _require_count(file: GgufFile, key: str) -> int:
  value = require(file, key)
  if not isinstance(value, int) or value < 1:
    raise ValueError(
      f'{file.path}: {key} is {value!r}, expected one number for all layers'
    )
  return value


def _shortest_float(value: float) -> float:
  """The double that was meant by a stored float32: 1e-5, not 9.99...e-6."""
  return float(str(np.float32(value)))


def _check_supported(
  file: GgufFile,
  embed_dim: int,
  num_heads: int,
  head_dim: int,
  max_positions: int,
) -> None:
  """Refuses what would load and then compute something else."""
  metadata = file.metadata

  def refuse(reason: str) -> None:
    raise ValueError(f'{file.path} is a Llama that is not supported: {reason}')

  if metadata.get('llama.expert_count', 0):
    refuse(f'it has {metadata["llama.expert_count"]} experts')
  scaling = metadata.get('llama.rope.scaling.type', 'none')
  factor = metadata.get(
    'llama.rope.scaling.factor', metadata.get('llama.rope.scale_linear', 1.0)
  )
  if scaling != 'none' or factor not in (0.0, 1.0):
    refuse(f'its rotary positions are scaled ({scaling}, factor {factor})')
  if _ROPE_FACTORS in file.tensors and np.any(
    read_tensor(file, _ROPE_FACTORS) != 1.0
  ):
    refuse(f'its rotary frequencies are scaled (tensor {_ROPE_FACTORS})')
  window = metadata.get('llama.attention.sliding_window')
  if window and window < max_positions:
    refuse(f'its attention slides over {window} of {max_positions} positions')
  for key in ('llama.attention.key_length', 'llama.attention.value_length'):
    if metadata.get(key, head_dim) != head_dim:
      refuse(f'{key} is {metadata[key]}, rotary positions turn {head_dim}')
  if (
    'llama.attention.key_length' not in metadata
    and head_dim * num_heads != embed_dim
  ):
    refuse(
      f'rotary positions turn {head_dim} of a head of {embed_dim // num_heads}'
    )
