"""Feed-forwards of experts, of which each token goes through some."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.models import experts, quantized
from specdec_jax.models.quantized import Bits
from specdec_jax.sharding import mesh as mesh_lib

EMBED, WIDTH = 12, 8


def routed(num_tokens: int, num_experts: int, num_chosen: int, *, seed: int):
  """Tokens `[2, T, embed]`, and the experts that they chose."""
  keys = jax.random.split(jax.random.key(seed))
  x = jax.random.normal(keys[0], (2, num_tokens, EMBED))
  logits = jax.random.normal(keys[1], (2, num_tokens, num_experts))
  return x, *experts.choose(logits, num_chosen, is_normalized=True)


def make(num_experts: int, width: int = WIDTH):
  """The layer, and random params."""
  layer = experts.Experts(num_experts, width, 'silu')
  x, ids, weights = routed(1, num_experts, 1, seed=0)
  return layer, layer.init(jax.random.key(1), x, ids, weights)


def reference(params, x, ids, weights) -> np.ndarray:
  """Each token through its own experts, in numpy."""
  kernels = [np.asarray(params['params'][f'expert_{w}']['kernel'], np.float64)
             for w in ('wi', 'wo')]  # fmt: skip
  x, ids, weights = map(np.asarray, (x, ids, weights))
  total = np.zeros(x.shape)
  for place in np.ndindex(x.shape[:2]):
    for expert, weight in zip(ids[place], weights[place], strict=True):
      gate, up = (x[place] @ kernels[0][expert, i] for i in range(2))
      hidden = gate / (1 + np.exp(-gate)) * up
      total[place] += weight * (hidden @ kernels[1][expert])
  return total


@pytest.mark.parametrize('num_tokens', [1, 7, 200])
@pytest.mark.parametrize(('size', 'chosen'), [(5, 2), (4, 1), (3, 3)])
def test_each_token_goes_through_its_experts(num_tokens, size, chosen):
  """Few tokens, which visit experts one by one, and many, in groups."""
  layer, params = make(size)
  inputs = routed(num_tokens, size, chosen, seed=2)
  np.testing.assert_allclose(
    jax.jit(layer.apply)(params, *inputs),
    reference(params, *inputs),
    rtol=0,
    atol=1e-6,
  )


def test_groups_of_one_expert_may_be_many():
  """All 400 tokens choose the same expert of three."""
  layer, params = make(3)
  x, ids, weights = routed(200, 3, 1, seed=2)
  inputs = x, jnp.ones_like(ids), weights
  np.testing.assert_allclose(
    layer.apply(params, *inputs), reference(params, *inputs), rtol=0, atol=1e-6
  )


@pytest.mark.parametrize('num_tokens', [3, 200])
def test_an_expert_that_overflows_spoils_those_alone_that_chose_it(num_tokens):
  layer, params = make(4)
  x, ids, weights = routed(num_tokens, 4, 1, seed=3)
  ids = ids.at[0, 0].set(2).at[1].set(0)
  kernel = params['params']['expert_wi']['kernel']
  params['params']['expert_wi']['kernel'] = kernel.at[2].set(jnp.inf)
  mixed = layer.apply(params, x, ids, weights)
  chose_it = np.asarray(ids[..., 0] == 2)
  is_finite = np.isfinite(np.asarray(mixed)).all(-1)
  np.testing.assert_array_equal(is_finite, ~chose_it)


def test_bits_do_not_depend_on_what_others_choose():
  layer, params = make(6)
  apply = jax.jit(layer.apply)
  x, ids, weights = routed(5, 6, 2, seed=4)
  expected = apply(params, x, ids, weights)[0]
  for seed in range(5, 9):
    other = routed(5, 6, 2, seed=seed)
    mixed = [
      jnp.stack([mine[0], theirs[1]])
      for mine, theirs in zip((x, ids, weights), other, strict=True)
    ]
    np.testing.assert_array_equal(apply(params, *mixed)[0], expected)


@pytest.mark.parametrize('bits', [Bits(8), Bits(4, 4)])
def test_packed_kernels_are_what_they_stand_for(bits):
  layer, params = make(4)
  packed = quantized.packed(params, bits)
  assert packed['params']['expert_wi']['kernel'].dtype == jnp.int8
  whole = jax.tree.map(lambda x: x, params)
  for name in ('expert_wi', 'expert_wo'):
    leaves = packed['params'][name]
    unpacked = quantized.unpacked(leaves['kernel'], leaves['kernel_scale'])
    whole['params'][name] = {'kernel': unpacked}
  inputs = routed(4, 4, 2, seed=5)
  np.testing.assert_allclose(
    layer.apply(packed, *inputs), layer.apply(whole, *inputs), atol=1e-5
  )


def test_weights_are_those_of_the_softmax():
  logits = jnp.array([[[0.0, 2.0, 1.0]]])
  probs = np.asarray(jax.nn.softmax(logits))[0, 0]
  ids, weights = experts.choose(logits, 2, is_normalized=False)
  assert ids[0, 0].tolist() == [1, 2]
  np.testing.assert_allclose(weights[0, 0], probs[[1, 2]], rtol=1e-6)
  _, weights = experts.choose(logits, 2, is_normalized=True)
  np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)


def on_eight_devices(params):
  """A context of rows over two devices and experts over four, and the params
  where they are to be."""
  mesh = mesh_lib.make(num_partitions=4)
  mesh_lib.check_divides(mesh, params, batch_size=2)
  places = mesh_lib.parameter_shardings(mesh, params)
  return jax.set_mesh(mesh), jax.device_put(params, places)


@pytest.mark.parametrize(
  ('num_experts', 'width', 'bits', 'shares'),
  [
    # Parts of each kernel that a device has: of the experts, and of the width.
    (4, 8, None, (4, 2)),
    (4, 8, Bits(8), (4, 2)),
    (4, 8, Bits(4, 2), (4, 2)),
    # A width of 6, or 3 groups of 4, do not divide by four devices.
    (8, 6, None, (2, 6)),
    (8, 6, Bits(8), (2, 6)),
    (8, 12, Bits(4, 4), (2, 12)),
  ],
)
@pytest.mark.parametrize('num_tokens', [3, 300])
def test_devices_split_the_width_of_each_expert_or_the_experts(
  num_tokens, num_experts, width, bits, shares
):
  layer, params = make(num_experts, width)
  if bits is not None:
    params = quantized.packed(params, bits)
  inputs = routed(num_tokens, num_experts, 2, seed=6)
  expected = jax.jit(layer.apply)(params, *inputs)
  mesh, placed = on_eight_devices(params)
  kernel = placed['params']['expert_wo']['kernel']
  assert kernel.sharding.shard_shape(kernel.shape) == (*shares, EMBED)
  with mesh:
    split = jax.jit(layer.apply).lower(placed, *inputs)
    compiled = split.compile()
    mixed = compiled(placed, *inputs)
  np.testing.assert_allclose(mixed, expected, rtol=0, atol=1e-6)
  # One sum over devices, behind the loop; kernels stay where they are.
  assert split.as_text().count('all_reduce') == 1
  kernels = num_experts * width * EMBED
  gathered = re.findall(r'\[([\d,]+)\]\S* all-gather', compiled.as_text())
  assert all(
    np.prod([int(size) for size in sizes.split(',')]) < kernels
    for sizes in gathered
  )


def test_a_device_without_chosen_experts_adds_nothing():
  """All tokens choose the first two of eight experts, one device's own."""
  layer, params = make(8, 6)
  x, ids, weights = routed(3, 8, 2, seed=6)
  inputs = x, jnp.broadcast_to(jnp.arange(2), ids.shape), weights
  mesh, placed = on_eight_devices(params)
  with mesh:
    mixed = jax.jit(layer.apply)(placed, *inputs)
  np.testing.assert_allclose(
    mixed, reference(params, *inputs), rtol=0, atol=1e-6
  )


def test_groups_that_devices_cannot_split_are_refused():
  layer, params = make(3)
  params = quantized.packed(params, Bits(4, 4))
  inputs = routed(3, 3, 2, seed=6)
  with (
    jax.set_mesh(mesh_lib.make(num_partitions=4)),
    pytest.raises(ValueError, match=r'2 groups .* nor 3 experts .* 4 devices'),
  ):
    jax.eval_shape(layer.apply, params, *inputs)


def test_experts_that_devices_cannot_split_are_refused():
  _, params = make(3, 6)
  with pytest.raises(ValueError, match=r'4 devices does not divide mlp of 6'):
    on_eight_devices(params)
