"""Gemmas, T5s and a Qwen3-MoE equal to what Hugging Face transformers computed,
in ragged pieces.

`make_huggingface_gemma.py`, `make_huggingface_gemma4.py` and
`make_huggingface_t5.py` make the files; these are never edited by hand.
"""

import dataclasses
import functools
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface
from specdec_jax.models import families
from tests import slow, toy
from tests.golden import pieces
from tests.golden.test_t5_goldens import TINY as T5S

GOLDEN = pathlib.Path(__file__).parent
GEMMA_4 = ('tiny_gemma4', 'tiny_gemma4_e2b', 'tiny_gemma4_moe')
TINY = (
  *('tiny_gemma2', 'tiny_gemma3', *GEMMA_4, 'tiny_t5gemma'),
  'tiny_qwen3_moe',
)
BLOCK = 4


@functools.cache
def golden(name: str):
  """Sizes, parameters, the model, and what transformers computed."""
  pytest.importorskip('safetensors')
  config = huggingface.read_config(GOLDEN / name)
  params = huggingface.read_params(GOLDEN / name, config)
  model = toy.compiled(families.language_model(config))
  with np.load(GOLDEN / name / 'golden.npz') as arrays:
    return config, params, model, dict(arrays)


def prompt_of(arrays, ids, lengths):
  """The first tokens of each row, after the encoder's."""
  encoder_rows = None
  if 'encoder_tokens' in arrays:
    encoder_rows = arrays['encoder_tokens'].tolist()
  return pieces.prompt_of(ids, lengths, encoder_rows)


def ids_of(arrays) -> np.ndarray:
  return arrays.get('ids', arrays.get('decoder_tokens')).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize('name', TINY)
def test_logits_of_whole_rows(name):
  _, params, model, arrays = golden(name)
  ids = ids_of(arrays)
  prompt = prompt_of(arrays, ids, [1] * len(ids))
  cache = model.init(params, prompt, ids.shape[1])
  logits, _ = model.extend(params, jnp.asarray(ids), cache)
  assert np.abs(arrays['logits']).max() > 3
  np.testing.assert_allclose(logits, arrays['logits'], rtol=0, atol=1e-4)


@slow.parametrize('name', [*TINY, *T5S], now=[*TINY, 'tiny_t5_1_1'])
@slow.parametrize('block', [1, BLOCK], now=[BLOCK])
def test_logits_of_ragged_rows_after_rollback(name, block):
  """Windows are shorter than rows."""
  _, params, model, arrays = golden(name)
  ids, expected = ids_of(arrays), arrays['logits']
  prompt = prompt_of(arrays, ids, [1, 6, 16, 3][: len(ids)])
  pieces.check_ragged_rows(model, params, prompt, ids, expected, block)


@pytest.mark.slow
@pytest.mark.parametrize('name', [*GEMMA_4, 'tiny_qwen3_moe'])
def test_logits_of_a_path_in_a_tree(name):
  _, params, model, arrays = golden(name)
  ids, expected = ids_of(arrays), arrays['logits']
  prompt = prompt_of(arrays, ids, [1, 6, 16])
  pieces.check_path_in_tree(model, params, prompt, ids, expected)


def test_greedy_tokens_of_an_encoder_decoder():
  _, params, model, arrays = golden('tiny_t5gemma')
  greedy = arrays['greedy'].astype(np.int32)
  prompt = prompt_of(arrays, greedy, [1] * len(greedy))
  width = ids_of(arrays).shape[1]
  cache = model.init(params, prompt, width)
  tokens = np.pad(greedy, ((0, 0), (0, width - greedy.shape[1])))
  logits, _ = model.extend(params, jnp.asarray(tokens), cache)
  assert (greedy[:, 0] == 2).all()
  for row, expected in zip(logits, greedy, strict=True):
    (ends,) = np.nonzero(expected[1:] == 1)
    end = ends[0] + 1 if ends.size else len(expected) - 1
    np.testing.assert_array_equal(
      row.argmax(axis=-1)[:end], expected[1 : end + 1]
    )


@pytest.mark.slow
def test_windows_and_bounds_are_felt():
  """Without one of them the logits are others."""
  for name, changes in (
    ('tiny_gemma2', {'windows': (0, 0)}),
    ('tiny_gemma2', {'attention_softcap': 0.0}),
    ('tiny_gemma3', {'rope_factor': 1.0}),
    ('tiny_gemma3', {'local_rope_base': 1e6}),
    ('tiny_t5gemma', {'windows': (5, 5)}),
  ):
    config, params, _, arrays = golden(name)
    ids = ids_of(arrays)
    changed = dataclasses.replace(config, **changes)
    model = toy.compiled(families.language_model(changed))
    prompt = prompt_of(arrays, ids, [1] * len(ids))
    cache = model.init(params, prompt, ids.shape[1])
    logits, _ = model.extend(params, jnp.asarray(ids), cache)
    assert np.abs(logits - arrays['logits']).max() > 0.01, changes
