"""Every language model, a row each: the contract is checked for all of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import families, quantized
from specdec_jax.models.quantized import Bits
from tests import slow, toy, toy_gemma, toy_t5

VOCAB_SIZE = 7
CAPACITY = 16
TOLERANCE = 2e-5
PREFIXES = [[1, 2, 3, 1, 2], [2], [4, 4], [0, 3, 0, 3, 0, 3], [1, 0, 2, 1]]
# What an encoder reads beside each of them.
ENCODER_ROWS = [[5, 1], [3, 3, 6, 2, 1], [1], [4, 2, 1], [6, 5, 4, 3, 2, 1]]
ENCODER_WIDTH = 8


def _packed(make_params, bits: Bits):
  return quantized.packed(make_params(), bits)


# Sizes and parameters of every network.
NETWORKS = {
  name: (
    toy.llama_config(VOCAB_SIZE, **sizes),
    functools.partial(
      toy.llama_params, toy.llama_config(VOCAB_SIZE, **sizes), seed=seed
    ),
  )
  for name, sizes, seed in (
    ('llama', {}, 4),
    ('llama, later', toy.LATER_LLAMA, 8),
    ('llama, a window', {'windows': (3,)}, 4),
    ('llama, experts', toy.EXPERTS, 4),
  )
}
_ONE_HEAD = toy.llama_config(
  VOCAB_SIZE,
  num_layers=1,
  num_heads=1,
  num_kv_heads=1,
  is_tied=True,
  has_attention_bias=True,
)
NETWORKS['llama, one head, tied, biased'] = (
  _ONE_HEAD,
  lambda: toy.perturb(toy.llama_params(_ONE_HEAD, seed=5), seed=6, scale=0.3),
)
NETWORKS |= {
  name: (config, functools.partial(toy_t5.params, config, seed=7))
  for name, config in {
    'T5 1.1': toy_t5.config(VOCAB_SIZE, num_layers=2),
    'T5 1.0': toy_t5.config(
      VOCAB_SIZE, mlp_activations=('relu',), is_tied=True
    ),
    'T5, decoder only': toy_t5.config(VOCAB_SIZE, num_encoder_layers=0),
    'T5, scalable': toy_t5.config(
      VOCAB_SIZE, num_layers=2, has_layer_relpos=True
    ),
  }.items()
}
NETWORKS |= {
  name: (config, functools.partial(toy_gemma.params, config, seed=8))
  for name, config in {
    'Gemma 2': toy_gemma.gemma_2(VOCAB_SIZE),
    'Gemma 3': toy_gemma.decoder(VOCAB_SIZE),
    'Gemma 4': toy_gemma.gemma_4(VOCAB_SIZE),
    'Gemma 4, E2B': toy_gemma.gemma_4_e2b(VOCAB_SIZE),
    'Gemma 4, experts': toy_gemma.gemma_4_moe(VOCAB_SIZE),
    'T5Gemma': toy_gemma.encoder_decoder(VOCAB_SIZE),
  }.items()
}
NETWORKS |= {
  f'{name}, packed': (config, functools.partial(_packed, make_params, bits))
  for name, bits in (
    ('llama, later', Bits(8)),
    ('llama, one head, tied, biased', Bits(4)),
    ('T5 1.1', Bits(4, 4)),
    ('Gemma 3', Bits(8)),
    ('Gemma 4', Bits(4)),
    ('Gemma 4, E2B', Bits(8)),
    ('Gemma 4, experts', Bits(4, 4)),
    ('llama, experts', Bits(8)),
  )
  for config, make_params in [NETWORKS[name]]
}
NETWORKS |= {
  f'{name}, int8 cache': (
    dataclasses.replace(config, cache_dtype=jnp.dtype('int8')),
    make_params,
  )
  for name in (
    *('llama, later', 'llama, experts', 'T5 1.1', 'T5Gemma'),
    *('Gemma 3', 'Gemma 4', 'Gemma 4, E2B', 'Gemma 4, experts'),
  )
  for config, make_params in [NETWORKS[name]]
}
ROWS = {
  'toy': (toy.toy(VOCAB_SIZE), lambda: toy.toy_params(VOCAB_SIZE, seed=3))
} | {
  name: (families.language_model(config), make_params)
  for name, (config, make_params) in NETWORKS.items()
}
# A test of each: one of every family now, the others in `make test-all`.
every_model = slow.parametrize(
  'name',
  ROWS,
  now=['toy', 'llama, later', 'T5 1.1', 'Gemma 3', 'Gemma 4, E2B'],
)
HAS_ENCODER = {
  *('T5 1.1', 'T5 1.1, packed', 'T5 1.1, int8 cache', 'T5 1.0'),
  *('T5, scalable', 'T5Gemma', 'T5Gemma, int8 cache'),
}


@functools.cache
def compiled(name: str):
  """The model, each of its functions jitted, and its params."""
  model, make_params = ROWS[name]
  jitted = model._replace(
    init=jax.jit(model.init, static_argnums=2),
    extend=jax.jit(model.extend),
    gather=jax.jit(model.gather, static_argnums=3),
  )
  return jitted, make_params()


def prompt_of(
  name: str, rows=None, *, first: int = 0, width: int = 12, **fields
):
  """Decoder rows, with the encoder rows from number `first` on."""
  rows = rows or PREFIXES
  if name in HAS_ENCODER:
    encoder_rows = [ENCODER_ROWS[(first + i) % 5] for i in range(len(rows))]
    fields = {
      'encoder_width': ENCODER_WIDTH,
      'encoder_rows': encoder_rows,
    } | fields
  return toy.prompt(rows, width=width, **fields)


def start(name: str, rows=None, *, first: int = 0):
  model, params = compiled(name)
  cache = model.init(params, prompt_of(name, rows, first=first), CAPACITY)
  return model, params, cache


def tokens_of(count: int, batch_size: int = 5, seed: int = 0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, VOCAB_SIZE, (batch_size, count))
  return jnp.asarray(tokens, jnp.int32)


def lengths_of(rows) -> jnp.ndarray:
  return jnp.asarray([len(row) for row in rows], jnp.int32)


def close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
