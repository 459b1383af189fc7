"""Losses that are summed over positions a few at a time, to save memory.

The values computed for a position, such as logits, can be much larger than its
inputs, and many positions have no loss.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.training.losses import ArrayTree, LossSums

# `(params, inputs, constants, shared) -> LossSums`; see `summed`.
SumsFn = Callable[[ArrayTree, ArrayTree, ArrayTree, ArrayTree], LossSums]
# The arguments without gradients: constants, shared, and the number of parts.
_Rest = tuple[ArrayTree, ArrayTree, Array]


def summed(
  fn: SumsFn,
  params: ArrayTree,
  inputs: ArrayTree,
  constants: ArrayTree,
  shared: ArrayTree,
  *,
  is_needed: Array,
  size: int = 128,
) -> LossSums:
  """Sums `fn` over the positions that are needed, `size` at a time.

  `fn` sums over any number of positions, and adds 0 for one that is not needed.
  `inputs` and `constants` are arrays `[N, ...]`, one row per position; all
  positions read `shared`. The loss has gradients for `params` and `inputs`.
  """
  # On a mesh all positions are one part, so that none moves between devices.
  if is_on_mesh():
    return fn(params, inputs, constants, shared)
  # Needed positions come first, in order: of [no, yes, no, yes] the order is
  # [1, 3, 0, 2], and of the parts of 2 only one is computed.
  order = jnp.argsort(~is_needed, stable=True)
  inputs, constants = padded((inputs, constants), order, size)
  rest = constants, shared, num_parts(is_needed, size)
  return _summed(fn, size, params, inputs, rest)


def is_on_mesh() -> bool:
  """Tells whether a mesh of several devices is set."""
  mesh = jax.sharding.get_abstract_mesh()
  return not mesh.empty and mesh.size > 1


def num_parts(is_needed: Array, size: int) -> Array:
  """Counts the parts with needed positions, once these come first."""
  return -(-jnp.sum(is_needed, dtype=jnp.int32) // size)


def padded(inputs: ArrayTree, order: Array, size: int) -> ArrayTree:
  """Orders arrays `[N, ...]` and rounds N up to parts."""

  def of_whole_parts(x: Array) -> Array:
    rest = [(0, 0)] * (x.ndim - 1)
    x = jnp.take(x, order, axis=0, mode='clip')
    # 5 positions in parts of 2 are 6.
    return jnp.pad(x, [(0, -order.size % size), *rest])

  return jax.tree.map(of_whole_parts, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(
  fn: SumsFn, size: int, params: ArrayTree, inputs: ArrayTree, rest: _Rest
) -> LossSums:
  # The gradient is computed along with the sums, so that no activations of a
  # part are stored; the compiler removes it where it is unused.
  return _forward(fn, size, params, inputs, rest)[0]


def _forward(
  fn: SumsFn, size: int, params: ArrayTree, inputs: ArrayTree, rest: _Rest
) -> tuple[LossSums, ArrayTree]:
  """Computes the sums of `fn`, and the gradients of their loss."""
  constants, shared, count = rest

  def differentiated(i: Array | int) -> tuple[ArrayTree, LossSums]:
    part_inputs, part_constants = part((inputs, constants), i, size)

    def loss_of(params: ArrayTree, inputs: ArrayTree) -> tuple[Array, LossSums]:
      sums = fn(params, inputs, part_constants, shared)
      return sums.loss, sums

    return jax.grad(loss_of, (0, 1), has_aux=True)(params, part_inputs)

  # Gradients of parameters add up over parts, in float32 whatever their dtype;
  # those of inputs are written to the part's positions.
  def add(i: Array, carry: ArrayTree) -> ArrayTree:
    sums, to_params, to_inputs = carry
    (by_params, by_inputs), part_sums = differentiated(i)
    put = lambda gradients, rows: jax.lax.dynamic_update_slice_in_dim(
      gradients, rows, i * size, axis=0
    )
    return (
      jax.tree.map(jnp.add, sums, part_sums),
      jax.tree.map(lambda x, y: x + y.astype(x.dtype), to_params, by_params),
      jax.tree.map(put, to_inputs, by_inputs),
    )

  _, shapes = jax.eval_shape(differentiated, 0)
  totals = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  carry = _zeros(shapes), totals, _zeros(inputs)
  sums, totals, to_inputs = jax.lax.fori_loop(0, count, add, carry)
  to_params = jax.tree.map(lambda x, y: x.astype(y.dtype), totals, params)
  return sums, (to_params, to_inputs)


def _backward(
  fn: SumsFn, size: int, gradients: ArrayTree, cotangent: LossSums
) -> ArrayTree:
  del fn, size
  # Only the loss has a cotangent, which scales the stored gradients.
  scaled = lambda x: x * cotangent.loss.astype(x.dtype)
  return *jax.tree.map(scaled, gradients), None


_summed.defvjp(_forward, _backward)


def part(arrays: ArrayTree, index: Array | int, size: int) -> ArrayTree:
  """Takes `size` positions of arrays `[N, ...]`."""
  take = lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=0)
  return jax.tree.map(take, arrays)


def _zeros(shapes: ArrayTree) -> ArrayTree:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
