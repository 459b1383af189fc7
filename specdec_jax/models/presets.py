"""Model sizes by the names that papers and checkpoints use."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from specdec_jax.models.block_decoder import BlockDecoderConfig
from specdec_jax.models.t5 import T5Config

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

PRESETS: dict[str, T5Config] = {
  **{f't5_1_1_{name}': _t5(*sizes) for name, sizes in _T5_1_1_SIZES.items()},
  **{
    f't5_1_0_{name}': _t5_1_0(*sizes) for name, sizes in _T5_1_0_SIZES.items()
  },
  **{
    f'mt5_{name}': _t5(*sizes, vocab_size=250_112)
    for name, sizes in _T5_1_1_SIZES.items()
  },
  'gpt_97m': _gpt(768, 12, 12, 64, 3072),
  'gpt_6m': _gpt(256, 4, 2, 64, 1024),
  # For training on a laptop: 8,192 pieces, tied embeddings, and drafters that
  # take an eighth of the operations per token.
  't5_mini': _laptop(256, 4, 4, 64, 768, num_encoder_layers=4),
  't5_nano': _laptop(80, 2, 1, 32, 192, num_encoder_layers=2),
  'lm_mini': _laptop(192, 3, 4, 64, 512, num_encoder_layers=0),
  'lm_nano': _laptop(48, 2, 1, 24, 96, num_encoder_layers=0),
}


def preset(name: str, *, dtype: jnp.dtype = jnp.float32) -> T5Config:
  """The sizes of a model in `PRESETS`, with that dtype of activations and
  cache; ValueError if there is none of the name."""
  if name not in PRESETS:
    raise ValueError(
      f'no sizes are called {name!r}; there are {", ".join(PRESETS)}'
    )
  return dataclasses.replace(PRESETS[name], dtype=dtype)


def spec_drafter_of(
  target: T5Config,
  *,
  num_encoder_layers: int,
  num_decoder_layers: int,
  max_positions: int,
) -> BlockDecoderConfig:
  """A Spec-Drafter as wide as a target, whose embeddings and encoder fit."""
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
    PRESETS[target],
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
  if name not in SPEC_DRAFTERS:
    raise ValueError(
      f'no Spec-Drafter is called {name!r}; there are '
      f'{", ".join(SPEC_DRAFTERS)}'
    )
  return dataclasses.replace(SPEC_DRAFTERS[name], dtype=dtype)
