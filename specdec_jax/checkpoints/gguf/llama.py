"""The network in a GGUF file: sizes and parameters, dequantised."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import parameters, settings
from specdec_jax.checkpoints.gguf.container import (
  GgufFile,
  open_gguf,
  read_tensor,
)
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.models.llama import LlamaConfig

_EMBEDDING = 'token_embd.weight'
_ROPE_FACTORS = 'rope_freqs.weight'
# Of our branches; those of layer N are below `blk.N`.
_NAMES = {
  'token_embedder': 'token_embd',
  'decoder_norm': 'output_norm',
  'logits_dense': 'output',
  'pre_self_attention_layer_norm': 'attn_norm',
  'self_attention/query': 'attn_q',
  'self_attention/key': 'attn_k',
  'self_attention/value': 'attn_v',
  'self_attention/out': 'attn_output',
  'pre_mlp_layer_norm': 'ffn_norm',
  'mlp/wi_0': 'ffn_gate',
  'mlp/wi_1': 'ffn_up',
  'mlp/wo': 'ffn_down',
}


def read_config(path: Path, *, dtype: jnp.dtype = jnp.float32) -> LlamaConfig:
  """The sizes that a GGUF file's metadata and tensors state.

  `dtype` is that of the parameters, activations and cache.

  Raises:
    ValueError: if the file is truncated or no GGUF file, if it is not a Llama,
      or one with features that `models.llama` does not compute (experts, scaled
      rotary positions, a sliding window).
  """
  file = open_gguf(path)
  values = Settings(path=file.path, values=file.metadata)
  architecture = values.text('general.architecture')
  if architecture != 'llama':
    raise ValueError(
      f"{file.path} holds an architecture of {architecture!r}, expected 'llama'"
    )
  llama = Settings(
    path=file.path,
    values={
      key.removeprefix('llama.'): value
      for key, value in file.metadata.items()
      if key.startswith('llama.')
    },
    section='llama.',
  )
  embed_dim = llama.count('embedding_length')
  num_heads = llama.count('attention.head_count')
  head_dim = llama.count('rope.dimension_count', embed_dim // num_heads)
  num_layers = llama.count('block_count', most=settings.MAX_LAYERS)
  if num_layers > len(file.tensors):
    raise ValueError(
      f'{file.path} has {len(file.tensors)} tensors, too few for '
      f'{num_layers} layers'
    )
  max_positions = llama.count('context_length')
  epsilon = llama.number('attention.layer_norm_rms_epsilon')
  _check_supported(file, llama, embed_dim, num_heads, head_dim)
  embedding = file.tensors.get(_EMBEDDING)
  if embedding is None:
    raise ValueError(f'{file.path} has no tensor {_EMBEDDING}')
  return llama.build(
    LlamaConfig,
    vocab_size=embedding.shape[0],
    embed_dim=embed_dim,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=llama.count('attention.head_count_kv', num_heads),
    head_dim=head_dim,
    mlp_dim=llama.count('feed_forward_length'),
    rope_base=llama.number('rope.freq_base', 10_000.0),
    # The shortest decimal of a stored float32: 1e-5, not 9.99...e-6.
    norm_epsilon=float(str(np.float32(epsilon))),
    max_positions=max_positions,
    is_tied='output.weight' not in file.tensors,
    has_attention_bias='blk.0.attn_q.bias' in file.tensors,
    dtype=dtype,
  )


def read_params(path: Path, config: LlamaConfig) -> dict[str, Any]:
  """The parameters in a GGUF file, dequantised into the config's dtype.

  Returns:
    The tree of `models.llama.Llama`.

  Raises:
    ValueError: if a tensor is missing, unexpected, of another shape, of a type
      that cannot be dequantised, or not finite.
  """
  if not isinstance(config, LlamaConfig):
    raise ValueError(f'{path} holds a Llama, not the sizes of a {config}')
  file = open_gguf(path)
  wanted = parameters_of(config)
  unexpected = set(file.tensors) - {p.name for p in wanted}
  unexpected -= {_ROPE_FACTORS}
  if unexpected:
    raise ValueError(
      f'{file.path} has tensors that a Llama has not: '
      f'{", ".join(sorted(unexpected)[:4])}'
    )
  for parameter in wanted:
    info = file.tensors.get(parameter.name)
    if info is None:
      raise ValueError(f'{file.path} has no tensor {parameter.name}')
    if info.shape != parameter.file_shape:
      raise ValueError(
        f'{file.path}: tensor {parameter.name} is {list(info.shape)}, expected '
        f'{list(parameter.file_shape)}'
      )

  def read(parameter: Parameter) -> np.ndarray:
    values = read_tensor(file, parameter.name)
    if num_heads := num_rotary_heads(config, parameter):
      values = split_rotary_halves(values, num_heads)
    return values

  return parameters.read_all(read, wanted, config.dtype)


def parameters_of(config: LlamaConfig) -> tuple[Parameter, ...]:
  """Every parameter of a model of these sizes, by its name in a GGUF file."""
  name_of = lambda path: parameters.renamed(path, _NAMES, 'blk.{}')
  return parameters.of(config, name_of)


def num_rotary_heads(config: LlamaConfig, parameter: Parameter) -> int:
  """Heads in a tensor of which GGUF interleaves the halves that rotary
  positions pair; 0 for a tensor without any."""
  heads = {'attn_q': config.num_heads, 'attn_k': config.num_kv_heads}
  return heads.get(parameter.name.split('.')[-2], 0)


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


def _check_supported(
  file: GgufFile, llama: Settings, embed_dim: int, num_heads: int, head_dim: int
) -> None:
  """Raises ValueError for what would load and compute something else."""

  def refuse(reason: str) -> None:
    raise ValueError(f'{file.path} is a Llama that is not supported: {reason}')

  if num_experts := llama.count('expert_count', 0, least=0):
    refuse(f'it has {num_experts} experts')
  scaling = llama.text('rope.scaling.type', 'none')
  factor = llama.number(
    'rope.scaling.factor', llama.number('rope.scale_linear', 1.0)
  )
  if scaling != 'none' or factor not in (0.0, 1.0):
    refuse(f'its rotary positions are scaled ({scaling}, factor {factor})')
  if _ROPE_FACTORS in file.tensors and np.any(
    read_tensor(file, _ROPE_FACTORS) != 1.0
  ):
    refuse(f'its rotary frequencies are scaled (tensor {_ROPE_FACTORS})')
  max_positions = llama.count('context_length')
  window = llama.count('attention.sliding_window', 0, least=0)
  if 0 < window < max_positions:
    refuse(f'its attention slides over {window} of {max_positions} positions')
  for key in ('attention.key_length', 'attention.value_length'):
    size = llama.count(key, head_dim)
    if size != head_dim:
      refuse(f'llama.{key} is {size}, rotary positions turn {head_dim}')
  if (
    not llama.has('attention.key_length') and head_dim * num_heads != embed_dim
  ):
    refuse(
      f'rotary positions turn {head_dim} of a head of {embed_dim // num_heads}'
    )
