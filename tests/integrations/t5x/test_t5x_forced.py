"""Tokens that T5X forces at their places, beyond gaps too: its own sampler and
the plug-in, on the same batches."""

import functools
import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.integrations.t5x import t5_networks
from tests import toy_t5
from tests.integrations.t5x import test_t5x

pytestmark = test_t5x.pytestmark
KINDS = test_t5x.KINDS
VOCAB_SIZE, LENGTH = 16, 10
EOS, NO_EOS = 1, -1
ROWS = {
  # As prompts, where every EOS is a gap.
  'encoder_decoder': [
    [0, 5, 1, 6, 7],
    [0, 1, 1, 6],
    [0, 5, 0, 6, 0],
    [0, 3, 4],
    [0],
    [0, 2, 9, 1, 1, 1, 1, 1, 1, 8],
  ],
  'decoder_only': [
    [0, 5, 0, 6, 0],
    [0, 5, 0, 6, 0, 1],
    [0, 0, 0, 0, 7, 1],
    [0, 3, 4, 1],
    [0],
    [0, 4, 0, 0, 0, 0, 9, 0, 1, 6],
  ],
}


@pytest.fixture(scope='module', autouse=True)
def runs():
  """T5X warns, and promotes dtypes and ranks, while it is imported and runs."""
  with (
    warnings.catch_warnings(),
    jax.numpy_dtype_promotion('standard'),
    jax.numpy_rank_promotion('allow'),
  ):
    warnings.simplefilter('ignore')
    yield importlib.import_module('tests.integrations.t5x.t5x_runs')


def batch_of(kind: str) -> dict:
  rows = ROWS[kind]
  tokens = np.zeros((len(rows), LENGTH), np.int32)
  for row, values in zip(tokens, rows, strict=True):
    row[: len(values)] = values
  lengths = np.array([[len(values)] for values in rows])
  rng = np.random.default_rng(3)
  return {
    'encoder_input_tokens': jnp.asarray(
      rng.integers(2, VOCAB_SIZE, (len(rows), 7)), jnp.int32
    ),
    'decoder_input_tokens': jnp.asarray(tokens),
    'decoder_causal_attention': jnp.asarray(
      (np.arange(LENGTH) < lengths).astype(np.int32)
    ),
  }


def predict(model, kind: str, params, eos_id: int):
  prompted = {'prompt_with_targets': True} if kind == 'encoder_decoder' else {}
  step = jax.jit(
    functools.partial(
      model.predict_batch_with_aux,
      decoder_params={'eos_id': eos_id},
      **prompted,
    )
  )
  return np.asarray(step(params, batch_of(kind))[0])


@pytest.mark.parametrize(
  ('kind', 'eos_id'),
  # What ends rows is among the forced tokens of both.
  [
    ('encoder_decoder', NO_EOS),
    ('encoder_decoder', 6),
    ('encoder_decoder', 12),
    ('decoder_only', NO_EOS),
    ('decoder_only', EOS),
    ('decoder_only', 6),
  ],
)
def test_tokens_beyond_a_gap_stand_where_t5x_has_them(runs, kind, eos_id):
  sizes = runs.TINY_SIZES | {'vocab_size': VOCAB_SIZE}
  module = runs.network(kind, 'float32', sizes, num_layers=1)
  params = toy_t5.params(t5_networks.config_of(module), seed=4)
  expected = predict(runs.model(module, temperature=0.0), kind, params, eos_id)
  for settings in (
    {'settings': {}},
    {'settings': {'drafter': 'none'}},
    {'decode_fn': {}},
  ):
    found = predict(runs.model(module, **settings), kind, params, eos_id)
    np.testing.assert_array_equal(found, expected, str(settings))
