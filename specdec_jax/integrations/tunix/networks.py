"""Converts Tunix's networks to this package's: their configs and their arrays.

Tunix's caches have one index for all rows, so that rows could not advance by
different numbers of tokens; docs/design/entry_points.md has the other reasons.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specdec_jax.base import Array
from specdec_jax.models import families, kv_cache
from specdec_jax.models.families import Config
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.layers import applied
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.models.products import Weights

# Tunix's configurations do not state the length of the context.
_ANY_LENGTH = 2**20
# The RoPE base of some of Tunix's networks, whatever their configuration says.
_USUAL_ROPE_BASE = 1_000_000.0
# The largest difference of the logits of two implementations, in units of their
# standard deviation, by the bytes of the dtype.
_TOLERANCE = {4: 1e-3, 2: 0.2}
_NUM_TOKENS = 32  # For this comparison.


def config_of(model: Any, dtype: jnp.dtype | None = None) -> Config:
  """Returns the config of a Llama 3, Qwen2, Qwen3 without experts, Gemma 2 or
  Gemma 3 of Tunix; `dtype` is that of activations and cache, by default the
  model's.

  Compares the logits of both networks for a few tokens: ValueError unless the
  model is one of these, and its logits are those of this package's network.
  """
  name = type(model).__name__
  if any(isinstance(leaf, nnx.LoRAParam) for _, leaf in nnx.iter_graph(model)):
    raise ValueError(
      f'{name} has LoRA parameters, which speculation does not read: merge '
      'them into the weights, or use the vanilla rollout'
    )
  if not hasattr(model, 'config') or not hasattr(model, 'layers'):
    raise ValueError(f'{name} is no decoder of Tunix')
  distances = [
    (_distance(model, candidate), candidate) for candidate in _candidates(model)
  ]
  if not distances:
    raise ValueError(
      f'{name} is not supported: use Llama 3, Qwen2, Qwen3 without experts, '
      'Gemma 2 or Gemma 3'
    )
  distance, config = min(distances, key=lambda pair: pair[0])
  if not distance <= _TOLERANCE[config.dtype.itemsize]:
    raise ValueError(
      f'{name} has other logits than this package computes, by {distance:.2g} '
      'standard deviations: this version of Tunix is not supported'
    )
  return dataclasses.replace(config, dtype=jnp.dtype(dtype or config.dtype))


def arrays_of(model: Any) -> Weights:
  """Returns a model's parameters under this package's names; those of another
  shape are copied, the others shared with the model."""
  embedder = {'embedding': model.embedder.input_embedding.get_value()}
  params: Weights = {'token_embedder': embedder}
  layer_of = _gemma_layer if _is_gemma(model) else _llama_layer
  for i, layer in enumerate(model.layers):
    params[f'layers_{i}'] = layer_of(layer)
  params['decoder_norm'] = _norm(model.final_norm)
  head = getattr(model, 'lm_head', None)
  if head is not None:
    params['logits_dense'] = {'kernel': head.w.get_value()}
  return params


def _is_gemma(model: Any) -> bool:
  return hasattr(model.layers[0].attn, 'attn_vec_einsum')


def _candidates(model: Any) -> Iterator[Config]:
  """Yields the configs that a model may have, the likeliest first; none for an
  unsupported network."""
  config = model.config
  layer = model.layers[0]
  get = lambda name, default: getattr(config, name, None) or default
  dtype = model.embedder.input_embedding.get_value().dtype
  shared = {
    'embed_dim': config.embed_dim,
    'num_layers': config.num_layers,
    'num_heads': config.num_heads,
    'num_kv_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'mlp_dim': config.hidden_dim,
    'max_positions': _ANY_LENGTH,
    'dtype': jnp.dtype(get('dtype', dtype)),
  }
  if not hasattr(getattr(layer.mlp, 'gate_proj', None), 'kernel'):
    return
  if not _is_gemma(model):
    for base in dict.fromkeys((float(config.rope_theta), _USUAL_ROPE_BASE)):
      yield LlamaConfig(
        **shared,
        vocab_size=config.vocab_size,
        rope_base=base,
        norm_epsilon=config.norm_eps,
        is_tied=not hasattr(model, 'lm_head'),
        has_attention_bias=hasattr(layer.attn, 'q_bias'),
        has_qk_norm=hasattr(layer.attn, 'q_norm'),
      )
    return
  names = 'post_attention_norm', 'post_attn_norm'  # Gemma 3's and Gemma 2's.
  if not any(hasattr(layer, name) for name in names):
    return
  window = get('sliding_window_size', 0)
  layer_types = [layer.attn.attn_type.name for layer in model.layers]
  windows = tuple(
    window if layer_type == 'LOCAL_SLIDING' else 0 for layer_type in layer_types
  )
  # Gemma 2 27B has the second, all others the first; no field states it.
  scales = config.head_dim, config.embed_dim // config.num_heads
  for scale in dict.fromkeys(scales):
    yield GemmaConfig(
      **shared,
      vocab_size=config.num_embed,
      query_pre_attn_scalar=scale,
      windows=windows,
      attention_softcap=float(get('attn_logits_soft_cap', 0.0)),
      logits_softcap=float(get('final_logit_softcap', 0.0)),
      rope_base=float(get('global_base_frequency', 10_000)),
      rope_factor=float(get('global_scale_factor', 1.0)),
      local_rope_base=float(get('local_base_frequency', 10_000)),
      has_qk_norm=hasattr(layer.attn, '_query_norm'),
    )


def _distance(model: Any, config: Config) -> float:
  """Returns the largest difference of the logits of both networks, in standard
  deviations of Tunix's."""
  tokens = np.arange(1, _NUM_TOKENS + 1, dtype=np.int32)[None]
  tokens = tokens * 7 % config.vocab_size
  positions = np.arange(_NUM_TOKENS, dtype=np.int32)[None]
  mask = np.tril(np.ones((1, _NUM_TOKENS, _NUM_TOKENS), bool))
  graphdef, state = nnx.split(model)
  network = families.network(config)
  apply = applied(network.module)

  @jax.jit
  # By default a TPU multiplies float32 in bfloat16, which would add errors.
  @jax.default_matmul_precision('highest')
  def both(state: Any) -> tuple[Array, Array]:
    theirs = nnx.merge(graphdef, state)
    logits, _ = theirs(tokens, positions, None, mask)
    params = jax.tree.map(lambda x: x.astype(config.dtype), arrays_of(theirs))
    cache = kv_cache.init(config, 1, _NUM_TOKENS, network.num_layers)
    x, _ = apply(params, tokens, cache, None, method='extend')
    return logits.astype(jnp.float32), network.project(params, x)

  theirs, ours = map(np.asarray, both(state))
  return float(np.abs(theirs - ours).max() / (theirs.std() + 1e-30))


def _norm(norm: Any) -> Weights:
  scale = norm.scale if hasattr(norm, 'scale') else norm.w
  return {'scale': scale.get_value()}


def _in(kernel: Array) -> Weights:
  """`[D, N, H]` as `[D, N * H]`."""
  return {'kernel': kernel.reshape(kernel.shape[0], -1)}


def _out(kernel: Array) -> Weights:
  """`[N, H, D]` as `[N * H, D]`."""
  return {'kernel': kernel.reshape(-1, kernel.shape[-1])}


def _mlp(mlp: Any) -> Weights:
  names = {'wi_0': mlp.gate_proj, 'wi_1': mlp.up_proj, 'wo': mlp.down_proj}
  return {
    name: {'kernel': layer.kernel.get_value()} for name, layer in names.items()
  }


def _llama_layer(layer: Any) -> Weights:
  attn = layer.attn
  parts = {}
  for name, theirs in (('query', 'q'), ('key', 'k'), ('value', 'v')):
    parts[name] = _in(getattr(attn, f'{theirs}_proj').w.get_value())
    if (bias := getattr(attn, f'{theirs}_bias', None)) is not None:
      parts[name]['bias'] = bias.get_value()
    if (norm := getattr(attn, f'{theirs}_norm', None)) is not None:
      parts[f'{name}_norm'] = _norm(norm)
  return {
    'pre_self_attention_layer_norm': _norm(layer.input_layernorm),
    'self_attention': {**parts, 'out': _out(attn.o_proj.w.get_value())},
    'pre_mlp_layer_norm': _norm(layer.post_attention_layernorm),
    'mlp': _mlp(layer.mlp),
  }


def _gemma_layer(layer: Any) -> Weights:
  attn = layer.attn
  # Kernels are [N, D, H]; with as many heads as key heads they are one array.
  if hasattr(attn, 'qkv_einsum'):
    kernels = list(attn.qkv_einsum.w.get_value())
  else:
    kernels = [attn.q_einsum.w.get_value(), *attn.kv_einsum.w.get_value()]
  parts: Weights = {
    name: _in(kernel.swapaxes(0, 1))
    for name, kernel in zip(('query', 'key', 'value'), kernels, strict=True)
  }
  for name in ('query', 'key'):
    if (norm := getattr(attn, f'_{name}_norm', None)) is not None:
      parts[f'{name}_norm'] = _norm(norm)
  parts['out'] = _out(attn.attn_vec_einsum.w.get_value())
  # Gemma 3's and Gemma 2's names.
  post_norm = getattr(layer, 'post_attention_norm', None)
  post_norm = post_norm or layer.post_attn_norm
  return {
    'pre_self_attention_layer_norm': _norm(layer.pre_attention_norm),
    'self_attention': parts,
    'post_self_attention_layer_norm': _norm(post_norm),
    'pre_mlp_layer_norm': _norm(layer.pre_ffw_norm),
    'mlp': _mlp(layer.mlp),
    'post_mlp_layer_norm': _norm(layer.post_ffw_norm),
  }
