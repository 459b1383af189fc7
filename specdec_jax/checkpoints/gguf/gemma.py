"""Gemma 2 and Gemma 3 in GGUF files.

llama.cpp adds 1 to the scales of norms when it converts a Gemma, and leaves the
halves that rotary positions pair where they are.
"""

from specdec_jax.checkpoints.settings import Json, Settings
from specdec_jax.models.gemma.layers import GemmaConfig

ARCHITECTURES = ('gemma2', 'gemma3')
# Layers of the largest of each, whose scores alone are not divided by the root
# of a head's size. Files do not state it; llama.cpp knows them by this number.
_NUM_LAYERS_27B = {'gemma2': 46, 'gemma3': 62}


def config_of(values: Settings, kind: str, sizes: Json) -> GemmaConfig:
  """The sizes that a file states of its architecture, `kind`, beside those that
  all networks have; raises ValueError for what `models.gemma.decoder` does not
  compute."""
  is_gemma_3, number = kind == 'gemma3', values.number
  base = number('rope.freq_base', 1e6 if is_gemma_3 else 1e4)
  period = 6 if is_gemma_3 else 2
  window = values.count('attention.sliding_window')
  values.expect('attention.sliding_window_pattern', period)
  # Scores are divided by the root of this: of a head's size but in one model.
  scalar = sizes['head_dim']
  if sizes['num_layers'] == _NUM_LAYERS_27B[kind]:
    scalar = sizes['embed_dim'] // sizes['num_heads']
  return values.build(
    GemmaConfig,
    **sizes,
    query_pre_attn_scalar=scalar,
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
