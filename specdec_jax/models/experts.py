"""A feed-forward of experts, of which each token goes through a few (Shazeer et
al., arXiv 1701.06538; as in Qwen3-MoE and Gemma 4).

Few tokens, as in decoding, visit the experts that any of them chose, one after
the other: what is read of memory is the weights of these. Many tokens, as in a
prefill, are grouped by expert.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.models import products, quantized
from specdec_jax.models.layers import ACTIVATIONS, parameter
from specdec_jax.models.loop_names import ChosenExperts
from specdec_jax.models.quantized import SCALE
from specdec_jax.sharding import rules

# Tokens of a group, and the most that all visit every chosen expert: compiled
# for a v5p, 160 move fewer bytes in this way than in groups, and 576 more.
_GROUP, _MOST_TOGETHER = 128, 256
# Arrays `kernel`, and perhaps `scale`, of `wi` and of `wo`.
Kernels = dict[str, dict[str, Array]]
# How experts are drawn.
_INIT = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1)


def check_sizes(config: Any) -> None:
  """Raises ValueError for a configuration whose `num_experts`,
  `num_chosen_experts` and `expert_dim` do not fit together."""
  sizes = config.num_experts, config.num_chosen_experts, config.expert_dim
  is_without = not any(sizes)
  if not is_without and not (1 <= sizes[1] <= sizes[0] and sizes[2] >= 1):
    raise ValueError(
      f'num_experts {sizes[0]}, num_chosen_experts {sizes[1]} and expert_dim '
      f'{sizes[2]}: choose 1 to num_experts, of a width; or set none'
    )


def choose(
  logits: Array, num_chosen: int, *, is_normalized: bool
) -> tuple[Array, Array]:
  """Chooses experts for each token.

  Args:
    logits: float32 `[..., E]`, of the router.
    num_chosen: k, experts of a token.
    is_normalized: whether the weights of a token sum to 1; otherwise they are
      the softmax over all experts.

  Returns:
    Ids, int32 `[..., k]`, the likeliest first, and weights, float32 `[..., k]`.
  """
  probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
  weights, ids = jax.lax.top_k(probs, num_chosen)
  if is_normalized:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return ids, weights


def router_logits(module: nn.Module, x: Array, num_experts: int) -> Array:
  """Projects `[..., embed]` to float32 logits `[..., E]` with the module's
  `router_kernel`, which is not packed with the other matrices."""
  init = nn.initializers.lecun_normal()
  shape = x.shape[-1], num_experts
  kernel = parameter(module, 'router_kernel', init, shape)
  return jnp.tensordot(x.astype(jnp.float32), kernel.astype(jnp.float32), 1)


class _Kernel(nn.Module):
  """Kernels of all experts, `[E, ..., in, out]`."""

  shape: tuple[int, ...]

  @nn.compact
  def __call__(self) -> dict[str, Array]:
    kernel = parameter(self, 'kernel', _INIT, self.shape)
    if not self.has_variable('params', 'kernel' + SCALE):
      return {'kernel': kernel}
    return {
      'kernel': kernel,
      'scale': self.get_variable('params', 'kernel' + SCALE),
    }


class Experts(nn.Module):
  """Gated feed-forwards, `wo(f(wi[0] x) * wi[1] x)` each, summed by weights.

  Attributes:
    num_experts: E.
    mlp_dim: width of each.
    activation: f, of `layers.ACTIVATIONS`.
    dtype: of the result.
  """

  num_experts: int
  mlp_dim: int
  activation: str
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: Array, ids: Array, weights: Array) -> Array:
    """Sends `[B, T, embed]` through the experts `ids`, int32 `[B, T, k]`, and
    sums what they return by `weights`, float32 `[B, T, k]`."""
    size, embed_dim = self.num_experts, x.shape[-1]
    kernels = {
      'wi': _Kernel((size, 2, embed_dim, self.mlp_dim), name='expert_wi')(),
      'wo': _Kernel((size, self.mlp_dim, embed_dim), name='expert_wo')(),
    }
    # The weight of each expert for each token, [B, T, E], mostly 0.
    is_chosen = jax.nn.one_hot(ids, size, dtype=jnp.float32)
    by_expert = jnp.sum(is_chosen * weights[..., None], axis=-2)
    run = functools.partial(
      _run,
      activation=ACTIVATIONS[self.activation],
      num_experts=size,
      num_chosen=ids.shape[-1],
    )
    return _on_each_device(run, x, by_expert, kernels).astype(self.dtype)


def _run(
  x: Array,
  by_expert: Array,
  kernels: Kernels,
  *,
  activation: Callable[[Array], Array],
  num_experts: int,
  num_chosen: int,
) -> Array:
  """Sends `[B, T, embed]` through experts, given weights `[B, T, E]`, to
  float32 `[B, T, embed]`; of a part of each expert's width, or of some of
  `num_experts`, to its share of the sum."""

  def apply(expert: Array, rows: Array) -> Array:
    """Sends `[M, embed]` through one expert, to float32 `[M, embed]`."""
    take = functools.partial(
      jax.lax.dynamic_index_in_dim, index=expert, axis=0, keepdims=False
    )
    wi, wo = (jax.tree.map(take, kernels[name]) for name in ('wi', 'wo'))
    # One product for both: two would read the first of them twice.
    gate, up = jax.vmap(_product, in_axes=(None, 0))(rows, wi)
    return _product((activation(gate) * up).astype(x.dtype), wo)

  size = by_expert.shape[-1]
  tokens = x.reshape(-1, x.shape[-1])
  mix = _one_by_one if tokens.shape[0] <= _MOST_TOGETHER else _in_groups
  loop = ChosenExperts(
    num_chosen, num_experts, len(tokens), num_devices=num_experts // size
  )
  with jax.named_scope(loop.scope):
    mixed = mix(apply, tokens, by_expert.reshape(-1, size))
  return mixed.reshape(x.shape)


def _on_each_device(
  run: Callable[..., Array], x: Array, by_expert: Array, kernels: Kernels
) -> Array:
  """Calls `run(x, by_expert, kernels)` for each device's own rows and its part
  of each expert's width, or its own experts, and sums what the devices return
  once: the compiler would sum for every expert. ValueError if groups of packed
  weights do not divide."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return run(x, by_expert, kernels)
  spec_of = functools.partial(rules.fitting_spec, mesh)
  rows = spec_of(x.shape, ('batch', 'length', 'embed'))
  scale = kernels['wo'].get('scale')
  num_groups = 1 if scale is None else scale.shape[1]
  split = rules.expert_axis(
    mesh,
    kernels['wo']['kernel'].shape,
    None if scale is None else scale.shape,
  )
  specs = {
    name: {
      leaf: spec_of(array.shape, rules.expert_axes(f'expert_{name}', split))
      for leaf, array in kernels[name].items()
    }
    for name in kernels
  }
  is_split = rules.MODEL in specs['wo']['kernel']
  is_by_expert = is_split and split == 'experts'
  # All of an output channel may have one scale; groups are split with it.
  if is_split and num_groups > 1 and rules.MODEL not in specs['wo']['scale']:
    raise ValueError(
      f'neither {num_groups} groups of weights of an expert nor '
      f'{by_expert.shape[-1]} experts divide over '
      f'{dict(mesh.shape)[rules.MODEL]} devices: give another group size'
    )
  axes = 'batch', 'length', 'experts' if is_by_expert else None
  chosen = spec_of(by_expert.shape, axes)

  def run_part(*parts: Any) -> Array:
    mixed = run(*parts)
    return jax.lax.psum(mixed, rules.MODEL) if is_split else mixed

  return jax.shard_map(
    run_part,
    in_specs=(rows, chosen, specs),
    out_specs=rows,
    check_vma=False,
  )(x, by_expert, kernels)


class RoutedExperts(nn.Module):
  """Experts, and the router that chooses them for what they read.

  Attributes:
    config: has `num_experts`, `num_chosen_experts`, `expert_dim`,
      `has_normalized_experts` and `dtype`.
    activation: of `layers.ACTIVATIONS`.
  """

  config: Any
  activation: str

  @nn.compact
  def __call__(self, x: Array) -> Array:
    config = self.config
    ids, weights = choose(
      router_logits(self, x, config.num_experts),
      config.num_chosen_experts,
      is_normalized=config.has_normalized_experts,
    )
    sizes = config.num_experts, config.expert_dim, self.activation
    return Experts(*sizes, config.dtype, name='mlp')(x, ids, weights)


def _product(x: Array, kernel: dict[str, Array]) -> Array:
  """Multiplies `[M, in]` by one expert's kernel, to float32 `[M, out]`."""
  if 'scale' in kernel:
    return quantized.product(x, kernel['kernel'], kernel['scale'])
  values = kernel['kernel']
  return products.matmul(x.astype(values.dtype), values)


def _one_by_one(apply: Callable, tokens: Array, by_expert: Array) -> Array:
  """Sends all tokens `[N, embed]` through each expert that any of them chose.

  A token's bits do not depend on what the others chose: an expert that it did
  not choose adds 0.
  """
  is_used = jnp.any(by_expert > 0, axis=0)
  # The used ones first, in ascending order: of 4, of which 1 and 3 are used,
  # [1, 3, 0, 2].
  order = jnp.argsort(~is_used, stable=True)

  def add(i: Array, total: Array) -> Array:
    expert = order[i]
    weight = jax.lax.dynamic_index_in_dim(by_expert, expert, axis=1)
    mixed = apply(expert, tokens) * weight
    # An expert that a token did not choose may overflow for it.
    return total + jnp.where(weight > 0, mixed, 0)

  nothing = jnp.zeros(tokens.shape, jnp.float32)
  count = jnp.sum(is_used, dtype=jnp.int32)
  return jax.lax.fori_loop(0, count, add, nothing)


def _in_groups(apply: Callable, tokens: Array, by_expert: Array) -> Array:
  """Sends tokens `[N, embed]` through their experts, up to `_GROUP` tokens of
  one expert at a time."""
  num_tokens = by_expert.shape[0]
  is_chosen = by_expert > 0
  # Of each expert the tokens that chose it, in their order, then the others:
  # ids [E, N], of which the first `counts[E]` count.
  counts = jnp.sum(is_chosen, axis=0, dtype=jnp.int32)
  chosen_first = jnp.argsort(~is_chosen.T, axis=1, stable=True)
  num_groups = -(-counts // _GROUP)
  ends = jnp.cumsum(num_groups)
  padding = -num_tokens % _GROUP
  chosen_first = jnp.pad(chosen_first, ((0, 0), (0, padding)))

  def add(i: Array, total: Array) -> Array:
    # Groups [2, 0, 1] of three experts end at [2, 2, 3]: group 2 is the first
    # of expert 2.
    expert = jnp.sum(ends <= i, dtype=jnp.int32)
    start = (i - (ends[expert] - num_groups[expert])) * _GROUP
    rows = jax.lax.dynamic_slice(chosen_first, (expert, start), (1, _GROUP))[0]
    weight = by_expert[rows, expert][:, None]
    is_own = start + jnp.arange(_GROUP) < counts[expert]
    mixed = apply(expert, tokens[rows]) * weight
    mixed = jnp.where(is_own[:, None], mixed, 0)
    return total.at[rows].add(mixed)

  nothing = jnp.zeros(tokens.shape, jnp.float32)
  return jax.lax.fori_loop(0, ends[-1], add, nothing)
