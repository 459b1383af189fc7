"""Sizes of the published Gemmas by name; `models.presets` has them, too."""

from typing import Any

from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.gemma.t5gemma import T5GemmaConfig

# Layers, width, feed-forward, query heads, key-value heads, size of a head.
_STACK = (
  *('num_layers', 'embed_dim', 'mlp_dim'),
  *('num_heads', 'num_kv_heads', 'head_dim'),
)


def _stack(*sizes: int) -> dict[str, Any]:
  return dict(zip(_STACK, sizes, strict=True))


def _gemma_2(*sizes: int, scalar: int = 256) -> GemmaConfig:
  return GemmaConfig(
    **_stack(*sizes),
    vocab_size=_GEMMA_2_VOCAB_SIZE,
    query_pre_attn_scalar=scalar,
    windows=(4096, 0),
    attention_softcap=50.0,
    logits_softcap=30.0,
  )


def _gemma_3(
  *sizes: int, window: int, is_large: bool = True, scalar: int = 256
) -> GemmaConfig:
  """The large ones were trained to see images, too, and stretch positions."""
  return GemmaConfig(
    **_stack(*sizes),
    vocab_size=262_208 if is_large else 262_144,
    query_pre_attn_scalar=scalar,
    windows=(window,) * 5 + (0,),  # Five layers of six.
    rope_base=1e6,
    rope_factor=8.0 if is_large else 1.0,
    has_qk_norm=True,
    max_positions=131_072 if is_large else 32_768,
  )


def _t5gemma(encoder: dict[str, Any], decoder: dict[str, Any]) -> T5GemmaConfig:
  of_each = ('embed_dim', 'mlp_dim', 'num_heads', 'num_kv_heads')
  # The sizes of heads are the same in both stacks, also of 9b-2b.
  return T5GemmaConfig(
    vocab_size=_GEMMA_2_VOCAB_SIZE,
    num_encoder_layers=encoder['num_layers'],
    num_decoder_layers=decoder['num_layers'],
    **{f'encoder_{name}': encoder[name] for name in of_each},
    **{name: decoder[name] for name in of_each},
    head_dim=decoder['head_dim'],
    query_pre_attn_scalar=decoder['head_dim'],
  )


_GEMMA_2_VOCAB_SIZE = 256_000
_GEMMA_2_SIZES = {
  '2b': (26, 2304, 9216, 8, 4, 256),
  '9b': (42, 3584, 14_336, 16, 8, 256),
}
_T5GEMMA_SIZES = {
  name: _stack(*sizes)
  for name, sizes in (
    ('s', (8, 512, 1024, 8, 8, 64)),
    ('b', (12, 768, 2048, 12, 12, 64)),
    ('l', (24, 1024, 2816, 16, 16, 64)),
    ('ml', (26, 1152, 6912, 4, 4, 256)),
    ('xl', (24, 2048, 5120, 32, 32, 64)),
    *_GEMMA_2_SIZES.items(),
  )
}

SIZES: dict[str, GemmaConfig | T5GemmaConfig] = {
  **{
    f't5gemma_{name}': _t5gemma(sizes, sizes)
    for name, sizes in _T5GEMMA_SIZES.items()
  },
  't5gemma_9b_2b': _t5gemma(_T5GEMMA_SIZES['9b'], _T5GEMMA_SIZES['2b']),
  **{
    f'gemma2_{name}': _gemma_2(*sizes) for name, sizes in _GEMMA_2_SIZES.items()
  },
  'gemma2_27b': _gemma_2(46, 4608, 36_864, 32, 16, 128, scalar=144),
  'gemma3_270m': _gemma_3(18, 640, 2048, 4, 1, 256, window=512, is_large=False),
  'gemma3_1b': _gemma_3(26, 1152, 6912, 4, 1, 256, window=512, is_large=False),
  'gemma3_4b': _gemma_3(34, 2560, 10_240, 8, 4, 256, window=1024),
  'gemma3_12b': _gemma_3(48, 3840, 15_360, 16, 8, 256, window=1024),
  'gemma3_27b': _gemma_3(
    62, 5376, 21_504, 32, 16, 128, window=1024, scalar=168
  ),
}
