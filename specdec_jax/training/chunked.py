"""Losses that are summed over positions a few at a time.

What is computed of a position, such as logits, can be much larger than what it
is computed of, and many positions have no loss.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.training.losses import ArrayTree, LossSums

# `(params, inputs, constants, shared) -> LossSums`; see `summed`.
SumsFn = Callable[[ArrayTree, ArrayTree, ArrayTree, ArrayTree], LossSums]
# What is not differentiated: constants, what is shared, and how many parts.
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

  The gradient is computed along with them, so that nothing of a part is kept.
  On a mesh all positions are one part, which stays on its devices.

  Args:
    fn: sums over any number of positions, 0 for one that is not needed.
    params: what the loss is differentiated by, and
    inputs: of each position, arrays `[N, ...]`.
    constants: further arrays `[N, ...]`.
    shared: arrays that all positions read.
    is_needed: bool `[N]`.
    size: positions at a time.
  """
  if _is_on_mesh():
    return fn(params, inputs, constants, shared)
  # Those needed come first, in their order: of [no, yes, no, yes] the order is
  # [1, 3, 0, 2], and in parts of 2 a single one is computed.
  order = jnp.argsort(~is_needed, stable=True)
  inputs, constants = _padded((inputs, constants), order, size)
  rest = constants, shared, _num_parts(is_needed, size)
  return _summed(fn, size, params, inputs, rest)


def each(
  fn: Callable[[ArrayTree], Array],
  inputs: ArrayTree,
  *,
  is_needed: Array,
  size: int = 128,
) -> Array:
  """Computes `fn` of the positions that are needed, `[N]`; the others are
  undefined; as `summed`, without gradients."""
  inputs = jax.lax.stop_gradient(inputs)
  if _is_on_mesh():
    return fn(inputs)
  order = jnp.argsort(~is_needed, stable=True)
  inputs = _padded(inputs, order, size)

  def put(i: Array, made: Array) -> Array:
    part = fn(_part(inputs, i, size))
    return jax.lax.dynamic_update_slice_in_dim(made, part, i * size, axis=0)

  made = _zeros(jax.eval_shape(fn, inputs))
  made = jax.lax.fori_loop(0, _num_parts(is_needed, size), put, made)
  # Row i of `made` belongs to position `order[i]`.
  made = made[: is_needed.size]
  return jnp.zeros_like(made).at[order].set(made, unique_indices=True)


def _is_on_mesh() -> bool:
  mesh = jax.sharding.get_abstract_mesh()
  return not mesh.empty and mesh.size > 1


def _num_parts(is_needed: Array, size: int) -> Array:
  return -(-jnp.sum(is_needed, dtype=jnp.int32) // size)


def _padded(inputs: ArrayTree, order: Array, size: int) -> ArrayTree:
  """Orders arrays `[N, ...]` and rounds N up to parts."""

  def padded(x: Array) -> Array:
    rest = [(0, 0)] * (x.ndim - 1)
    x = jnp.take(x, order, axis=0, mode='clip')
    return jnp.pad(x, [(0, -order.size % size), *rest])

  return jax.tree.map(padded, inputs)


def _primal(
  fn: SumsFn, size: int, params: ArrayTree, inputs: ArrayTree, rest: _Rest
) -> LossSums:
  constants, shared, num_parts = rest

  def add(i: Array, sums: LossSums) -> LossSums:
    own, other = _part((inputs, constants), i, size)
    return jax.tree.map(jnp.add, sums, fn(params, own, other, shared))

  first = _part((inputs, constants), 0, size)
  zeros = _zeros(jax.eval_shape(fn, params, *first, shared))
  return jax.lax.fori_loop(0, num_parts, add, zeros)


def _forward(
  fn: SumsFn, size: int, params: ArrayTree, inputs: ArrayTree, rest: _Rest
) -> tuple[LossSums, ArrayTree]:
  """Computes the sums of `_primal`, and the gradients of the loss."""
  constants, shared, num_parts = rest

  def differentiated(i: Array | int) -> tuple[ArrayTree, LossSums]:
    own_inputs, own_constants = _part((inputs, constants), i, size)

    def loss_of(params: ArrayTree, inputs: ArrayTree) -> tuple[Array, LossSums]:
      sums = fn(params, inputs, own_constants, shared)
      return sums.loss, sums

    return jax.grad(loss_of, (0, 1), has_aux=True)(params, own_inputs)

  # Gradients of parameters add up over parts, in float32 whatever their dtype;
  # those of inputs are put where the part's positions are.
  def add(i: Array, carry: ArrayTree) -> ArrayTree:
    sums, to_params, to_inputs = carry
    (by_params, by_inputs), found = differentiated(i)
    put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(
      whole, part, i * size, axis=0
    )
    return (
      jax.tree.map(jnp.add, sums, found),
      jax.tree.map(lambda x, y: x + y.astype(x.dtype), to_params, by_params),
      jax.tree.map(put, to_inputs, by_inputs),
    )

  _, shapes = jax.eval_shape(differentiated, 0)
  totals = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  carry = _zeros(shapes), totals, _zeros(inputs)
  sums, totals, to_inputs = jax.lax.fori_loop(0, num_parts, add, carry)
  to_params = jax.tree.map(lambda x, y: x.astype(y.dtype), totals, params)
  return sums, (to_params, to_inputs)


def _backward(
  fn: SumsFn, size: int, gradients: ArrayTree, cotangent: LossSums
) -> ArrayTree:
  del fn, size
  # The loss alone is differentiated, so its cotangent scales what is known.
  scaled = lambda x: x * cotangent.loss.astype(x.dtype)
  return *jax.tree.map(scaled, gradients), None


_summed: jax.custom_vjp[LossSums] = jax.custom_vjp(
  _primal, nondiff_argnums=(0, 1)
)
_summed.defvjp(_forward, _backward)


def _part(arrays: ArrayTree, index: Array | int, size: int) -> ArrayTree:
  take = lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=0)
  return jax.tree.map(take, arrays)


def _zeros(shapes: ArrayTree) -> ArrayTree:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
