"""Steps of compiled TPU programs beside the packed weights that they read."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from experiments.quantized import chips
from specdec_jax.base import Tree
from specdec_jax.models import presets, quantized
from specdec_jax.planning import aot, parts, workloads
from specdec_jax.sharding import mesh as mesh_lib

NAME, LONG = 't5_1_1_xxl', 'llama_3_1_8b'


@pytest.fixture(autouse=True)
def named_loops():
  # Programs name their loops, as users' do; those of tests are shorter.
  name = 'jax_include_full_tracebacks_in_locations'
  jax.config.update(name, True)
  yield
  jax.config.update(name, False)


def _needs_libtpu() -> None:
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('needs libtpu: pip install -e ".[tpu]"')


def overs(monkeypatch, weights: str, caches: str | None = None) -> list[float]:
  """Bytes of a plain and a verify step over the least, of one layer."""
  _needs_libtpu()
  sizes = {'num_encoder_layers': 1, 'num_decoder_layers': 1}
  name, task = NAME, (1, 64)
  if caches:
    sizes, name, task = {'num_layers': 1}, LONG, (8, 4096 - 128)
  config = dataclasses.replace(presets.PRESETS[name], **sizes)
  monkeypatch.setitem(presets.PRESETS, name, config)
  cells = chips.steps_of(name, weights, caches, *task, 'v5e:1x1')
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


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize('caches', [None, 'int8'])
def test_tree_steps_read_caches_once(monkeypatch, caches):
  _needs_libtpu()
  config = dataclasses.replace(presets.PRESETS[LONG], num_layers=1)
  monkeypatch.setitem(presets.PRESETS, LONG, config)
  tree = Tree((0, 1))
  decoder = workloads.decoder_of(
    *(LONG, 'quantized', None),
    dtype='bfloat16',
    weights='int8',
    cache_dtype=caches,
  )
  task = workloads.Workload(
    slice=aot.find_slice('v5e:1x1'),
    decoder=decoder,
    batch_size=8,
    # With the root and two nodes 4,099 entries, which are made 4,104: caches
    # of 4,099 would be copied.
    input_length=4096 - 128,
    output_length=128,
    num_partitions=1,
  )
  shapes = parts.shapes_of(task, tree)
  assert shapes.program.state.target_cache.capacity == 4104
  compiled = aot.compile_all([parts.target_step(shapes, 3, tree)])
  [cost] = aot.price(compiled, task.slice.chip)
  least = chips.read_bytes(decoder)
  least += mesh_lib.tree_bytes(shapes.program.state.target_cache)
  assert cost.memory_bytes / least < 1.05
