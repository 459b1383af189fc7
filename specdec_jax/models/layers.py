"""Layers that the networks share.

Kernels are `[in, out]`, by default without a bias, as in T5X.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array
from specdec_jax.models import products, quantized
from specdec_jax.models.products import PROJECTIONS, Weights, joint_name
from specdec_jax.models.quantized import COPIES, SCALE, TRANSPOSED

# The projection to the vocabulary of a network that is not tied.
LOGITS = 'logits_dense'


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
    y = products.by_kernel(self, x, kernel)
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
  product if `products.with_cpu_copies` has joined their kernels."""
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
      return products.by_kernel(self, x, kernel, TRANSPOSED)
    scale = self.variables['params'].get('embedding' + SCALE)
    if scale is not None:
      return quantized.product(x, self.embedding, scale, axis=1)
    # Logits are products with the embeddings, `[..., embed] @ [embed, V]`.
    return products.matmul(x.astype(self.embedding.dtype), self.embedding.T)


def num_params(params: Weights) -> int:
  """Counts the parameters in a pytree, without copies for CPUs and the scales
  of packed weights."""
  # Names of copies begin with these: `transposed_embedding`, `float32_kernel`.
  return sum(
    leaf.size
    for path, leaf in jax.tree.leaves_with_path(params)
    if not path[-1].key.startswith(COPIES)
    and not quantized.is_scale(path[-1].key)
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
