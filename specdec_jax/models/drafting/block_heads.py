"""Heads on a target's decoder that predict further ahead (Stern et al., arXiv
1811.03115)."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.base import Array, Prompt
from specdec_jax.drafters import features
from specdec_jax.drafters.features import FeatureCache
from specdec_jax.models import networks, taps
from specdec_jax.models.layers import Weights, applied
from specdec_jax.models.networks import Bound, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeadsConfig:
  """Sizes of the heads: `embed_dim` is the target's, `gamma` counts the heads
  beside its own (k - 1 in the paper), and dropout is of its decoder."""

  embed_dim: int
  gamma: int
  mlp_dim: int
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class BlockHeads(nn.Module):
  """A residual feed-forward per position ahead; the target's own projection
  makes logits of the results."""

  config: BlockHeadsConfig

  def setup(self):
    # All heads in one array, so that they are one product: [G, embed, mlp].
    config = self.config
    init = nn.initializers.variance_scaling(
      1.0, 'fan_in', 'normal', batch_axis=0
    )
    shape = (config.gamma, config.embed_dim, config.mlp_dim)
    self.wi = self.param('wi', init, shape)
    self.wo = self.param('wo', init, (shape[0], shape[2], shape[1]))

  def __call__(self, x: Array) -> Array:
    """All heads: `[B, embed]` to `[B, G, embed]`."""
    inner = jax.nn.relu(_product('be,gem->bgm', x, self.wi)).astype(x.dtype)
    outer = _product('bgm,gme->bge', inner, self.wo)
    return x[:, None] + outer.astype(x.dtype)

  def one(self, x: Array, index: Array) -> Array:
    """One head: `[B, T, embed]` to the same."""
    # Training draws one head per step, for all positions at once.
    wi, wo = self.wi[index], self.wo[index]
    inner = jax.nn.relu(_product('bte,em->btm', x, wi)).astype(x.dtype)
    return x + _product('btm,me->bte', inner, wo).astype(x.dtype)


def init_params(config: BlockHeadsConfig, rng_key: Array) -> Weights:
  """Fresh float32 parameters."""
  x = jnp.zeros((1, config.embed_dim), jnp.float32)
  return BlockHeads(config).init(rng_key, x)['params']


def bind(
  network: Network | None, config: BlockHeadsConfig, *, width: int
) -> Bound:
  """A target that keeps what its heads read, at the first `width` tokens of a
  call, and the first `width - 1` heads, for `contrib.blockwise_heads`.

  The heads' params are `{'heads': ..., 'target': ...}`, their own and the
  target's, whose projection they share. Raises ValueError if the target keeps
  no streams, or the widths differ.
  """
  target = networks.tapped(network)
  own, read = config.embed_dim, target.config.embed_dim
  if own != read:
    raise ValueError(
      f'heads of width {own} do not fit a target of {read}: give the target '
      'that they were trained for'
    )
  # What the target's own projection reads, so that it can read the heads'.
  keeping = taps.last_call(target, (taps.LAST,), width=width)

  def init(params: Weights, prompt: Prompt, max_len: int) -> FeatureCache:
    # What the prefill left is not read: the first draft is empty.
    cache = keeping.init(params, prompt, max_len)
    nothing = jnp.full_like(cache.starts, -1)
    return dataclasses.replace(cache, starts=nothing, prompt=None)

  def heads(
    params: Weights, cache: FeatureCache, lengths: Array
  ) -> tuple[Array, Array]:
    # The target's own head made the pending token of the same features.
    x, is_ready = features.of_last_read(cache, lengths)
    ahead = applied(BlockHeads(config))(params['heads'], x)
    logits = target.project(params['target'], ahead)
    return logits[:, : width - 1], is_ready

  return Bound(
    model=heads,
    target=keeping._replace(init=init),
    join=lambda params, own: {'heads': own, 'target': params},
  )
