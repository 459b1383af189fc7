"""Attention over a cache whose rows have different lengths."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Placement


def placed(
  lengths: Array,
  num_tokens: int,
  capacity: int,
  placement: Placement | None = None,
) -> Placement:
  """Where the T tokens of a call stand in a cache of S entries, `lengths[B]` of
  which count: as `placement` says, or else as a run of text behind them, of
  which a token sees itself and all before it, `s <= lengths[b] + t`. ValueError
  if the placement is for another number of tokens or another capacity.
  """
  if placement is not None:
    sizes = placement.mask.shape[1:]
    if sizes != (num_tokens, capacity):
      raise ValueError(
        f'a placement of {sizes[0]} tokens in a cache of {sizes[1]} positions '
        f'does not fit {num_tokens} tokens in one of {capacity}'
      )
    return placement
  # Rows of 2 and 0 entries, and T = 3: positions [2, 3, 4] and [0, 1, 2]. The
  # first token of the first row sees entries 0, 1 and itself, 2.
  positions = arrays.block_positions(lengths, num_tokens)
  key_positions = jnp.arange(capacity, dtype=lengths.dtype)[None]
  return Placement(
    positions=positions,
    key_positions=key_positions,
    mask=key_positions[:, None, :] <= positions[:, :, None],
  )


def within(placement: Placement, window: int) -> Placement:
  """The placement in a layer with a window, 0 for none: a token sees no further
  back than `window - 1` positions."""
  if not window:
    return placement
  # With a window of 3, a token at position 7 sees 5, 6 and 7.
  last_unseen = placement.positions[:, :, None] - window
  is_near = placement.key_positions[:, None, :] > last_unseen
  return dataclasses.replace(placement, mask=placement.mask & is_near)


def layer_windows(config: Any) -> list[int]:
  """The window of each of `num_layers`, 0 for none: `windows` are those of the
  first layers, and repeat; empty if no layer has one."""
  # Of four layers, (3, 0) is [3, 0, 3, 0], and (3,) all [3, 3, 3, 3].
  windows = config.windows or (0,)
  return [windows[i % len(windows)] for i in range(config.num_layers)]


def softcapped(x: Array, bound: float) -> Array:
  """`x` bounded to `(-bound, bound)` by tanh, and nearly itself near 0 (Bello
  et al., arXiv 1611.09940, as Gemma 2 has it)."""
  return bound * jnp.tanh(x / bound)


def attend(
  queries: Array,
  keys: Array,
  values: Array,
  mask: Array,
  *,
  scale: float,
  softcap: float = 0.0,
  bias: Array | None = None,
  dropout: Callable[[Array], Array] | None = None,
  score_dtype: jnp.dtype = jnp.float32,
) -> Array:
  """Grouped-query attention with a float32 softmax.

  The products contract the cache as it lies in memory: no transposed or
  repeated copy of it is made.

  Args:
    queries: `[B, Hq, T, D]`; Hq is a multiple of H, and query heads
      `g*Hq/H .. (g+1)*Hq/H - 1` share key-value head g.
    keys: `[B, H, S, D]`.
    values: like `keys`.
    mask: bool `[B or 1, T or 1, S]`, true where a query may look. One that may
      look nowhere averages all values; its result is meaningless but finite.
    scale: multiplies the products of queries and keys.
    softcap: bounds the scaled products, see `softcapped`; 0 does not.
    bias: float32 `[B or 1, Hq, T, S]` added to the scaled products, or None.
    dropout: applied to the weights `[B, Hq, T, S]` in training, or None.
    score_dtype: of scores and softmax; anything but float32 gives up precision
      to match the rounding of another implementation.

  Returns:
    `[B, T, Hq * D]`, heads concatenated, in the queries' dtype.
  """
  batch, num_query_heads, num_queries, head_dim = queries.shape
  num_heads, capacity = keys.shape[1:3]
  # Query heads that share keys become queries of one head, so that the keys
  # are read once: 4 heads on 2, T = 3, are 2 heads of 2 * 3 queries.
  group = num_query_heads // num_heads
  product = functools.partial(jnp.einsum, preferred_element_type=score_dtype)
  queries_by_head = (queries * jnp.asarray(scale, queries.dtype)).reshape(
    batch, num_heads, group * num_queries, head_dim
  )
  scores = product('bhqd,bhsd->bhqs', queries_by_head.astype(keys.dtype), keys)
  scores = scores.reshape(batch, num_heads, group, num_queries, capacity)
  if softcap:
    scores = softcapped(scores, softcap)
  weights = _weights(scores, mask, bias)
  if dropout is not None:
    by_head = (batch, num_query_heads, num_queries, capacity)
    weights = dropout(weights.reshape(by_head)).reshape(weights.shape)
  weights = weights.astype(values.dtype).reshape(
    batch, num_heads, group * num_queries, capacity
  )
  mixed = product('bhqs,bhsd->bhqd', weights, values)
  mixed = mixed.reshape(batch, num_query_heads, num_queries, head_dim)
  mixed = mixed.transpose(0, 2, 1, 3).astype(queries.dtype)
  return mixed.reshape(batch, num_queries, num_query_heads * head_dim)


def _weights(scores: Array, mask: Array, bias: Array | None) -> Array:
  """The softmax of scores `[B, H, group, T, S]`, in their dtype."""
  if bias is not None:
    bias = bias.astype(scores.dtype)
    scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:])
  # The lowest finite number, as infinity would make a row without keys NaN.
  lowest = jnp.finfo(scores.dtype).min
  scores = jnp.where(mask[:, None, None], scores, lowest)
  return jax.nn.softmax(scores, axis=-1)


def check_sizes(config: Any) -> None:
  """Raises ValueError for a configuration whose `num_heads`, `num_kv_heads`,
  `head_dim` and `windows` no attention with rotary positions can have."""
  if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
    raise ValueError(
      f'{config.num_heads} query heads do not divide into '
      f'{config.num_kv_heads} key-value heads'
    )
  if config.head_dim % 2:
    raise ValueError(
      f'rotary positions need an even head_dim, got {config.head_dim}'
    )
  if min(config.windows, default=0) < 0:
    raise ValueError(
      f'windows count positions, 0 for all, got {list(config.windows)}'
    )
