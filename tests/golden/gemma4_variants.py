"""Gemma 4s of odd shapes, and the weights that they get in all tests.

`make_gemma4_variants.py` computes their logits. Weights are drawn from their
names, so that no file holds them.
"""

import zlib
from typing import Any

import numpy as np

SLIDING, FULL = 'sliding_attention', 'full_attention'
VOCAB_SIZE = 48
_SIZES = {
  'vocab_size': VOCAB_SIZE,
  'hidden_size': 24,
  'intermediate_size': 32,
  'num_hidden_layers': 5,
  'layer_types': [SLIDING, SLIDING, FULL, SLIDING, FULL],
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'num_global_key_value_heads': 1,
  'attention_k_eq_v': True,
  'head_dim': 8,
  'global_head_dim': 16,
  'max_position_embeddings': 128,
  'sliding_window': 5,
  'hidden_size_per_layer_input': 0,
  'vocab_size_per_layer_input': 0,
  'final_logit_softcapping': 12.0,
}
# As E2B, with embeddings for each layer and layers that share keys.
_SHARED = {
  'num_hidden_layers': 6,
  'layer_types': [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
  'num_key_value_heads': 1,
  'num_global_key_value_heads': None,
  'attention_k_eq_v': False,
  'num_kv_shared_layers': 3,
  'use_double_wide_mlp': True,
  'hidden_size_per_layer_input': 8,
  'vocab_size_per_layer_input': VOCAB_SIZE,
}
_EXPERTS = {
  'enable_moe_block': True,
  'num_experts': 6,
  'top_k_experts': 2,
  'moe_intermediate_size': 8,
}
_PROPORTIONAL = {'rope_type': 'proportional', 'rope_theta': 1e6}


def _rope(**full: Any) -> dict[str, Any]:
  sliding = {'rope_type': 'default', 'rope_theta': 1e4}
  return {'rope_parameters': {FULL: full, SLIDING: sliding}}


_CHANGES: dict[str, dict[str, Any]] = {
  'all layers full': {'layer_types': [FULL] * 5},
  'one full layer': {'layer_types': [*[SLIDING] * 4, FULL]},
  'full at both ends': {'layer_types': [FULL, *[SLIDING] * 3, FULL]},
  'one layer': {'num_hidden_layers': 1, 'layer_types': [FULL]},
  'a window of 1': {'sliding_window': 1},
  # Shorter than the blocks of 4 tokens.
  'a window of 2': {'sliding_window': 2},
  'a window beyond the text': {'sliding_window': 64},
  'values are keys, 2 heads': {'num_global_key_value_heads': 2},
  'values are keys, heads unsaid': {'num_global_key_value_heads': None},
  'values, heads said': {'attention_k_eq_v': False},
  'as many heads of keys as of queries': {
    'num_key_value_heads': 4,
    'num_global_key_value_heads': 4,
  },
  'heads of one size': {'global_head_dim': 8},
  'wide, nothing shared': {'use_double_wide_mlp': True},
  'no bound of logits': {'final_logit_softcapping': None},
  'a bound of 2': {'final_logit_softcapping': 2.0},
  'shared, one embedding': {
    **_SHARED,
    'hidden_size_per_layer_input': 0,
    'vocab_size_per_layer_input': 0,
  },
  'embeddings for layers, nothing shared': {
    **_SHARED,
    'num_kv_shared_layers': 0,
  },
  'shared, of one width, as E4B': {
    **_SHARED,
    'num_key_value_heads': 2,
    'use_double_wide_mlp': False,
  },
  'all but one shared': {
    **_SHARED,
    'layer_types': [FULL] * 6,
    'num_kv_shared_layers': 5,
  },
  'all but one of each type shared': {
    **_SHARED,
    'layer_types': [SLIDING, FULL, FULL, SLIDING, SLIDING, FULL],
    'num_kv_shared_layers': 4,
  },
  'shared, experts': {**_SHARED, **_EXPERTS},
  'one expert of 6': {**_EXPERTS, 'top_k_experts': 1},
  'all experts': {**_EXPERTS, 'top_k_experts': 6},
  'usual positions': _rope(rope_type='default', rope_theta=1e5),
  'positions divided': _rope(
    **_PROPORTIONAL, partial_rotary_factor=0.5, factor=2.0
  ),
  'all frequencies turn': _rope(**_PROPORTIONAL),
}
VARIANTS = {name: _SIZES | change for name, change in _CHANGES.items()}


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Draws a tensor by its name; texts vary, and every part of a layer is
  felt."""
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  values = rng.standard_normal(shape)
  if name.endswith('layer_scalar'):
    values = rng.uniform(0.5, 1.0, shape)
  elif 'norm' in name or name.endswith('scale'):
    values = 1 + 0.3 * values
  elif 'per_layer_input_gate' in name:
    # GELU of large negative numbers is noise, which a norm would amplify.
    values = 0.02 * values
  else:
    values = 0.2 * values
  return values.astype(np.float32)
