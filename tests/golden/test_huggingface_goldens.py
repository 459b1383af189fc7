"""Equal to Hugging Face transformers, on files that it wrote.

`make_huggingface.py` makes the files; they are never edited by hand.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface, loading
from specdec_jax.models import families, kv_cache
from specdec_jax.models.llama import RopeScaling
from specdec_jax.text import vocabularies
from tests import toy

GOLDEN = pathlib.Path(__file__).parent
RECORDS = json.loads(
  (GOLDEN / 'smollm2_greedy.json').read_text(encoding='utf-8')
)['records']


def teacher_forced_logits(config, params, ids) -> np.ndarray:
  """float32 logits `[B, T, V]` of int `[B, T]` ids in a fresh cache."""
  num_rows, capacity = ids.shape
  cache = kv_cache.init(config, num_rows, capacity, config.num_layers)
  logits, _ = compiled_extend(config)(params, jnp.asarray(ids), cache)
  return np.asarray(logits)


@functools.cache
def compiled_extend(config):
  return jax.jit(families.language_model(config).extend)


# What makes each network another one.
TINY = {
  'tiny_llama': {},
  'tiny_llama_untied': {'is_tied': False},
  'tiny_llama_3_1': {
    'rope_scaling': RopeScaling(factor=8.0, original_max_positions=32)
  },
  'tiny_mistral': {'is_tied': False, 'windows': (7,)},
  'tiny_qwen2': {'has_attention_bias': True},
  'tiny_qwen2_window': {'has_attention_bias': True, 'windows': (0, 5)},
  'tiny_qwen3': {'is_tied': False, 'has_qk_norm': True, 'head_dim': 12},
}


def read_tiny(name: str) -> tuple:
  """Sizes and parameters of a tiny model; ids `[B, T]` and their logits."""
  pytest.importorskip('safetensors')
  folder = GOLDEN / name
  config = huggingface.read_config(folder)
  params = huggingface.read_params(folder, config)
  with np.load(folder / 'golden.npz') as golden:
    ids = golden['ids'].astype(np.int32)
    expected = golden['logits']
  assert np.abs(expected).max() > 1
  return config, params, ids, expected


@pytest.mark.parametrize('name', TINY)
def test_logits_of_tiny_models(name):
  config, params, ids, expected = read_tiny(name)
  assert config == dataclasses.replace(
    config,
    **{
      'is_tied': True,
      'head_dim': 8,
      'rope_scaling': None,
      'has_attention_bias': False,
      'has_qk_norm': False,
      'windows': (),
    }
    | TINY[name],
  )
  assert config.num_kv_heads < config.num_heads
  logits = teacher_forced_logits(config, params, ids)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', TINY)
def test_logits_of_ragged_rows_that_are_rewound(name):
  """Rows of different lengths get three tokens at a time, one of which is taken
  back, with other tokens in its place before."""
  config, params, ids, expected = read_tiny(name)
  model = toy.compiled(families.language_model(config))
  lengths = np.array([9, 2, 13])
  rows = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
  cache = model.init(params, toy.prompt(rows), 24)
  block = np.arange(3)
  for _ in range(4):
    positions = lengths[:, None] - 1 + block
    wrong = jnp.asarray((np.take_along_axis(ids, positions, 1) + 1) % 64)
    _, cache = model.extend(params, wrong, cache)
    cache = model.rewind(cache, jnp.asarray(lengths - 1))
    tokens = jnp.asarray(np.take_along_axis(ids, positions, 1))
    logits, cache = model.extend(params, tokens, cache)
    np.testing.assert_allclose(
      logits,
      np.take_along_axis(expected, positions[..., None], 1),
      rtol=0,
      atol=1e-4,
    )
    cache = model.rewind(cache, cache.lengths - 1)
    lengths += 2


@functools.cache
def smollm2() -> loading.LoadedModel:
  for package in ('gguf', 'tokenizers'):
    pytest.importorskip(package)
  try:
    return loading.load('smollm2-135m')
  except ValueError as error:
    if 'pip install' not in str(error):
      raise
    pytest.skip(str(error))


@pytest.mark.smollm2
def test_chats_are_rendered_as_transformers_renders_them():
  pytest.importorskip('jinja2')
  vocabulary = smollm2().vocabulary
  chats = [r for r in RECORDS if r['kind'] == 'chat']
  assert chats
  for record in chats:
    text = vocabularies.apply_chat_template(vocabulary, record['text'])
    assert text == record['rendered']
    assert vocabulary.encode_chat(record['text']) == record['prompt_ids']


@pytest.mark.smollm2
def test_token_ids_and_text_equal_those_of_transformers():
  vocabulary = smollm2().vocabulary
  assert len(RECORDS) >= 24
  for record in RECORDS:
    assert vocabulary.encode(record['rendered']) == record['prompt_ids']
    assert (
      vocabulary.decode(record['output_ids'], keep_special=True)
      == record['output_text']
    )


@pytest.mark.smollm2
def test_argmax_is_the_greedy_token_at_every_position():
  """Also that the lead of the first logit over the second is equal."""
  model = smollm2()
  by_length = sorted(
    RECORDS[::4] + RECORDS[-1:],
    key=lambda r: len(r['prompt_ids']) + len(r['output_ids']),
  )
  # In parts, of few widths: the logits of all rows together take 2 GB.
  for start in range(0, len(by_length), 2):
    part = by_length[start : start + 2]
    rows = [r['prompt_ids'] + r['output_ids'] for r in part]
    width = -(-max(map(len, rows)) // 32) * 32
    ids = np.zeros((len(rows), width), np.int32)
    for row, tokens in zip(ids, rows, strict=True):
      row[: len(tokens)] = tokens
    logits = teacher_forced_logits(model.config, model.params, ids)
    for record, row in zip(part, logits, strict=True):
      start_of_output = len(record['prompt_ids']) - 1
      row = row[start_of_output : start_of_output + len(record['output_ids'])]
      np.testing.assert_array_equal(
        row.argmax(axis=-1), record['output_ids'], record['text']
      )
      top = np.partition(row, -2, axis=-1)[:, -2:]
      np.testing.assert_allclose(
        top[:, 1] - top[:, 0], record['margins'], rtol=0, atol=1e-3
      )
