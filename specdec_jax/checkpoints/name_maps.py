"""What GGUF and Hugging Face call the parameters of `models.llama.Llama`,
and how they lay them out.

Both store matrices as `[out, in]`; our kernels are `[in, out]`. GGUF also
interleaves the two halves of every query and key head, in which rotary
positions pair dimensions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array
from specdec_jax.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One parameter under its three names.

  Attributes:
    path: keys into our tree, outermost first.
    gguf: name in a GGUF file.
    huggingface: name in a Hugging Face checkpoint.
    shape: in our tree.
    is_transposed: whether files store the transpose.
    num_rotary_heads: heads that GGUF interleaves in its first axis, or 0.
  """

  path: tuple[str, ...]
  gguf: str
  huggingface: str
  shape: tuple[int, ...]
  is_transposed: bool = False
  num_rotary_heads: int = 0

  @property
  def file_shape(self) -> tuple[int, ...]:
    """Shape in a file, slowest axis first."""
    return self.shape[::-1] if self.is_transposed else self.shape


_LAYER_VECTORS = (
  # ours, GGUF's, Hugging Face's
  ('pre_self_attention_layer_norm', 'attn_norm', 'input_layernorm'),
  ('pre_mlp_layer_norm', 'ffn_norm', 'post_attention_layernorm'),
)

_LAYER_KERNELS = (
  # ours, GGUF's, Hugging Face's, size in, size out
  ('self_attention/query', 'attn_q', 'self_attn.q_proj', 'embed', 'query'),
  ('self_attention/key', 'attn_k', 'self_attn.k_proj', 'embed', 'key'),
  ('self_attention/value', 'attn_v', 'self_attn.v_proj', 'embed', 'key'),
  ('self_attention/out', 'attn_output', 'self_attn.o_proj', 'query', 'embed'),
  ('mlp/wi_0', 'ffn_gate', 'mlp.gate_proj', 'embed', 'mlp'),
  ('mlp/wi_1', 'ffn_up', 'mlp.up_proj', 'embed', 'mlp'),
  ('mlp/wo', 'ffn_down', 'mlp.down_proj', 'mlp', 'embed'),
)


def llama_parameters(config: LlamaConfig) -> tuple[Parameter, ...]:
  """Every parameter that a model of these sizes has."""
  vocab_size, embed_dim = config.vocab_size, config.embed_dim
  parameters = [
    Parameter(
      ('token_embedder', 'embedding'),
      'token_embd.weight',
      'model.embed_tokens.weight',
      (vocab_size, embed_dim),
    ),
    Parameter(
      ('decoder_norm', 'scale'),
      'output_norm.weight',
      'model.norm.weight',
      (embed_dim,),
    ),
  ]
  if not config.is_tied:
    parameters.append(
      Parameter(
        ('logits_dense', 'kernel'),
        'output.weight',
        'lm_head.weight',
        (embed_dim, vocab_size),
        is_transposed=True,
      )
    )
  for i in range(config.num_layers):
    parameters.extend(_layer_parameters(config, i))
  return tuple(parameters)


def _layer_parameters(config: LlamaConfig, layer: int) -> list[Parameter]:
  sizes = {
    'embed': config.embed_dim,
    'query': config.num_heads * config.head_dim,
    'key': config.num_kv_heads * config.head_dim,
    'mlp': config.mlp_dim,
  }
  rotary_heads = {'attn_q': config.num_heads, 'attn_k': config.num_kv_heads}
  parameters = []
  for ours, gguf, huggingface in _LAYER_VECTORS:
    parameters.append(
      Parameter(
        (f'layers_{layer}', ours, 'scale'),
        f'blk.{layer}.{gguf}.weight',
        f'model.layers.{layer}.{huggingface}.weight',
        (config.embed_dim,),
      )
    )
  for ours, gguf, huggingface, size_in, size_out in _LAYER_KERNELS:
    path = (f'layers_{layer}', *ours.split('/'))
    gguf_name = f'blk.{layer}.{gguf}'
    huggingface_name = f'model.layers.{layer}.{huggingface}'
    parameters.append(
      Parameter(
        (*path, 'kernel'),
        f'{gguf_name}.weight',
        f'{huggingface_name}.weight',
        (sizes[size_in], sizes[size_out]),
        is_transposed=True,
        num_rotary_heads=rotary_heads.get(gguf, 0),
      )
    )
    if config.has_attention_bias and gguf in ('attn_q', 'attn_k', 'attn_v'):
      parameters.append(
        Parameter(
          (*path, 'bias'),
          f'{gguf_name}.bias',
          f'{huggingface_name}.bias',
          (sizes[size_out],),
          num_rotary_heads=rotary_heads.get(gguf, 0),
        )
      )
  return parameters


def nest(leaves: dict[tuple[str, ...], Any]) -> dict[str, Any]:
  """A tree of dicts from leaves by path."""
  tree: dict[str, Any] = {}
  for path, leaf in leaves.items():
    branch = tree
    for key in path[:-1]:
      branch = branch.setdefault(key, {})
    branch[path[-1]] = leaf
  return tree


def leaf_at(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
  """The leaf of a tree of dicts at a path.

  Raises:
    ValueError: if there is none, with the path.
  """
  branch: Any = tree
  for key in path:
    if key not in branch:
      raise ValueError(f'the parameters have no {"/".join(path)}')
    branch = branch[key]
  return branch


def to_device(
  values: np.ndarray, parameter: Parameter, dtype: jnp.dtype
) -> Array:
  """A tensor `[file_shape]` of a file as our parameter `[shape]`."""
  if parameter.is_transposed:
    values = values.T
  return jax.device_put(np.ascontiguousarray(values, dtype))


def is_all_finite(values: np.ndarray) -> bool:
  """Whether a float32 array holds neither NaN nor infinity."""
  with np.errstate(all='ignore'):
    # The sum is finite unless a term is not, or it overflows: then look.
    return bool(np.isfinite(values.sum()) or np.isfinite(values).all())
