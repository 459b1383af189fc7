"""Bytes that programs for TPUs read of the weights of Gemma 4s, by its
compiler."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from specdec_jax.decoding.program import Part
from specdec_jax.models import experts, families, presets, quantized
from specdec_jax.planning import aot, hlo
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.theory.experts import expected_distinct
from tests import toy

pytestmark = [
  pytest.mark.tpu,
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason='needs libtpu: pip install -e ".[tpu]"',
  ),
]


@pytest.fixture
def named():
  """Programs name their loops, as users' do; those of tests are shorter."""
  jax.config.update('jax_include_full_tracebacks_in_locations', True)
  yield
  jax.config.update('jax_include_full_tracebacks_in_locations', False)


@pytest.mark.usefixtures('named')
@pytest.mark.parametrize('weights', [None, 'int8', 'int4'])
@pytest.mark.parametrize('num_tokens', [1, 5])
def test_a_layer_reads_the_chosen_experts_alone(num_tokens, weights):
  """A layer of Gemma 4's 26B-A4B; no table of experts is copied."""
  slice_ = aot.find_slice('v5e:1x1')
  where = SingleDeviceSharding(slice_.devices[0])
  config = presets.PRESETS['gemma4_26b_a4b']
  layer = experts.Experts(
    config.num_experts, config.expert_dim, 'gelu', jnp.bfloat16
  )
  shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(
    (1, num_tokens, *sizes), dtype
  )
  inputs = (
    shape(jnp.bfloat16, config.embed_dim),
    shape(jnp.int32, config.num_chosen_experts),
    shape(jnp.float32, config.num_chosen_experts),
  )
  params = jax.eval_shape(layer.init, jax.random.key(0), *inputs)
  params = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.bfloat16), params)
  bits = 16
  if weights is not None:
    bits = quantized.bits_of(weights).bits
    params = quantized.packed(params, quantized.bits_of(weights))
  args = jax.tree.map(
    lambda leaf: leaf.update(sharding=where), (params, *inputs)
  )
  [(program, _)] = aot.compile_all(
    [aot.Job(Part(jax.jit(layer.apply), args), mesh=None)]
  )
  count = expected_distinct(
    config.num_experts, config.num_chosen_experts, num_tokens
  )
  # Gate, up and down of each.
  matrices = 3 * config.embed_dim * config.expert_dim
  least = count * matrices * bits / 8
  moved = hlo.Program(program.as_text()).cost().memory_bytes
  assert least < moved < 1.04 * least
  table = config.num_experts * matrices * bits / 8
  assert program.memory_analysis().temp_size_in_bytes < table / 1000


# Changes of sizes: few layers, one of each type, and few tokens, so that what
# layers read outweighs the logits.
_FEW = {'num_layers': 4, 'windows': (1024, 0), 'vocab_size': 4096}


@pytest.mark.usefixtures('named')
@pytest.mark.parametrize('weights', [None, 'int8', 'int4'])
@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    ('gemma4_31b', {}),
    ('gemma4_26b_a4b', {}),
    # Two layers read the keys of the others. The table of embeddings for each
    # layer, 537 MB in bfloat16, is only looked up.
    ('gemma4_e4b', {'num_shared_layers': 2}),
  ],
)
def test_a_call_of_a_gemma_4_reads_its_weights_once(name, changes, weights):
  """Five positions: of experts, those that are chosen on average."""
  config = dataclasses.replace(
    presets.PRESETS[name], dtype=jnp.bfloat16, **_FEW, **changes
  )
  model, num_tokens = families.language_model(config), 5
  params = families.param_shapes(config)
  params = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.bfloat16), params)
  if weights is not None:
    params = quantized.packed(params, quantized.bits_of(weights))
  init = lambda params, prompt: model.init(params, prompt, 256)
  cache = jax.eval_shape(init, params, toy.prompt([[1]]))
  tokens = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
  slice_ = aot.find_slice('v5e:1x1')
  where = SingleDeviceSharding(slice_.devices[0])
  args = jax.tree.map(
    lambda leaf: leaf.update(sharding=where), (params, tokens, cache)
  )
  extend = jax.jit(model.extend, donate_argnums=2)
  [(program, _)] = aot.compile_all([aot.Job(Part(extend, args), mesh=None)])
  least = mesh_lib.tree_bytes(cache)
  for path, leaf in jax.tree.leaves_with_path(params):
    names = jax.tree_util.keystr(path)
    share = 0.0 if 'per_layer_embedder' in names else 1.0
    if 'expert_w' in names:
      size = config.num_experts
      count = expected_distinct(size, config.num_chosen_experts, num_tokens)
      share = float(count) / size
    least += share * mesh_lib.tree_bytes(leaf)
  moved = hlo.Program(program.as_text()).cost().memory_bytes
  assert least < moved < 1.05 * least
