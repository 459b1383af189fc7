"""Steps of compiled TPU programs beside the packed weights that they read."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from experiments.quantized import __main__ as experiment
from specdec_jax.models import presets, quantized

NAME, LONG = 't5_1_1_xxl', 'llama_3_1_8b'


def overs(monkeypatch, weights: str, caches: str | None = None) -> list[float]:
  """Bytes of a plain and a verify step over the least, of one layer."""
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('needs libtpu: pip install -e ".[tpu]"')
  sizes = {'num_encoder_layers': 1, 'num_decoder_layers': 1}
  name, task = NAME, (1, 64)
  if caches:
    sizes, name, task = {'num_layers': 1}, LONG, (8, 4096 - 128)
  config = dataclasses.replace(presets.PRESETS[name], **sizes)
  monkeypatch.setitem(presets.PRESETS, name, config)
  cells = experiment._steps_of(name, weights, caches, *task, 'v5e:1x1')
  return [float(cells[f'{step} step, over']) for step in ('plain', 'verify')]


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize(
  ('weights', 'caches'), [('int8', None), ('int4', None), ('int8', 'int8')]
)
def test_steps_read_packed_weights_once(monkeypatch, weights, caches):
  found = overs(monkeypatch, weights, caches)
  assert all(0.98 < over < 1.05 for over in found), found


@pytest.mark.tpu
@pytest.mark.slow
def test_weights_that_are_unpacked_in_memory_are_seen(monkeypatch):
  def product(x, values, scale, axis=0):
    weights = quantized.unpacked(values, scale, x.dtype)
    weights = jax.lax.optimization_barrier(weights)
    weights = weights.T if axis else weights
    return jnp.matmul(x, weights, preferred_element_type=jnp.float32)

  monkeypatch.setattr(quantized, 'product', product)
  jax.clear_caches()
  assert min(overs(monkeypatch, 'int8')) > 2
  jax.clear_caches()
