"""T5s equal to what Hugging Face transformers and T5X computed.

`make_huggingface_t5.py` makes the first; `t5x/README.md` tells of the second.
Neither is ever edited by hand.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface, t5x
from specdec_jax.models import families
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.text import generation_config

GOLDEN = pathlib.Path(__file__).parent
TINY = (
  'tiny_t5_1_0',
  'tiny_t5_1_1',
  'tiny_flan_t5',
  'tiny_mt5',
  'tiny_umt5',
  'tiny_madlad',
)
# Of `make_t5x_scanned.py`.
SCANNED = T5Config(
  vocab_size=48,
  embed_dim=16,
  num_encoder_layers=3,
  num_decoder_layers=2,
  num_heads=2,
  head_dim=4,
  mlp_dim=24,
  has_layer_relpos=True,
)


def teacher_forced(config, params, encoder_tokens, decoder_tokens):
  """float32 logits `[B, T, V]` as numpy."""
  return np.asarray(
    jax.jit(T5(config).apply)(
      {'params': params},
      jnp.asarray(encoder_tokens, jnp.int32),
      jnp.asarray(decoder_tokens, jnp.int32),
    )
  )


def check_greedy(logits, greedy, eos_id: int) -> None:
  """The argmax after each token of `[B, T]` is the next, up to the end."""
  for row, tokens in zip(logits, greedy, strict=True):
    (ends,) = np.nonzero(tokens[1:] == eos_id)
    length = ends[0] + 1 if ends.size else len(tokens) - 1
    np.testing.assert_array_equal(
      row.argmax(axis=-1)[:length], tokens[1 : length + 1]
    )


@pytest.mark.parametrize('name', TINY)
def test_logits_and_greedy_tokens_of_transformers(name):
  pytest.importorskip('safetensors')
  folder = GOLDEN / name
  config = huggingface.read_config(folder)
  assert config.is_tied == (name == 'tiny_t5_1_0')
  assert (config.num_encoder_layers != config.num_decoder_layers) == (
    name == 'tiny_t5_1_1'
  )
  assert config.has_layer_relpos == (name == 'tiny_umt5')
  params = huggingface.read_params(folder, config)
  with np.load(folder / 'golden.npz') as golden:
    rows = np.concatenate([golden['encoder_tokens']] * 2)
    # Greedy outputs are shorter than the teacher's; what follows is not seen.
    greedy = golden['greedy']
    width = golden['decoder_tokens'].shape[1]
    padded = np.pad(greedy, ((0, 0), (0, width - greedy.shape[1])))
    decoder_tokens = np.concatenate([golden['decoder_tokens'], padded])
    expected = golden['logits']
  logits = teacher_forced(config, params, rows, decoder_tokens)
  assert np.abs(expected).max() > 1
  teacher, own = np.split(logits, 2)
  np.testing.assert_allclose(teacher, expected, rtol=0, atol=1e-4)
  (eos_id,) = generation_config.read_eos_ids(folder)
  assert eos_id == (2 if name == 'tiny_madlad' else 1)
  check_greedy(own, greedy, eos_id)


def test_logits_of_t5x():
  config = T5Config(
    vocab_size=128,
    embed_dim=64,
    num_encoder_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    head_dim=16,
    mlp_dim=128,
  )
  params = t5x.read_target(
    GOLDEN / 't5x' / 't5x_orbax', families.param_shapes(config)
  )
  with np.load(GOLDEN / 't5x' / 'golden_encdec.npz') as golden:
    batch = dict(golden)
  logits = teacher_forced(
    config,
    params,
    batch['encoder_input_tokens'],
    batch['decoder_input_tokens'],
  )
  is_weighted = batch['decoder_loss_weights'] > 0
  assert is_weighted.sum() > 100
  np.testing.assert_allclose(
    logits[is_weighted], batch['logits'][is_weighted], rtol=0, atol=1e-4
  )


def test_logits_of_t5x_with_scanned_layers():
  params = t5x.read_target(
    GOLDEN / 't5x' / 't5x_scanned', families.param_shapes(SCANNED)
  )
  with np.load(GOLDEN / 't5x' / 'golden_scanned.npz') as golden:
    expected = golden['logits']
    logits = teacher_forced(
      SCANNED, params, golden['encoder_tokens'], golden['decoder_tokens']
    )
  assert np.abs(expected).max() > 1
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
