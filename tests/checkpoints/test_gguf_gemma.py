"""Gemmas in GGUF files: what llama.cpp's converter writes is read back."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specdec_jax.checkpoints import gguf
from specdec_jax.files.settings import Settings
from specdec_jax.models import presets
from tests import toy_gemma
from tests.checkpoints.tiny_models import (
  assert_trees_equal,
  byte_tokens,
  write_gguf,
)

pytest.importorskip('gguf')
# Beside what all architectures have.
OWN = {
  'gemma2': {'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0},
  'gemma3': {'rope.scaling.type': 'linear', 'rope.scaling.factor': 8.0},
}
CONFIGS = {
  'gemma2': {
    'has_qk_norm': False,
    'rope_base': 1e4,
    'rope_factor': 1.0,
    'attention_softcap': 50.0,
    'logits_softcap': 30.0,
  },
  'gemma3': {'windows': (3,) * 5 + (0,)},
}


def written(path, kind: str, **metadata):
  """A tiny Gemma in a file; its sizes and parameters."""
  config = toy_gemma.decoder(
    len(byte_tokens()), query_pre_attn_scalar=4, **CONFIGS[kind]
  )
  # Sums with 1 are exact.
  params = jax.tree.map(
    lambda leaf: jnp.round(64 * leaf) / 64, toy_gemma.params(config, seed=2)
  )
  own = {'attention.key_length': 4, 'attention.sliding_window': 3}
  stated = {f'{kind}.{k}': v for k, v in (own | OWN[kind] | metadata).items()}
  write_gguf(path, config, params, architecture=kind, metadata=stated)
  return config, params


@pytest.mark.parametrize('kind', OWN)
def test_round_trip(tmp_path, kind):
  path = tmp_path / 'tiny.gguf'
  config, params = written(path, kind)
  found = gguf.read_config(path)
  assert found == config
  assert_trees_equal(gguf.read_params(path, found), params)


@pytest.mark.parametrize(
  ('kind', 'metadata', 'message'),
  [
    ('gemma2', {'rope.scaling.type': 'linear'}, "is 'linear', expected none"),
    ('gemma3', {'rope.scaling.type': 'yarn'}, 'expected none or linear'),
    ('gemma3', {'attention.value_length': 8}, 'value_length is 8, expected 4'),
    ('gemma3', {'attention.causal': False}, 'causal is False, expected true'),
    ('gemma2', {'attention.sliding_window_pattern': 3}, 'is 3, expected 2'),
    ('gemma3', {'altup.num_inputs': 4}, 'num_inputs is 4, a key that is not'),
  ],
)
def test_what_is_not_computed_is_refused(tmp_path, kind, metadata, message):
  path = tmp_path / 'tiny.gguf'
  written(path, kind, **metadata)
  with pytest.raises(ValueError, match=rf'gguf: {kind}\..*{message}'):
    gguf.read_config(path)


@pytest.mark.parametrize('kind', ['gemma4', 'gemma4-assistant', 'gemma3n'])
def test_files_of_later_gemmas_are_refused(tmp_path, kind):
  """Not taken for a Gemma 3, whose keys and tensors this file has."""
  path = tmp_path / 'tiny.gguf'
  config, params = written(path, 'gemma3')
  write_gguf(path, config, params, architecture=kind)
  message = rf"architecture is '{kind}', expected llama or .* or gemma3$"
  for read in (gguf.read_config, lambda path: gguf.read_params(path, config)):
    with pytest.raises(ValueError, match=message):
      read(path)


@pytest.mark.parametrize(
  'name', ['gemma2_2b', 'gemma2_27b', 'gemma3_1b', 'gemma3_4b', 'gemma3_27b']
)
def test_sizes_of_the_published_models(name):
  """The largest of each divides scores otherwise, which no file states."""
  config, kind = presets.preset(name), name.partition('_')[0]
  stated = {
    'block_count': config.num_layers,
    'context_length': config.max_positions,
    'embedding_length': config.embed_dim,
    'feed_forward_length': config.mlp_dim,
    'attention.head_count': config.num_heads,
    'attention.head_count_kv': config.num_kv_heads,
    'attention.key_length': config.head_dim,
    'attention.layer_norm_rms_epsilon': 1e-6,
    'attention.sliding_window': config.windows[0],
  } | (OWN[kind] if config.rope_factor != 1 or kind == 'gemma2' else {})
  values = Settings(path='a.gguf', values=stated)
  sizes = gguf.sizes_of(values, config.num_layers, may_lack_head_dim=False)
  sizes |= {'vocab_size': config.vocab_size, 'dtype': jnp.float32}
  found = gguf.gemma_of(values, kind, sizes)
  assert found == dataclasses.replace(config, dtype=jnp.float32)
