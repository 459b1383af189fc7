"""Matrix products, and copies of weights that a CPU multiplies faster.

Kernels are `[in, out]`. Every product accumulates in float32, whatever the
dtype of weights and activations. docs/design/cpu.md gives the reasons.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import layout

from specdec_jax.base import Array
from specdec_jax.launch import platforms
from specdec_jax.models import quantized
from specdec_jax.models.quantized import FLOAT32, ROWS, SCALE, TILES, TRANSPOSED

# The parameters of a network: nested dictionaries of arrays.
Weights = dict[str, Any]

_dot = functools.partial(jnp.tensordot, preferred_element_type=jnp.float32)

# The projections of an attention.
PROJECTIONS = ('query', 'key', 'value')
# Projections that read one input, by module; see `with_cpu_copies`.
_ONE_INPUT = {'self_attention': PROJECTIONS, 'mlp': ('wi_0', 'wi_1')}
# Ends of the names of embeddings that no logits reuse.
_LOOKED_UP = ('_positions', 'per_layer_embedder')
# The most rows of activations that are multiplied by a kernel's rows, and by
# its tiles: the time steps after five.
_MOST_BY_ROWS, MOST_BY_TILES = 16, 5
# Columns of a tile: the fastest of 16 to 512.
_TILE = 64
# Bytes of weights that stay in a CPU's caches from one call to the next.
_CACHED = 64 * 2**20


@jax.custom_vjp
def matmul(x: Array, kernel: Array) -> Array:
  """Computes `x @ kernel` in float32; both and cotangents have one dtype."""
  return _dot(x, kernel, 1)


def _matmul_backward(saved: Any, cotangent: Array) -> tuple[Array, Array]:
  x, kernel = saved
  # x is [..., in], the kernel [in, out]: x gets `cotangent @ kernel.T`, and the
  # kernel `x.T @ cotangent`, summed over all rows. The cotangent is rounded:
  # products of float32 with bfloat16 take twice the time of bfloat16 alone.
  cotangent = cotangent.astype(kernel.dtype)
  rows = tuple(range(x.ndim - 1))
  to_x = _dot(cotangent, kernel, (-1, 1))
  if is_cpu_alone() and kernel.dtype == jnp.bfloat16:
    flat = lambda a: a.reshape(-1, a.shape[-1])
    to_kernel = _dot(row_major(flat(x).T), flat(cotangent), 1)
  else:
    to_kernel = _dot(x, cotangent, (rows, rows))
  return to_x.astype(x.dtype), to_kernel.astype(kernel.dtype)


matmul.defvjp(
  lambda x, kernel: (matmul(x, kernel), (x, kernel)), _matmul_backward
)


def is_cpu_alone() -> bool:
  """Tells whether computation runs on one CPU device."""
  mesh = jax.sharding.get_abstract_mesh()
  return jax.default_backend() == 'cpu' and (mesh.empty or mesh.size == 1)


def row_major(x: Array) -> Array:
  """Returns a matrix whose layout in memory is row-major."""
  # XLA:CPU multiplies bfloat16 in float32 if a product contracts the first axis
  # of its first operand, and takes two to three times as long; a transpose
  # alone is folded into the product.
  return layout.with_layout_constraint(x, layout.Layout((0, 1)))


def by_kernel(
  module: nn.Module, x: Array, kernel: Array, name: str = 'kernel'
) -> Array:
  """Computes `x @ kernel` in float32, with `x` rounded to the kernel's dtype.

  `name` is the kernel's among the module's parameters: few rows are multiplied
  by its copies, if there are any, and packed weights by `quantized.product`.
  """
  if module.has_variable('params', name + SCALE):
    scale: Array = module.get_variable('params', name + SCALE)
    return quantized.product(x, kernel, scale)
  copy, rows, tiles = FLOAT32 + name, ROWS + name, TILES + name
  num_rows, is_tall = x.size // x.shape[-1], kernel.shape[0] > kernel.shape[1]
  by_row = num_rows <= _MOST_BY_ROWS and module.has_variable('params', rows)
  if by_row and (num_rows > 1 or is_tall or platforms.is_intel()):
    return by_rows(x, module.get_variable('params', rows))
  if 1 < num_rows <= MOST_BY_TILES and module.has_variable('params', tiles):
    return by_tiles(x, module.get_variable('params', tiles))
  if num_rows > 1 or not module.has_variable('params', copy):
    return matmul(x.astype(kernel.dtype), kernel)
  # `reduce_precision`, since XLA would drop a cast there and back: a row's
  # logits would depend on whether it is alone.
  info = jnp.finfo(kernel.dtype)
  x = jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
  single: Array = module.get_variable('params', copy)
  is_transposed = single.shape[0] != x.shape[-1]
  return _dot(x, single, (-1, 1)) if is_transposed else matmul(x, single)


def by_rows(x: Array, rows: Array) -> Array:
  """Computes `x @ rows.T` in float32, with `x` rounded to the dtype of `rows`,
  `[out, in]`, in the way that XLA:CPU multiplies fastest."""
  x = x.astype(rows.dtype)
  if x.size == x.shape[-1]:
    return _dot(x, rows, (-1, 1))
  # [out, in] by [B, T, in] is [out, B, T].
  return jnp.moveaxis(_dot(rows, x, (1, -1)), 0, -1)


def by_tiles(x: Array, tiles: Array) -> Array:
  """Computes `x @ kernel` as `by_rows` does, with the tiles of `tiled`."""
  rows = x.astype(tiles.dtype).reshape(-1, x.shape[-1])
  # Tiles [48, 576, 64] and 4 rows: 48 products [4, 576] by [576, 64], which
  # are [48, 4, 64], and side by side [4, 3072].
  rows = jnp.broadcast_to(rows[None], (tiles.shape[0], *rows.shape))
  y = jnp.matmul(rows, tiles, preferred_element_type=jnp.float32)
  return y.transpose(1, 0, 2).reshape(*x.shape[:-1], -1)


def tiled(kernel: Array) -> Array:
  """Cuts `[in, out]` into tiles of 64 columns, `[out / 64, in, 64]`."""
  return kernel.reshape(kernel.shape[0], -1, _TILE).transpose(1, 0, 2)


def with_cpu_copies(params: Weights, *, is_tied: bool) -> Weights:
  """Adds copies of weights that a CPU multiplies faster; returns the parameters
  unchanged on accelerators.

  Applies to parameters of one dtype, except an encoder's. Kernels of one input
  are joined. Embeddings that the logits reuse (`is_tied`) get a transposed
  copy. Kernels in float32 get their rows, `[out, in]`, where `multiplies_rows`,
  and elsewhere tiles, if their columns can be cut into these. A single row
  reads rows on Intel's processors, or of a kernel with more inputs than
  outputs. Unless there are rows, kernels not in float32 get a float32 copy for
  single rows, and kernels with more inputs than outputs a float32 transposed
  one. Packed weights are only joined.
  """
  if jax.default_backend() != 'cpu':
    return params
  return _with_copies(params, is_tied, multiplies_rows(params))


def _with_copies(params: Weights, is_tied: bool, has_rows: bool) -> Weights:
  # An encoder runs once per decode, so copies of its weights would not pay.
  copied = {}
  for name, value in params.items():
    if isinstance(value, dict) and name != 'encoder':
      if name in _ONE_INPUT:
        value = _join(value, _ONE_INPUT[name])
      is_projected = is_tied and not name.endswith(_LOOKED_UP)
      value = _with_copies(value, is_projected, has_rows)
    copied[name] = value
  if is_tied and 'embedding' in params and 'embedding' + SCALE not in params:
    copied.setdefault(TRANSPOSED, params['embedding'].T)
  for name in ('kernel', TRANSPOSED):
    kernel = copied.get(name)
    # Kernels of experts have no copies: each is read when it is chosen.
    if kernel is None or name + SCALE in copied or kernel.ndim > 2:
      continue
    is_float32 = kernel.dtype == jnp.float32
    if has_rows and is_float32:
      of_whole = name == TRANSPOSED and name not in params
      copied[ROWS + name] = params['embedding'] if of_whole else kernel.T
      continue
    if is_float32 and kernel.shape[1] % _TILE == 0:
      copied[TILES + name] = tiled(kernel)
    # A row times a tall matrix reads it in strides, unless it is transposed.
    is_tall = name == 'kernel' and kernel.shape[0] > kernel.shape[1]
    if is_tall or not is_float32:
      single = kernel.astype(jnp.float32)
      copied[FLOAT32 + name] = single.T if is_tall else single
  return copied


def multiplies_rows(params: Weights) -> bool:
  """Whether this machine multiplies a few rows of activations faster by the
  rows of these kernels than by their columns: processors without AVX-512 do,
  and Intel's, if the weights are too large for a cache."""
  leaves = jax.tree.leaves({**params, 'encoder': {}})
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
  is_large = size > _CACHED
  return platforms.lacks_avx512() or (is_large and platforms.is_intel())


def _join(params: dict, names: Sequence[str]) -> dict:
  """Joins the parameters of several `Dense` of a module into one."""
  if not all(name in params for name in names):
    return params
  parts = [params[name] for name in names]
  joint = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, -1), *parts)
  rest = {name: leaf for name, leaf in params.items() if name not in names}
  return {joint_name(names): joint, **rest}


def joint_name(names: Iterable[str]) -> str:
  """Names the `Dense` that joins several, such as `query_key_value`."""
  return '_'.join(names)
