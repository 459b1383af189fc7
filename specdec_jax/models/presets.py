"""Model sizes by the names that papers and checkpoints use."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp

from specdec_jax.models.block_decoder import BlockDecoderConfig
from specdec_jax.models.eagle import EagleConfig
from specdec_jax.models.families import Config
from specdec_jax.models.gemma import sizes as gemma
from specdec_jax.models.llama import LlamaConfig, RopeScaling
from specdec_jax.models.t5 import T5Config

_Sizes = TypeVar('_Sizes')
# Dtypes of weights, activations and caches.
DTYPES = ('float32', 'bfloat16')

# 32,100 pieces, padded to a multiple of 128 as T5X's checkpoints are.
_T5_VOCAB_SIZE = 32_128


def _t5(
  embed_dim: int,
  num_heads: int,
  num_layers: int,
  head_dim: int,
  mlp_dim: int,
  **others: Any,
) -> T5Config:
  defaults = {'vocab_size': _T5_VOCAB_SIZE, 'num_encoder_layers': num_layers}
  return T5Config(
    embed_dim=embed_dim,
    num_decoder_layers=num_layers,
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    **defaults | others,
  )


_T5_1_1_SIZES = {
  'small': (512, 6, 8, 64, 1024),
  'base': (768, 12, 12, 64, 2048),
  'large': (1024, 16, 24, 64, 2816),
  'xl': (2048, 32, 24, 64, 5120),
  'xxl': (4096, 64, 24, 64, 10_240),
}
_T5_1_0_SIZES = {
  'small': (512, 8, 6, 64, 2048),
  'base': (768, 12, 12, 64, 3072),
  'large': (1024, 16, 24, 64, 4096),
  '3b': (1024, 32, 24, 128, 16_384),
  '11b': (1024, 128, 24, 128, 65_536),
}


_t5_1_0 = functools.partial(_t5, is_tied=True, mlp_activations=('relu',))
# The decoder-only models of Leviathan et al., Sec. 4.1: GELU, no gate, and
# BERT's 30,522 tokens, padded.
_gpt = functools.partial(
  _t5, num_encoder_layers=0, vocab_size=30_592, mlp_activations=('gelu',)
)
_laptop = functools.partial(_t5, vocab_size=8_192, is_tied=True)


def _llama(
  embed_dim: int,
  num_layers: int,
  num_heads: int,
  num_kv_heads: int,
  mlp_dim: int,
  **others: Any,
) -> LlamaConfig:
  return LlamaConfig(
    embed_dim=embed_dim,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    mlp_dim=mlp_dim,
    **{'head_dim': embed_dim // num_heads} | others,
  )


_llama_3 = functools.partial(
  _llama, vocab_size=128_256, rope_base=500_000.0, max_positions=131_072
)
_llama_3_1 = functools.partial(_llama_3, rope_scaling=RopeScaling(factor=8.0))
_llama_3_2 = functools.partial(
  _llama_3, rope_scaling=RopeScaling(factor=32.0), is_tied=True
)
_smollm2 = functools.partial(
  _llama,
  vocab_size=49_152,
  rope_base=100_000.0,
  max_positions=8192,
  is_tied=True,
)
_mistral_7b = functools.partial(
  _llama, 4096, 32, 32, 8, 14_336, max_positions=32_768
)
# Logits of the sizes from 7B on are padded further.
_qwen2_5 = functools.partial(
  _llama,
  vocab_size=152_064,
  rope_base=1e6,
  norm_epsilon=1e-6,
  max_positions=131_072,
  has_attention_bias=True,
)
_qwen2_5_small = functools.partial(_qwen2_5, vocab_size=151_936, is_tied=True)
_qwen3 = functools.partial(
  _llama,
  vocab_size=151_936,
  head_dim=128,
  rope_base=1e6,
  norm_epsilon=1e-6,
  max_positions=40_960,
  has_qk_norm=True,
)

# T5 1.1's sizes, with the vocabularies of the models that have them.
_GATED_T5S: dict[str, T5Config] = {
  f'{model}_{name}': _t5(*sizes, vocab_size=vocab_size)
  for model, vocab_size in (
    ('t5_1_1', _T5_VOCAB_SIZE),
    ('mt5', 250_112),
    ('umt5', 256_384),
  )
  for name, sizes in _T5_1_1_SIZES.items()
}
# As T5X's examples/scalable_t5 trains them, umT5 among them.
_SCALABLE_T5S: dict[str, T5Config] = {
  name if 'umt5' in name else f'scalable_{name}': dataclasses.replace(
    config, has_layer_relpos=True
  )
  for name, config in _GATED_T5S.items()
}
_T5S: dict[str, T5Config] = {
  **{
    f't5_1_0_{name}': _t5_1_0(*sizes) for name, sizes in _T5_1_0_SIZES.items()
  },
  **_GATED_T5S,
  **_SCALABLE_T5S,
  'madlad400_3b': _t5(1024, 16, 32, 128, 8192, vocab_size=256_000),
  'gpt_97m': _gpt(768, 12, 12, 64, 3072),
  'gpt_6m': _gpt(256, 4, 2, 64, 1024),
  # For training on a laptop: 8,192 pieces, tied embeddings, and drafters that
  # take an eighth of the operations per token.
  't5_mini': _laptop(256, 4, 4, 64, 768, num_encoder_layers=4),
  't5_nano': _laptop(80, 2, 1, 32, 192, num_encoder_layers=2),
  'lm_mini': _laptop(192, 3, 4, 64, 512, num_encoder_layers=0),
  'lm_nano': _laptop(48, 2, 1, 24, 96, num_encoder_layers=0),
}
_LLAMAS: dict[str, LlamaConfig] = {
  'llama_3_1_8b': _llama_3_1(4096, 32, 32, 8, 14_336),
  'llama_3_1_70b': _llama_3_1(8192, 80, 64, 8, 28_672),
  'llama_3_2_1b': _llama_3_2(2048, 16, 32, 8, 8192),
  'llama_3_2_3b': _llama_3_2(3072, 28, 24, 8, 8192),
  'smollm2_135m': _smollm2(576, 30, 9, 3, 1536),
  'smollm2_360m': _smollm2(960, 32, 15, 5, 2560),
  'mistral_7b_v0_1': _mistral_7b(vocab_size=32_000, windows=(4096,)),
  'mistral_7b_v0_3': _mistral_7b(vocab_size=32_768, rope_base=1e6),
  'qwen2_5_0_5b': _qwen2_5_small(896, 24, 14, 2, 4864, max_positions=32_768),
  'qwen2_5_1_5b': _qwen2_5_small(1536, 28, 12, 2, 8960),
  'qwen2_5_3b': _qwen2_5_small(2048, 36, 16, 2, 11_008, max_positions=32_768),
  'qwen2_5_7b': _qwen2_5(3584, 28, 28, 4, 18_944),
  'qwen2_5_14b': _qwen2_5(5120, 48, 40, 8, 13_824),
  'qwen2_5_32b': _qwen2_5(5120, 64, 40, 8, 27_648),
  'qwen2_5_72b': _qwen2_5(8192, 80, 64, 8, 29_568),
  'qwen3_0_6b': _qwen3(1024, 28, 16, 8, 3072, is_tied=True),
  'qwen3_1_7b': _qwen3(2048, 28, 16, 8, 6144, is_tied=True),
  'qwen3_4b': _qwen3(2560, 36, 32, 8, 9728, is_tied=True),
  'qwen3_8b': _qwen3(4096, 36, 32, 8, 12_288),
  'qwen3_14b': _qwen3(5120, 40, 40, 8, 17_408),
  'qwen3_32b': _qwen3(5120, 64, 64, 8, 25_600),
}
PRESETS: dict[str, Config] = {**_T5S, **_LLAMAS, **gemma.SIZES}


def preset(name: str, *, dtype: jnp.dtype = jnp.float32) -> Config:
  """The sizes of a model in `PRESETS`, with that dtype of activations and
  cache; ValueError if there is none of the name."""
  return dataclasses.replace(_named(name, PRESETS), dtype=dtype)


def _named(name: str, known: Mapping[str, _Sizes]) -> _Sizes:
  if name not in known:
    names = ', '.join(known)
    raise ValueError(f'no sizes are called {name!r}; there are {names}')
  return known[name]


def spec_drafter_of(
  target: T5Config,
  *,
  num_encoder_layers: int,
  num_decoder_layers: int,
  max_positions: int,
) -> BlockDecoderConfig:
  """A Spec-Drafter as wide as a target, whose embeddings and encoder fit."""
  # Width, heads and vocabulary are the target's.
  own: dict[str, Any] = {
    'num_encoder_layers': num_encoder_layers,
    'num_decoder_layers': num_decoder_layers,
    'max_positions': max_positions,
    'dropout_rate': 0.0,
  }
  names = {field.name for field in dataclasses.fields(BlockDecoderConfig)}
  shared = {name: getattr(target, name) for name in names - own.keys()}
  return BlockDecoderConfig(**shared, **own)


SPEC_DRAFTERS: dict[str, BlockDecoderConfig] = {
  name: spec_drafter_of(
    _T5S[target],
    num_encoder_layers=encoder,
    num_decoder_layers=decoder,
    max_positions=max_positions,
  )
  for name, target, encoder, decoder, max_positions in (
    # T5 1.0 small has the sizes of Transformer-base, the targets of Xia et al.,
    # whose paper has 12 and 2 layers; 6 and 6 were released.
    ('xia_12_2', 't5_1_0_small', 12, 2, 512),
    ('xia_6_6', 't5_1_0_small', 6, 6, 512),
    ('mini_2_1', 't5_mini', 2, 1, 256),
    ('mini_2_2', 't5_mini', 2, 2, 256),
    ('mini_1_1', 't5_mini', 1, 1, 256),  # Deliberately weak.
  )
}


def spec_drafter(
  name: str, *, dtype: jnp.dtype = jnp.float32
) -> BlockDecoderConfig:
  """The sizes of one of `SPEC_DRAFTERS`, with that dtype of activations;
  ValueError if there is none of the name."""
  return dataclasses.replace(_named(name, SPEC_DRAFTERS), dtype=dtype)


# Tokens that EAGLE-3 networks of these sizes can draft; all else is that of a
# layer of their target.
EAGLES = {
  'eagle3_4k': 4096,
  'eagle3_8k': 8192,
  'eagle3_16k': 16_384,
  'eagle3_32k': 32_768,
}


def eagle(name: str, target: Config, *, dtype: jnp.dtype) -> EagleConfig:
  """The sizes of one of `EAGLES` for a target, with that dtype of activations
  and cache; ValueError if there is none of the name."""
  num_drafted = min(_named(name, EAGLES), target.vocab_size)
  # Heads, feed-forward and positions are those of a layer of the target.
  fields = {field.name for field in dataclasses.fields(EagleConfig)}
  sizes: dict[str, Any] = {
    field: value for field, value in vars(target).items() if field in fields
  }
  own = {
    'target_embed_dim': target.embed_dim,
    'draft_vocab_size': num_drafted,
    'fc_norm': True,
    'norm_before_next': True,
    'dtype': dtype,
  }
  # A T5 has no number of key-value heads: every head has its own.
  return EagleConfig(**{'num_kv_heads': target.num_heads} | sizes | own)
