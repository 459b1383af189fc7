"""Gemma 2 and Gemma 3 in GGUF files.

llama.cpp adds 1 to the scales of norms when it converts a Gemma, and leaves the
halves that rotary positions pair where they are.
"""

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import settings
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.models.gemma.layers import GemmaConfig

ARCHITECTURES = ('gemma2', 'gemma3')
# Layers of the largest of each, whose scores alone are not divided by the root
# of a head's size. Files do not state it; llama.cpp knows them by this number.
_NUM_LAYERS_27B = {'gemma2': 46, 'gemma3': 62}


def read_config(
  values: Settings, kind: str, vocab_size: int, dtype: jnp.dtype
) -> GemmaConfig:
  """The sizes that a file states of its architecture, `kind`; raises ValueError
  for what `models.gemma.decoder` does not compute."""
  is_gemma_3 = kind == 'gemma3'
  count, number = values.count, values.number
  num_layers = count('block_count', most=settings.MAX_LAYERS)
  embed_dim, num_heads = (
    count('embedding_length'),
    count('attention.head_count'),
  )
  head_dim = count('attention.key_length')
  values.expect('attention.causal', True)
  for name in ('attention.value_length', 'rope.dimension_count'):
    values.expect(name, head_dim, ', the length of a key')
  base = number('rope.freq_base', 1e6 if is_gemma_3 else 1e4)
  period, window = 6 if is_gemma_3 else 2, count('attention.sliding_window')
  values.expect('attention.sliding_window_pattern', period)
  is_27b = num_layers == _NUM_LAYERS_27B[kind]
  return values.build(
    GemmaConfig,
    vocab_size=vocab_size,
    embed_dim=embed_dim,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=count('attention.head_count_kv', num_heads),
    head_dim=head_dim,
    mlp_dim=count('feed_forward_length'),
    query_pre_attn_scalar=embed_dim // num_heads if is_27b else head_dim,
    windows=(*(window,) * (period - 1), 0),
    attention_softcap=(
      0.0 if is_gemma_3 else number('attn_logit_softcapping', 50.0)
    ),
    logits_softcap=number(
      'final_logit_softcapping', 0.0 if is_gemma_3 else 30.0
    ),
    rope_base=base,
    rope_factor=_rope_factor(values, kind),
    local_rope_base=number('rope.freq_base_swa', 1e4) if is_gemma_3 else base,
    has_qk_norm=is_gemma_3,
    # The shortest decimal of a stored float32: 1e-6, not 9.99...e-7.
    norm_epsilon=float(
      str(np.float32(number('attention.layer_norm_rms_epsilon')))
    ),
    max_positions=count('context_length'),
    dtype=dtype,
  )


def _rope_factor(values: Settings, kind: str) -> float:
  """By what positions of layers without a window are divided."""
  key = 'rope.scaling.type'
  scaling = values.text(key, 'none')
  if scaling == 'none':
    return 1.0
  if scaling != 'linear' or kind == 'gemma2':
    values.refuse(key, 'none' if kind == 'gemma2' else 'none or linear')
  return values.number('rope.scaling.factor')
