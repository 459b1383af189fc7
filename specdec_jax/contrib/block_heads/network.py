"""Heads on a target that predict several tokens ahead (Stern et al., arXiv
1811.03115)."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.base import Array, Prompt
from specdec_jax.drafters import features
from specdec_jax.drafters.features import FeatureCache
from specdec_jax.models import taps
from specdec_jax.models.family import Drafts, Family
from specdec_jax.models.layers import applied
from specdec_jax.models.networks import Bound, Network
from specdec_jax.models.products import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeadsConfig:
  """Sizes of the heads.

  Attributes:
    embed_dim: width of the target's residual stream.
    gamma: heads beside the target's own, k - 1 in the paper.
    mlp_dim: width of each head's feed-forward.
    dropout_rate: dropout of the target's decoder in training.
    dtype: of activations.
  """

  embed_dim: int
  gamma: int
  mlp_dim: int
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class BlockHeads(nn.Module):
  """One residual feed-forward per position ahead; the target's own projection
  turns the results into logits."""

  config: BlockHeadsConfig

  def setup(self):
    # All heads in one array [G, embed, mlp], so that they are one product.
    config = self.config
    init = nn.initializers.variance_scaling(
      1.0, 'fan_in', 'normal', batch_axis=0
    )
    shape = (config.gamma, config.embed_dim, config.mlp_dim)
    self.wi = self.param('wi', init, shape)
    self.wo = self.param('wo', init, (shape[0], shape[2], shape[1]))

  def __call__(self, x: Array) -> Array:
    """Applies all heads: `[B, embed]` to `[B, G, embed]`."""
    inner = jax.nn.relu(_product('be,gem->bgm', x, self.wi)).astype(x.dtype)
    outer = _product('bgm,gme->bge', inner, self.wo)
    return x[:, None] + outer.astype(x.dtype)

  def one(self, x: Array, index: Array) -> Array:
    """Applies head `index`, int32 `[]`: `[B, T, embed]` to the same shape."""
    # Training draws one head per step and applies it to all positions.
    wi, wo = self.wi[index], self.wo[index]
    inner = jax.nn.relu(_product('bte,em->btm', x, wi)).astype(x.dtype)
    return x + _product('btm,me->bte', inner, wo).astype(x.dtype)


def init_params(config: BlockHeadsConfig, rng_key: Array) -> Weights:
  """Initialises float32 parameters."""
  x = jnp.zeros((1, config.embed_dim), jnp.float32)
  return BlockHeads(config).init(rng_key, x)['params']


def bind(target: Network, config: BlockHeadsConfig, *, width: int) -> Bound:
  """Binds the first `width - 1` heads to a target, for `blockwise_heads`.

  The target then keeps what the heads read at the first `width` tokens of a
  call.

  The drafter's params are `{'heads': ..., 'target': ...}`, since heads share
  the target's projection. Raises ValueError if the heads' `embed_dim` is not
  the target's.
  """
  width_of_heads = config.embed_dim
  width_of_target = target.config.embed_dim
  if width_of_heads != width_of_target:
    raise ValueError(
      f'heads of width {width_of_heads} do not fit a target of '
      f'{width_of_target}: give the target that they were trained for'
    )
  # The input of the target's projection, to which the heads' outputs go too.
  keeping = taps.last_call(target, (taps.LAST,), width=width)

  def init(params: Weights, prompt: Prompt, max_len: int) -> FeatureCache:
    # The streams of the prefill are not read: the first draft is empty.
    cache = keeping.init(params, prompt, max_len)
    nothing = jnp.full_like(cache.starts, -1)
    return dataclasses.replace(cache, starts=nothing, prompt=None)

  def heads(
    params: Weights, cache: FeatureCache, lengths: Array
  ) -> tuple[Array, Array]:
    # The target's own head made the pending token from the same features.
    x, is_ready = features.of_last_read(cache, lengths)
    ahead = applied(BlockHeads(config))(params['heads'], x)
    logits = target.project(params['target'], ahead[:, : width - 1])
    return logits, is_ready

  return Bound(
    model=heads,
    target=keeping._replace(init=init),
    join=lambda params, heads: {'heads': heads, 'target': params},
  )


FAMILY = Family(
  name='block_heads',
  config=BlockHeadsConfig,
  init_params=init_params,
  drafts=Drafts('block_heads', bind),
  has_vocabulary=False,
)
