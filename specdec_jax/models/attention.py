"""Attention over a cache whose rows have different lengths."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Placement
from specdec_jax.models.kv_cache import Entries, Packed
from specdec_jax.models.loop_names import CacheBlocks

# The least that is read of a large cache at a time. Elsewhere a round of a loop
# takes longer than to read some entries more.
_LEAST_ON_CPUS, _LEAST = 256, 512


def placed(
  lengths: Array,
  num_tokens: int,
  capacity: int,
  placement: Placement | None = None,
) -> Placement:
  """Places the T tokens of a call in a cache of S entries, of which
  `lengths[B]` count.

  Returns `placement` if it is given. Otherwise the tokens continue the text:
  token t sees the entries `s <= lengths[b] + t`. Raises ValueError if the
  placement is for another number of tokens or another capacity.
  """
  if placement is not None:
    sizes, expected = placement.mask.shape[1:], (num_tokens, capacity)
    if sizes != expected:
      raise ValueError(
        f'the placement has {sizes} tokens and positions, expected {expected}'
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
  """Narrows a placement to a layer's window: a token sees at most `window - 1`
  positions back. 0 means no window."""
  if not window:
    return placement
  # With a window of 3, a token at position 7 sees 5, 6 and 7.
  last_unseen = placement.positions[:, :, None] - window
  is_near = placement.key_positions[:, None, :] > last_unseen
  return dataclasses.replace(placement, mask=placement.mask & is_near)


def layer_windows(config: Any) -> list[int]:
  """Lists the window of each of `num_layers`, 0 for none. `windows` are those
  of the first layers, and repeat; empty means that no layer has one."""
  # Of four layers, (3, 0) is [3, 0, 3, 0], and (3,) all [3, 3, 3, 3].
  windows = config.windows or (0,)
  return [windows[i % len(windows)] for i in range(config.num_layers)]


def softcapped(x: Array, bound: float) -> Array:
  """Bounds `x` to `(-bound, bound)` by tanh, which changes little near 0 (Bello
  et al., arXiv 1611.09940; used in Gemma 2)."""
  return bound * jnp.tanh(x / bound)


def attend(
  queries: Array,
  keys: Entries,
  values: Entries,
  mask: Array,
  *,
  scale: float,
  softcap: float = 0.0,
  bias: Array | None = None,
  dropout: Callable[[Array], Array] | None = None,
  score_dtype: jnp.dtype = jnp.float32,
  used_only: bool = False,
) -> Array:
  """Computes grouped-query attention with a float32 softmax.

  The products contract the cache as it lies in memory: no transposed or
  repeated copy of it is made. Scales of packed keys multiply scores, and those
  of packed values weights.

  Args:
    queries: `[B, Hq, T, D]`; Hq is a multiple of H, and query heads
      `g*Hq/H .. (g+1)*Hq/H - 1` share key-value head g.
    keys: `[B, H, S, D]`.
    values: like `keys`.
    mask: bool `[B or 1, T or 1, S]`, true where a query may look. A query that
      may look nowhere gets a result that is meaningless but finite.
    scale: multiplies the products of queries and keys.
    softcap: bounds the scaled products, see `softcapped`; 0 does not.
    bias: float32 `[B or 1, Hq, T, S]` added to the scaled products, or None.
    dropout: applied to the weights `[B, Hq, T, S]` in training, or None.
    score_dtype: of scores and softmax; anything but float32 gives up precision
      to match the rounding of another implementation.
    used_only: whether a large cache is read block by block, from the first to
      the last entry that any query may look at, see `_in_blocks`; in float32.
      Such a loop has no gradient.

  Returns:
    `[B, T, Hq * D]`, heads concatenated, in the queries' dtype.
  """
  batch, num_query_heads, num_queries, head_dim = queries.shape
  num_heads, capacity = keys.shape[1:3]
  # Query heads that share keys become queries of one head, so that the keys
  # are read once: 4 heads on 2, T = 3, are 2 heads of 2 * 3 queries.
  group = num_query_heads // num_heads
  queries = queries * jnp.asarray(scale, queries.dtype)
  by_head = queries.reshape(batch, num_heads, group * num_queries, head_dim)
  scores_of = functools.partial(
    _scores, by_head, group=group, softcap=softcap, dtype=score_dtype
  )
  mix = functools.partial(_mix, queries.dtype, score_dtype)

  def whole() -> Array:
    weights = jax.nn.softmax(scores_of(keys, mask, bias), axis=-1)
    if dropout is not None:
      of_queries = (batch, num_query_heads, num_queries, capacity)
      weights = dropout(weights.reshape(of_queries)).reshape(weights.shape)
    return mix(weights, values)

  def used(size: int) -> Array:
    shape = batch, num_heads, group, num_queries
    # Of two blocks half is the most that could be left out.
    if capacity <= 2 * size:
      return whole()
    return _in_blocks(shape, scores_of, mix, keys, values, mask, bias, size)

  on_cpus, size = (block_size(capacity, n) for n in (_LEAST_ON_CPUS, _LEAST))
  if used_only and score_dtype == jnp.float32 and capacity > 2 * on_cpus:
    mixed = jax.lax.platform_dependent(
      cpu=lambda: used(on_cpus), default=lambda: used(size)
    )
  else:
    mixed = whole()
  # Heads are concatenated.
  mixed = mixed.reshape(batch, num_query_heads, num_queries, head_dim)
  mixed = mixed.transpose(0, 2, 1, 3).astype(queries.dtype)
  return mixed.reshape(batch, num_queries, num_query_heads * head_dim)


def _scores(
  queries: Array,
  keys: Entries,
  mask: Array,
  bias: Array | None,
  *,
  group: int,
  softcap: float,
  dtype: jnp.dtype,
) -> Array:
  """Computes scores `[B, H, group, T, S]` of scaled queries `[B, H, group * T,
  D]`; the other arguments are those of `attend`.

  They are the lowest finite number where a query may not look: infinity would
  make NaN of a query that may look nowhere.
  """
  batch, num_heads, num_queries, _ = queries.shape
  values, scales = _read(keys, queries.dtype)
  scores = jnp.einsum(
    'bhqd,bhsd->bhqs',
    queries.astype(values.dtype),
    values,
    preferred_element_type=dtype,
  )
  if scales is not None:
    scores = scores * scales
  scores = scores.reshape(batch, num_heads, group, num_queries // group, -1)
  if softcap:
    scores = softcapped(scores, softcap)
  if bias is not None:
    bias = bias.astype(scores.dtype)
    scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:])
  lowest = jnp.finfo(scores.dtype).min
  return jnp.where(mask[:, None, None], scores, lowest)


def _mix(
  dtype: jnp.dtype, score_dtype: jnp.dtype, weights: Array, entries: Entries
) -> Array:
  """Adds up values `[B, H, S, D]` by weights `[B, H, group, T, S]`: `[B, H,
  group, T, D]` in `score_dtype`. Packed values are read as `dtype`."""
  batch, num_heads, group, num_queries, capacity = weights.shape
  values, scales = _read(entries, dtype)
  weights = weights.reshape(batch, num_heads, group * num_queries, capacity)
  if scales is not None:
    weights = weights * scales
  mixed = jnp.einsum(
    'bhqs,bhsd->bhqd',
    weights.astype(values.dtype),
    values,
    preferred_element_type=score_dtype,
  )
  return mixed.reshape(batch, num_heads, group, num_queries, values.shape[-1])


def _read(entries: Entries, dtype: jnp.dtype) -> tuple[Array, Array | None]:
  """Returns the factors of a product, and scales `[B, H, 1, S]` if packed."""
  if not isinstance(entries, Packed):
    return entries, None
  return entries.values.astype(dtype), entries.scale.mT


def block_size(capacity: int, least: int) -> int:
  """Chooses how many entries of a cache `attend` reads at a time: about a
  sixteenth, a multiple of 128 (the tiles of TPUs), at least `least`."""
  return max(least, 128 * -(-capacity // 2048))


def _in_blocks(
  shape: tuple[int, ...],
  scores_of: Callable[..., Array],
  mix: Callable[[Array, Entries], Array],
  keys: Entries,
  values: Entries,
  mask: Array,
  bias: Array | None,
  size: int,
) -> Array:
  """Computes `mix(softmax(scores_of(keys, mask, bias)), values)` by blocks,
  from the first to the last that any query may look at, with a running softmax
  (Milakov and Gimelshein, arXiv 1805.02867).

  A block that a row does not see leaves the row's bits unchanged: its weights
  are zero, and the sums so far are multiplied by one. So a row's bits do not
  depend on the lengths of the others.
  """
  # A cache of 600 in blocks of 256: entries 0 to 255, 256 to 511, and 512 to
  # 599 among the last 256.
  capacity = values.shape[2]
  entries = jnp.arange(capacity, dtype=jnp.int32)[None, None]
  first = jnp.min(jnp.where(mask, entries, capacity)) // size
  end = -(-jnp.max(jnp.where(mask, entries + 1, 0)) // size)

  def add(i: Array, sums: tuple[Array, Array, Array]) -> Any:
    highest, total, mixed = sums
    start = jnp.minimum(i * size, capacity - size)
    cut_one = functools.partial(
      jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size
    )
    cut = lambda x, axis: jax.tree.map(lambda y: cut_one(y, axis=axis), x)
    is_new = start + entries[..., :size] >= i * size
    scores = scores_of(
      cut(keys, axis=2),
      cut(mask, axis=2) & is_new,
      None if bias is None else cut(bias, axis=3),
    )
    higher = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
    # NaN differs from that score, and stays.
    is_hidden = scores == jnp.finfo(scores.dtype).min
    weights = jnp.where(is_hidden, 0, jnp.exp(scores - higher))
    fade = jnp.exp(highest - higher)
    total = total * fade + jnp.sum(weights, axis=-1, keepdims=True)
    return higher, total, mixed * fade + mix(weights, cut(values, axis=2))

  sums = jnp.zeros((*shape, 1), jnp.float32)
  mixed = jnp.zeros((*shape, values.shape[3]), jnp.float32)
  lowest = jnp.full_like(sums, jnp.finfo(jnp.float32).min)
  with jax.named_scope(CacheBlocks(size, capacity).scope):
    _, total, mixed = jax.lax.fori_loop(first, end, add, (lowest, sums, mixed))
  # The highest score has the weight 1; without any, `total` is 0.
  return mixed / jnp.maximum(total, 1)


def check_sizes(config: Any) -> None:
  """Raises ValueError for a configuration whose `num_heads`, `num_kv_heads`,
  `head_dim` and `windows` no attention with rotary positions can have."""
  if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
    raise ValueError(
      f'{config.num_heads} heads do not divide into {config.num_kv_heads}: '
      'make num_heads a multiple of num_kv_heads'
    )
  if config.head_dim % 2:
    raise ValueError(f'positions need an even head_dim, got {config.head_dim}')
  if min(config.windows, default=0) < 0:
    raise ValueError(f'windows must not be negative, got {config.windows}')
