"""Quantized weights: integers of few bits, and their scales.

The conventions are those of qwix (github.com/google/qwix, its `QArray`):
symmetric, from the largest magnitude, to all values that the bits have, and
scales of the weights' rank. A quantized matrix has the same name and shape; the
float32 scales of `kernel` are `kernel_scale`. Activations are not quantized:
products are of the integers in the activations' dtype, and the scale is applied
to the result.
"""

import functools
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.base import Array, Arrays

# Ends the names of scales.
SCALE = '_scale'
# Matrices, by the end of their path, and the axis that products sum over, from
# the end: kernels of experts lie one after the other.
_CONTRACTED = {'kernel': -2, 'embedding': -1}
# How names of the copies of `products.with_cpu_copies` begin: of a kernel in
# float32, of its rows, of its tiles, and of tied embeddings as the kernel of
# their logits, which is the whole name.
FLOAT32, ROWS, TILES = 'float32_', 'rows_of_', 'tiles_of_'
TRANSPOSED = 'transposed_embedding'
COPIES = FLOAT32, ROWS, TILES, TRANSPOSED


class Bits(NamedTuple):
  """The quantization of weights.

  Attributes:
    bits: of a weight; stored in 4 bits if at most 4, but on CPUs, else in 8.
    group: the number of weights that share a scale, along the contracted axis;
      None for all of an output channel, or of an embedding.
  """

  bits: int
  group: int | None = None


def bits_of(text: str) -> Bits:
  """Reads `int8`, `int4` or, with a group, `int4:64`; ValueError for others."""
  match = re.fullmatch(r'int([2-8])(?::([1-9]\d*))?', text)
  if not match:
    raise ValueError(
      f'weights {text!r} are none of int8, int4 or, with a scale for every 64 '
      'of them, int4:64'
    )
  return Bits(int(match[1]), int(match[2]) if match[2] else None)


def is_scale(name: str) -> bool:
  """Tells whether a parameter of this name holds scales of packed weights, as
  `kernel_scale` does, and a router's `per_expert_scale` does not."""
  return name.endswith(SCALE) and name.removesuffix(SCALE) in _CONTRACTED


def is_packed(leaf: Any) -> bool:
  """Tells whether an array or shape holds packed weights."""
  return bool(jnp.issubdtype(leaf.dtype, jnp.signedinteger)) and (
    leaf.dtype.itemsize == 1
  )


def packed(params: Arrays, bits: Bits, *, keep: Collection[str] = ()) -> Arrays:
  """Quantizes the matrices of a tree of parameters, arrays or shapes.

  Names in `keep`, and other leaves, stay the same objects. Matrices of more
  bits are quantized again; copies for CPUs are left out. Raises ValueError if a
  group does not divide an axis.
  """
  tree: dict[str, Arrays] = {}
  for name, leaf in params.items():
    if name in keep:
      tree[name] = leaf
    elif isinstance(leaf, dict):
      tree[name] = packed(leaf, bits, keep=keep)
    elif name in _CONTRACTED:
      values, scale = leaf, params.get(name + SCALE)
      axis = _contracted(name, leaf)
      if not _is_in(values, scale, bits, axis):
        values, scale = _packed(values, scale, bits, axis)
      tree |= {name: _narrow(values, bits), name + SCALE: scale}
    elif name not in tree and not name.startswith(COPIES):
      tree[name] = leaf
  return tree


def _contracted(name: str, leaf: Any) -> int:
  """Returns the axis that products contract, counted from 0."""
  return len(leaf.shape) + _CONTRACTED[name]


def _is_in(values: Arrays, scale: Arrays, bits: Bits, axis: int) -> bool:
  """Tells whether a matrix already has at most these bits, and these groups."""
  if scale is None or scale.shape[axis] != (
    values.shape[axis] // (bits.group or values.shape[axis])
  ):
    return False
  if isinstance(values, jax.ShapeDtypeStruct):
    return int(jnp.iinfo(values.dtype).bits) <= bits.bits
  most = jnp.max(jnp.abs(values.astype(jnp.int32)))
  return bool(most <= 2 ** (bits.bits - 1))


def _packed(
  weights: Arrays, scale: Arrays, bits: Bits, axis: int
) -> tuple[Arrays, Arrays]:
  """Quantizes a matrix, which may have another quantization."""
  pack = functools.partial(_pack, bits=bits, axis=axis)
  if isinstance(weights, jax.ShapeDtypeStruct):
    values, scale = jax.eval_shape(pack, weights)
    return values.update(sharding=weights.sharding), scale
  if scale is not None:
    weights = unpacked(weights, scale)
  return pack(weights)


def _narrow(values: Arrays, bits: Bits) -> Arrays:
  """Converts integers to the smallest dtype for these bits."""
  if bits.bits > 4:
    return values
  if isinstance(values, jax.ShapeDtypeStruct):
    return values.update(dtype=jnp.int4)
  # 4-bit types are slow on CPUs, and programs disagree about their layout.
  is_cpu = jax.default_backend() == 'cpu'
  return values if is_cpu else values.astype(jnp.int4)


def in_bytes(params: Arrays) -> Arrays:
  """Converts every packed weight to int8."""
  return jax.tree.map(
    lambda x: x.astype(jnp.int8) if is_packed(x) else x, params
  )


def name_of(params: Arrays) -> str | None:
  """Returns the quantization of a tree, as `bits_of` reads it; None without."""
  pairs = [*_pairs(params)]
  if not pairs:
    return None
  # A full range: the highest is 7 or the lowest -8 in 4 bits.
  most = max(max(int(x.max()) + 1, -int(x.min())) for _, x, _ in pairs)
  groups = (x.shape[i] // s.shape[i] for i, x, s in pairs if s.shape[i] > 1)
  end = ''.join(f':{group}' for group in {*groups})
  return f'int{max(most, 2).bit_length()}{end}'


def _pairs(params: Arrays) -> Iterator[tuple[int, Arrays, Arrays]]:
  """Yields the axis, the integers and the scales of every quantized matrix."""
  for name, leaf in params.items():
    if isinstance(leaf, dict):
      yield from _pairs(leaf)
    elif name in _CONTRACTED and name + SCALE in params:
      yield _contracted(name, leaf), leaf, params[name + SCALE]


@functools.partial(jax.jit, static_argnames=('bits', 'axis'))
def _pack(weights: Array, *, bits: Bits, axis: int) -> tuple[Array, Array]:
  """Quantises a matrix: int8 of its shape, and scales."""
  size = weights.shape[axis]
  group = bits.group or size
  if size % group:
    raise ValueError(
      f'groups of {group} weights do not divide an axis of {size}: use a '
      'group size that does, or none'
    )
  # [4, out] in groups of 2 is [2, 2, out], with maxima [2, 1, out].
  shape = list(weights.shape)
  shape[axis : axis + 1] = [size // group, group]
  grouped = weights.astype(jnp.float32).reshape(shape)
  most = jnp.max(jnp.abs(grouped), axis=axis + 1, keepdims=True)
  # The limit is half a step beyond the largest integer, so that it stands for
  # an interval as wide as that of the others.
  limit = 2 ** (bits.bits - 1)
  scale = jnp.where(most == 0, 1.0, most / (limit - 0.5))
  values = jnp.clip(jnp.round(grouped / scale), -limit, limit - 1)
  values = values.reshape(weights.shape).astype(jnp.int8)
  return values, jnp.squeeze(scale, axis + 1)


def unpacked(values: Array, scale: Array, dtype: Any = jnp.float32) -> Array:
  """Dequantizes weights."""
  # Scales [2, out] of values [4, out]: one for every 2 of 4 rows.
  for axis, (size, count) in enumerate(
    zip(values.shape, scale.shape, strict=True)
  ):
    if count not in (1, size):
      scale = jnp.repeat(scale, size // count, axis=axis)
  return (values.astype(jnp.float32) * scale).astype(dtype)


def product(x: Array, values: Array, scale: Array, axis: int = 0) -> Array:
  """Multiplies `[..., in]` by packed weights `[in, out]`, or `[out, in]` with
  `axis` 1, to float32 `[..., out]`."""
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  num_groups = scale.shape[axis]
  if num_groups == 1:
    y = dot(('...i,io->...o', '...i,oi->...o')[axis], x, values.astype(x.dtype))
    return y * jnp.expand_dims(scale.reshape(-1), tuple(range(y.ndim - 1)))
  if x.size == x.shape[-1]:
    # A TPU writes the weights of a product of one row to memory in float.
    return product(jnp.repeat(x, 2, axis=0), values, scale, axis)[:1]
  # Weights in float would be written to memory, unlike the sums of groups:
  # [in, out] in groups of g is [in / g, g, out], and sums are [in / g, out].
  shape = list(values.shape)
  shape[axis : axis + 1] = [num_groups, shape[axis] // num_groups]
  x = x.reshape(*x.shape[:-1], num_groups, -1)
  terms = ('...gi,gio->...go', '...gi,ogi->...go')[axis]
  sums_in = lambda dtype, x, q: dot(terms, x.astype(dtype), q.astype(dtype))
  # XLA:CPU has no batched product of bfloat16 that accumulates in float32.
  sums = jax.lax.platform_dependent(
    *(x, values.reshape(shape)),
    cpu=functools.partial(sums_in, jnp.float32),
    default=functools.partial(sums_in, x.dtype),
  )
  scale = scale if axis == 0 else scale.T
  scale = jnp.expand_dims(scale, tuple(range(sums.ndim - 2)))
  return jnp.sum(sums * scale, axis=-2)


def look_up(params: Arrays, tokens: Array, dtype: Any) -> Array:
  """Looks up rows `[B, T, embed]` in the parameters of an `Embed`; ids clip."""
  rows_of = lambda name: jnp.take(params[name], tokens, axis=0, mode='clip')
  scale = 'embedding' + SCALE
  if scale not in params:
    return rows_of('embedding').astype(dtype)
  if tokens.size > 1:
    return unpacked(rows_of('embedding'), rows_of(scale), dtype)
  # A TPU would lay the whole table out anew for a slice of one row.
  return look_up(params, jnp.repeat(tokens, 2, axis=1), dtype)[:, :1]
