"""Layers that the networks share.

Kernels are `[in, out]`, by default without a bias, as in T5X. Every matrix
product accumulates in float32, whatever the dtype of weights and activations.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import layout

from specdec_jax.base import Array
from specdec_jax.models import quantized
from specdec_jax.models.quantized import SCALE

# The parameters of a network: nested dictionaries of arrays.
Weights = dict[str, Any]

# Products accumulate in float32.
_dot = functools.partial(jnp.tensordot, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _matmul(x: Array, kernel: Array) -> Array:
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


_matmul.defvjp(
  lambda x, kernel: (_matmul(x, kernel), (x, kernel)), _matmul_backward
)


def applied(network: nn.Module) -> Callable[..., Any]:
  """Returns `network.apply` as a function of the bare parameters."""
  return lambda params, *args, **options: network.apply(
    {'params': params}, *args, **options
  )


def parameter(
  module: nn.Module, name: str, init: Callable, shape: tuple[int, ...]
) -> Array:
  """Does what `module.param` does, faster if the parameter exists."""
  # Flax traces `init` at every call to compare shapes: a fifth of the time that
  # tracing a model takes.
  if module.has_variable('params', name):
    value: Array = module.get_variable('params', name)
    if value.shape == shape:
      return value
  return module.param(name, init, shape)


class Dense(nn.Module):
  """Computes `x @ kernel`, `[..., in]` to `[..., features]`, in `dtype`."""

  features: int
  dtype: jnp.dtype = jnp.float32
  use_bias: bool = False
  kernel_init: Callable = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, x: Array) -> Array:
    shape = x.shape[-1], self.features
    kernel = parameter(self, 'kernel', self.kernel_init, shape)
    y = _product(self, x, kernel, 'kernel')
    if self.use_bias:
      zeros = nn.initializers.zeros_init()
      bias = parameter(self, 'bias', zeros, (self.features,))
      # By hand, so that `jax_numpy_rank_promotion` may be 'raise'.
      y = y + jnp.expand_dims(
        bias.astype(jnp.float32), tuple(range(y.ndim - 1))
      )
    return y.astype(self.dtype)


def projections(
  module: nn.Module, x: Array, features: Mapping[str, int], **options: Any
) -> list[Array]:
  """Applies several `Dense`, given by name and size, to one input; as a single
  product if `with_cpu_copies` has joined their kernels."""
  joint = joint_name(features)
  if not module.has_variable('params', joint):
    return [
      Dense(size, name=name, **options)(x) for name, size in features.items()
    ]
  # Joined kernels are side by side: [in, 8 + 4 + 4] gives the split [8, 12].
  sizes = list(features.values())
  y = Dense(sum(sizes), name=joint, **options)(x)
  return jnp.split(y, np.cumsum(sizes)[:-1], axis=-1)


def query_key_value(
  module: nn.Module, x: Array, config: Any, **options: Any
) -> tuple[Array, Array, Array]:
  """Projects `[B, T, embed]` to queries, keys and values `[B, H, T, D]`;
  `config` has `num_heads`, `num_kv_heads` and `head_dim`."""
  num_heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
  widths = {
    name: count * config.head_dim
    for name, count in zip(PROJECTIONS, num_heads, strict=True)
  }
  queries, keys, values = (
    by_head(y, config.head_dim)
    for y in projections(module, x, widths, dtype=config.dtype, **options)
  )
  return queries, keys, values


def by_head(x: Array, head_dim: int) -> Array:
  """Splits `[B, T, H * D]` into heads, `[B, H, T, D]`, the layout of caches."""
  # Without the barrier, the compiler for a v5p splits the product itself into
  # heads, and changes each kernel's layout in every call.
  x = jax.lax.platform_dependent(
    x, tpu=jax.lax.optimization_barrier, default=lambda x: x
  )
  # 3 positions with 2 heads of 4 features: [1, 3, 8] becomes [1, 2, 3, 4].
  return x.reshape(*x.shape[:2], -1, head_dim).transpose(0, 2, 1, 3)


def joint_name(names: Iterable[str]) -> str:
  """Names the `Dense` that joins several, such as `query_key_value`."""
  return '_'.join(names)


def inverse_root(x: Array) -> Array:
  """Computes `1 / sqrt(x)` with bits that do not depend on x's index."""
  # Those of `rsqrt` do on a CPU (jax 0.12): of 8 rows of 5 numbers, the first 4
  # of each row are computed as a vector, and the last as a scalar. Quotients
  # and roots round alike in both. XLA would make rsqrt of 1 / sqrt(x).
  return jnp.sqrt(1 / x)


class RMSNorm(nn.Module):
  """Root-mean-square norm in float32, scaled; T5's layer norm and Llama's."""

  epsilon: float = 1e-6
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    ones = nn.initializers.ones_init()
    scale = parameter(self, 'scale', ones, (x.shape[-1],))
    # Squares in bfloat16 would lose half of their digits.
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    # Rounded before scaling, as in both original implementations.
    x = (x * inverse_root(mean_square + self.epsilon)).astype(self.dtype)
    scale = jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
    return x * scale.astype(self.dtype)


# The projections of an attention.
PROJECTIONS = ('query', 'key', 'value')
# Projections that read one input, by module; see `with_cpu_copies`.
_ONE_INPUT = {'self_attention': PROJECTIONS, 'mlp': ('wi_0', 'wi_1')}
# The projection to the vocabulary of a network that is not tied.
LOGITS = 'logits_dense'
# Names of the copies of `with_cpu_copies`: of tied embeddings as the kernel of
# their logits, of a kernel in float32, and of one as `[out, in]`.
TRANSPOSED, FLOAT32, ROWS = 'transposed_embedding', 'float32_', 'rows_of_'
# Rows of activations that are few, so that a kernel's rows are multiplied.
_FEW = 16
# Bytes of weights that stay in a CPU's caches from one call to the next.
_CACHED = 64 * 2**20


def _product(module: nn.Module, x: Array, kernel: Array, name: str) -> Array:
  """Computes `x @ kernel` in float32, with `x` rounded to the kernel's dtype: a
  single row by the kernel's float32 copy, if there is one, and packed weights
  by `quantized.product`."""
  if module.has_variable('params', name + SCALE):
    scale: Array = module.get_variable('params', name + SCALE)
    return quantized.product(x, kernel, scale)
  copy, rows = FLOAT32 + name, ROWS + name
  num_rows = x.size // x.shape[-1]
  if num_rows <= _FEW and module.has_variable('params', rows):
    return by_rows(x, module.get_variable('params', rows))
  if num_rows > 1 or not module.has_variable('params', copy):
    return _matmul(x.astype(kernel.dtype), kernel)
  # `reduce_precision`, since XLA would drop a cast there and back: a row's
  # logits would depend on whether it is alone.
  info = jnp.finfo(kernel.dtype)
  x = jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
  single: Array = module.get_variable('params', copy)
  is_transposed = single.shape[0] != x.shape[-1]
  return _dot(x, single, (-1, 1)) if is_transposed else _matmul(x, single)


def by_rows(x: Array, rows: Array) -> Array:
  """Computes `x @ rows.T` in float32, with `x` rounded to the dtype of `rows`,
  `[out, in]`, in the way that XLA:CPU multiplies fastest."""
  x = x.astype(rows.dtype)
  if x.size == x.shape[-1]:
    return _dot(x, rows, (-1, 1))
  # [out, in] by [B, T, in] is [out, B, T].
  return jnp.moveaxis(_dot(rows, x, (1, -1)), 0, -1)


class Embed(nn.Module):
  """Token embeddings `[V, embed]`, looked up and, when tied, projected back."""

  vocab_size: int
  embed_dim: int
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    shape = self.vocab_size, self.embed_dim
    init = nn.initializers.normal(stddev=1.0)
    self.embedding = parameter(self, 'embedding', init, shape)

  def __call__(self, tokens: Array) -> Array:
    """Looks up int32 `[B, T]`, as `[B, T, embed]`; ids out of range clip."""
    return quantized.look_up(self.variables['params'], tokens, self.dtype)

  def attend(self, x: Array) -> Array:
    """Projects `[B, T, embed]` to float32 logits `[B, T, V]`."""
    if self.has_variable('params', TRANSPOSED):
      kernel: Array = self.get_variable('params', TRANSPOSED)
      return _product(self, x, kernel, TRANSPOSED)
    scale = self.variables['params'].get('embedding' + SCALE)
    if scale is not None:
      return quantized.product(x, self.embedding, scale, axis=1)
    # Logits are products with the embeddings, `[..., embed] @ [embed, V]`.
    return _matmul(x.astype(self.embedding.dtype), self.embedding.T)


def with_cpu_copies(params: Weights, *, is_tied: bool) -> Weights:
  """Adds copies of weights that a CPU multiplies faster; returns the parameters
  unchanged on accelerators. docs/design/cpu.md gives the reasons.

  Applies to parameters of one dtype, except an encoder's. Kernels of one input
  are joined. Embeddings that the logits reuse (`is_tied`) get a transposed
  copy. Where `multiplies_rows`, kernels in float32 get their rows, `[out, in]`.
  Elsewhere, for single rows, kernels not in float32 get a float32 copy, and
  kernels with more inputs than outputs a float32 transposed one. Packed weights
  are only joined.
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
      value = _with_copies(value, is_tied, has_rows)
    copied[name] = value
  if is_tied and 'embedding' in params and 'embedding' + SCALE not in params:
    copied.setdefault(TRANSPOSED, params['embedding'].T)
  for name in ('kernel', TRANSPOSED):
    kernel = copied.get(name)
    if kernel is None or name + SCALE in copied:
      continue
    if has_rows and kernel.dtype == jnp.float32:
      of_whole = name == TRANSPOSED and name not in params
      copied[ROWS + name] = params['embedding'] if of_whole else kernel.T
      continue
    # A row times a tall matrix reads it in strides, unless it is transposed.
    is_tall = name == 'kernel' and kernel.shape[0] > kernel.shape[1]
    if is_tall or kernel.dtype != jnp.float32:
      single = kernel.astype(jnp.float32)
      copied[FLOAT32 + name] = single.T if is_tall else single
  return copied


def multiplies_rows(params: Weights) -> bool:
  """Whether this machine multiplies a few rows of activations faster by the
  rows of these kernels than by their columns: Intel's processors do, if the
  weights are too large for a cache."""
  leaves = jax.tree.leaves({**params, 'encoder': {}})
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
  return size > _CACHED and is_intel()


@functools.cache
def is_intel() -> bool:
  """Tells whether the processor is Intel's, as far as Linux says so."""
  try:
    return 'GenuineIntel' in Path('/proc/cpuinfo').read_text()
  except OSError:
    return False


def _join(params: dict, names: Sequence[str]) -> dict:
  """Joins the parameters of several `Dense` of a module into one."""
  if not all(name in params for name in names):
    return params
  parts = [params[name] for name in names]
  joint = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, -1), *parts)
  rest = {name: leaf for name, leaf in params.items() if name not in names}
  return {joint_name(names): joint, **rest}


def num_params(params: Weights) -> int:
  """Counts the parameters in a pytree, without the copies of `with_cpu_copies`
  and the scales of packed weights."""
  # Names of copies begin with these: `transposed_embedding`, `float32_kernel`.
  return sum(
    leaf.size
    for path, leaf in jax.tree.leaves_with_path(params)
    if not path[-1].key.startswith((TRANSPOSED, FLOAT32, ROWS))
    and not path[-1].key.endswith(SCALE)
  )


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
  'gelu': jax.nn.gelu,  # The tanh approximation, as T5 1.1 was trained with.
  'relu': jax.nn.relu,
  'silu': jax.nn.silu,
  'linear': lambda x: x,
}


class Mlp(nn.Module):
  """The feed-forward: `wo(f(wi_0 x) * g(wi_1 x))`, or `wo(f(wi x))`.

  `activations` names f and g: ('gelu', 'linear') is T5 1.1's, ('silu',
  'linear') Llama's, ('relu',) that of T5 1.0.
  """

  mlp_dim: int
  activations: tuple[str, ...]
  dtype: jnp.dtype = jnp.float32
  dropout_rate: float = 0.0

  @nn.compact
  def __call__(self, x: Array) -> Array:
    # T5X calls the kernels `wi_0` and `wi_1` if there is a gate, else `wi`.
    names = [f'wi_{i}' for i in range(len(self.activations))]
    if len(names) == 1:
      names = ['wi']
    projected = projections(
      self, x, dict.fromkeys(names, self.mlp_dim), dtype=self.dtype
    )
    factors = [
      ACTIVATIONS[activation](y)
      for activation, y in zip(self.activations, projected, strict=True)
    ]
    hidden = math.prod(factors[1:], start=factors[0])
    hidden = Dropout(self.dropout_rate)(hidden)
    return Dense(x.shape[-1], self.dtype, name='wo')(hidden)


class Dropout(nn.Module):
  """Drops features, the same ones at all positions of a row, as in T5, if the
  network is applied with a random key named `dropout`."""

  rate: float

  @nn.compact
  def __call__(self, x: Array) -> Array:
    # One draw for all positions: they are the axis before the last.
    dropout = nn.Dropout(self.rate, broadcast_dims=(-2,))
    return dropout(x, deterministic=not self.has_rng('dropout'))
