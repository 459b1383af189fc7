"""Parameters of ours under the names that files have for them.

Files store matrices as `[out, in]`; our kernels are `[in, out]`. GGUF also
interleaves the two halves of every query and key head, in which rotary
positions pair dimensions.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import stored_arrays
from specdec_jax.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One parameter and what files call it.

  Attributes:
    path: keys into our tree, outermost first, joined by slashes.
    huggingface: name in a safetensors file.
    shape: in our tree.
    is_transposed: whether files store the transpose.
    gguf: name in a GGUF file, if the network is stored in such files.
    num_rotary_heads: heads that GGUF interleaves in its first axis, or 0.
  """

  path: str
  huggingface: str
  shape: tuple[int, ...]
  is_transposed: bool = False
  gguf: str = ''
  num_rotary_heads: int = 0

  @property
  def file_shape(self) -> tuple[int, ...]:
    """Shape in a file, slowest axis first."""
    return self.shape[::-1] if self.is_transposed else self.shape


# Ours, GGUF's, Hugging Face's, axes in our tree.
_MODEL = (
  ('token_embedder/embedding', 'token_embd', 'model.embed_tokens', 'vocab d'),
  ('decoder_norm/scale', 'output_norm', 'model.norm', 'd'),
  ('logits_dense/kernel', 'output', 'lm_head', 'd vocab'),
)
# Likewise, below `layers_N`, `blk.N` and `model.layers.N`.
_LAYER = (
  ('pre_self_attention_layer_norm/scale', 'attn_norm', 'input_layernorm', 'd'),
  ('pre_mlp_layer_norm/scale', 'ffn_norm', 'post_attention_layernorm', 'd'),
  ('self_attention/query/kernel', 'attn_q', 'self_attn.q_proj', 'd query'),
  ('self_attention/query/bias', 'attn_q', 'self_attn.q_proj', 'query'),
  ('self_attention/key/kernel', 'attn_k', 'self_attn.k_proj', 'd key'),
  ('self_attention/key/bias', 'attn_k', 'self_attn.k_proj', 'key'),
  ('self_attention/value/kernel', 'attn_v', 'self_attn.v_proj', 'd key'),
  ('self_attention/value/bias', 'attn_v', 'self_attn.v_proj', 'key'),
  ('self_attention/out/kernel', 'attn_output', 'self_attn.o_proj', 'query d'),
  ('mlp/wi_0/kernel', 'ffn_gate', 'mlp.gate_proj', 'd mlp'),
  ('mlp/wi_1/kernel', 'ffn_up', 'mlp.up_proj', 'd mlp'),
  ('mlp/wo/kernel', 'ffn_down', 'mlp.down_proj', 'mlp d'),
)


def llama_parameters(config: LlamaConfig) -> tuple[Parameter, ...]:
  """Every parameter that a model of these sizes has."""
  sizes = {
    'vocab': config.vocab_size,
    'd': config.embed_dim,
    'query': config.num_heads * config.head_dim,
    'key': config.num_kv_heads * config.head_dim,
    'mlp': config.mlp_dim,
  }
  rotary_heads = {'attn_q': config.num_heads, 'attn_k': config.num_kv_heads}
  prefixes = [
    (f'layers_{i}/', f'blk.{i}.', f'model.layers.{i}.')
    for i in range(config.num_layers)
  ]
  rows = [(('', '', ''), row) for row in _MODEL]
  rows += [(prefix, row) for prefix in prefixes for row in _LAYER]
  parameters = []
  for prefix, (ours, gguf, huggingface, axes) in rows:
    is_bias = ours.endswith('/bias')
    if (is_bias and not config.has_attention_bias) or (
      ours.startswith('logits_dense') and config.is_tied
    ):
      continue
    suffix = '.bias' if is_bias else '.weight'
    parameters.append(
      Parameter(
        prefix[0] + ours,
        prefix[2] + huggingface + suffix,
        tuple(sizes[axis] for axis in axes.split()),
        is_transposed=ours.endswith('/kernel'),
        gguf=prefix[1] + gguf + suffix,
        num_rotary_heads=rotary_heads.get(gguf, 0),
      )
    )
  return tuple(parameters)


def read_all(
  read: Callable[[Parameter], np.ndarray],
  parameters: Sequence[Parameter],
  dtype: jnp.dtype,
) -> dict[str, Any]:
  """Our tree of the tensors in a file, read and converted in a few threads.

  Args:
    read: a parameter's float32 tensor `[file_shape]`.
    parameters: all of them.
    dtype: of the results.
  """

  def to_device(parameter: Parameter) -> jax.Array:
    values = read(parameter)
    if parameter.is_transposed:
      values = values.T
    return jax.device_put(np.ascontiguousarray(values, dtype))

  num_threads = min(8, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    arrays = list(pool.map(to_device, parameters))
  return stored_arrays.nest(
    {p.path: array for p, array in zip(parameters, arrays, strict=True)}
  )


def is_all_finite(values: np.ndarray) -> bool:
  """Whether a float32 array holds neither NaN nor infinity."""
  with np.errstate(all='ignore'):
    # The sum is finite unless a term is not, or it overflows: then look.
    return bool(np.isfinite(values.sum()) or np.isfinite(values).all())
