"""EAGLE-3 folders of four spellings give their makers' logits.

`make_eagle.py` makes the folders and runs their makers' code; neither is ever
edited by hand. `eagle_reference.py` computes the same once more, in numpy.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('safetensors')

from specdec_jax.checkpoints import formats, loading
from specdec_jax.models.drafting.eagle import Eagle
from specdec_jax.models.layers import applied
from tests.golden import eagle_reference

GOLDEN = pathlib.Path(__file__).parent
SPELLINGS = ('safeailab', 'specforge', 'speculators', 'nemo')


def folder_of(spelling: str) -> pathlib.Path:
  return GOLDEN / f'tiny_eagle_{spelling}'


@functools.cache
def golden_of(spelling: str) -> dict[str, np.ndarray]:
  with np.load(folder_of(spelling) / 'golden.npz') as golden:
    return dict(golden)


def drafted(config, params, golden, lengths):
  """Logits `[B, T, V_draft]` that the features of all T positions give, and
  those of drafted positions `[steps - 1, B, V_draft]` after the first
  `lengths[b]` of them, by a ragged cache that is filled in two calls."""
  apply = applied(Eagle(config))
  num_rows, num_steps = len(lengths), len(golden['logits'])
  repeated = lambda x: jnp.repeat(jnp.asarray(x)[None], num_rows, axis=0)
  tokens = repeated(golden['tokens'])
  if config.has_embedding:
    embedded = apply(params, tokens, method=Eagle.embed)
  else:
    embedded = jnp.asarray(golden['embeddings'])[tokens]
  features = repeated(golden['features'])
  hidden = apply(params, features, method=Eagle.join)
  num_tokens = features.shape[1]
  capacity = num_tokens + num_steps
  shape = num_rows, config.num_kv_heads, capacity, config.head_dim
  keys = values = jnp.zeros(shape)
  outs = []
  for start, end in ((0, 4), (4, num_tokens)):
    out, keys, values = apply(
      params,
      embedded[:, start + 1 : end + 1],
      hidden[:, start:end],
      keys,
      values,
      jnp.full(num_rows, start),
    )
    outs.append(out)
  out = jnp.concatenate(outs, axis=1)
  first = apply(params, out, method=Eagle.project)
  rows = jnp.arange(num_rows)
  last, rest = out[rows, lengths - 1], []
  for i in range(num_steps - 1):
    after = embedded[rows, lengths + 1 + i]
    out, keys, values = apply(
      params, after[:, None], last[:, None], keys, values, lengths + i
    )
    last = out[:, 0]
    rest.append(apply(params, out, method=Eagle.project)[:, 0])
  return first, jnp.stack(rest)


@pytest.mark.parametrize('spelling', SPELLINGS)
def test_logits_of_each_spelling(spelling):
  golden = golden_of(spelling)
  config, params = loading.read(folder_of(spelling))
  lengths = np.array([1, 4, 6], np.int32)
  first, rest = jax.jit(drafted, static_argnums=0)(
    config, params, golden, lengths
  )
  expected = golden['logits']
  assert np.abs(expected).max() > 1
  for row in first:
    np.testing.assert_allclose(row, expected[0], rtol=0, atol=1e-4)
  for i, logits in enumerate(rest, 1):
    np.testing.assert_allclose(
      logits, expected[i, lengths - 1], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize('spelling', SPELLINGS)
def test_numpy_agrees_with_the_makers(spelling):
  golden = golden_of(spelling)
  folder = eagle_reference.read(folder_of(spelling))
  logits = eagle_reference.unrolled_logits(
    folder,
    golden['tokens'],
    golden['features'],
    golden['embeddings'],
    len(golden['logits']),
  )
  np.testing.assert_allclose(golden['logits'], logits, rtol=0, atol=2e-5)
  _, params = loading.read(folder_of(spelling))
  np.testing.assert_array_equal(
    params['target_ids'], eagle_reference.target_ids(folder)
  )


def test_every_norm_of_the_network_is_in_a_spelling():
  """So that the logits above say something of each."""
  configs = [formats.read_config(folder_of(spelling)) for spelling in SPELLINGS]
  for name, default in (
    ('norm_before_residual', False),
    ('norm_before_fc', False),
    ('fc_norm', False),
    ('norm_before_next', False),
    ('norm_before_logits', True),
    ('has_qk_norm', False),
    ('has_embedding', False),
    ('rope_scaling', None),
    ('feature_layers', ()),
  ):
    values = [getattr(config, name) for config in configs]
    assert any(value == default for value in values), name
    assert any(value != default for value in values), name
  # SGLang's ids are of outputs, 1 less than those of inputs; vLLM's are not.
  assert configs[1].feature_layers == (2, 5, 9)
  assert configs[2].feature_layers == (1, 3, 5, 8)
