"""Heads on a T5's decoder that predict further ahead (Stern et al., arXiv
1811.03115), and the T5 that keeps the hidden states that they read."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, LanguageModel, Prompt
from specdec_jax.drafters.blockwise_heads import HeadsFn
from specdec_jax.models import t5
from specdec_jax.models.layers import applied
from specdec_jax.models.t5 import T5, T5Cache, T5Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeadsConfig:
  """Sizes of the heads: `embed_dim` is the target's, `gamma` counts the heads
  beside its own (k - 1 in the paper), and dropout is of its decoder."""

  embed_dim: int
  gamma: int
  mlp_dim: int
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32


@base.value
class HeadsCache:
  """A T5's cache, and the hidden states of its last call.

  Attributes:
    t5: the T5's own.
    hidden: `[B, G+1, embed]`, the inputs of the last projection at that call's
      first tokens.
    starts: int32 `[B]`, the position of the first of them; -1 before a call.
  """

  t5: T5Cache
  hidden: Array
  starts: Array

  @property
  def lengths(self) -> Array:
    return self.t5.lengths


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class BlockHeads(nn.Module):
  """A residual feed-forward per position ahead; the target's own projection
  makes logits of the results."""

  config: BlockHeadsConfig

  def setup(self):
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
    wi, wo = self.wi[index], self.wo[index]
    inner = jax.nn.relu(_product('bte,em->btm', x, wi)).astype(x.dtype)
    return x + _product('btm,me->bte', inner, wo).astype(x.dtype)


def init_params(config: BlockHeadsConfig, rng_key: Array) -> Any:
  """Fresh float32 parameters."""
  x = jnp.zeros((1, config.embed_dim), jnp.float32)
  return BlockHeads(config).init(rng_key, x)['params']


def with_heads(
  target_config: T5Config, config: BlockHeadsConfig
) -> tuple[LanguageModel, HeadsFn]:
  """A T5 as a target that keeps what its heads read, and the heads.

  The target's params and tokens are those of `t5.language_model`. The heads'
  params are `{'heads': ..., 'target': ...}`, their own and the target's, whose
  projection they share.

  Raises:
    ValueError: if the target is no T5, or the widths differ.
  """
  if not isinstance(target_config, T5Config):
    raise ValueError(
      f'heads are for a T5; the target has a {type(target_config).__name__}'
    )
  if target_config.embed_dim != config.embed_dim:
    raise ValueError(
      f'heads of width {config.embed_dim} do not fit a target of width '
      f'{target_config.embed_dim}'
    )
  apply, plain = applied(T5(target_config)), t5.language_model(target_config)
  width = config.gamma + 1

  def init(params, prompt: Prompt, max_len: int) -> HeadsCache:
    num_rows = prompt.decoder_tokens.shape[0]
    shape = (num_rows, width, target_config.embed_dim)
    return HeadsCache(
      t5=plain.init(params, prompt, max_len),
      hidden=jnp.zeros(shape, target_config.dtype),
      starts=jnp.full(num_rows, -1, jnp.int32),
    )

  def extend(
    params, tokens: Array, cache: HeadsCache, at: Array | None = None
  ) -> tuple[Array, HeadsCache]:
    hidden, t5_cache = apply(params, tokens, cache.t5, method=T5.extend)
    kept = hidden[:, :width]
    kept = jnp.pad(kept, ((0, 0), (0, width - kept.shape[1]), (0, 0)))
    new = HeadsCache(t5=t5_cache, hidden=kept, starts=cache.lengths)
    if at is not None:
      hidden = arrays.read_block(hidden, at, 1)
    return apply(params, hidden, method=T5.project), new

  def rewind(cache: HeadsCache, lengths: Array) -> HeadsCache:
    return dataclasses.replace(cache, t5=plain.rewind(cache.t5, lengths))

  def heads(params, cache: HeadsCache, lengths: Array) -> tuple[Array, Array]:
    # The last token was not fed yet. The one before it was, and the target's
    # own head made the last token of it.
    offsets = lengths - 2 - cache.starts
    is_ready = (cache.starts >= 0) & (offsets >= 0) & (offsets < width)
    x = arrays.read_block(cache.hidden, offsets, 1)[:, 0]
    ahead = applied(BlockHeads(config))(params['heads'], x)
    return apply(params['target'], ahead, method=T5.project), is_ready

  target = LanguageModel(init, extend, rewind, plain.vocab_size)
  return target, heads
