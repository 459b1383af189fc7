"""Keys and values of past positions, each row at its own length.

Rollback is an assignment to `lengths`: entries at or beyond a row's length are
never seen and are overwritten by the next append, so nothing is ever copied or
erased.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout

from specdec_jax import base
from specdec_jax.base import Array
from specdec_jax.sharding import rules


@base.value
class Packed:
  """Quantized keys or values: integers and their scales.

  Attributes:
    values: int8 `[B, H, S, D]`.
    scale: float32 `[B, H, S, 1]`, one for each position and head.
  """

  values: Array
  scale: Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape


# Keys or values `[B, H, S, D]`: an array, or `Packed`.
Entries = Any
# Keys, values and mask `[B, T or 1, E]` of an encoder.
Cross = tuple[Entries, Entries, Array]


@base.value
class CrossCache:
  """Keys and values of cross-attention, computed once per decode.

  Attributes:
    keys: `[B, H, E, D]` of each layer, as `values`.
    mask: bool `[B, E]`, false for padding.
  """

  keys: tuple[Entries, ...]
  values: tuple[Entries, ...]
  mask: Array

  @property
  def by_layer(self) -> list[Cross]:
    # One row of the mask for all queries: [B, 1, E].
    mask = self.mask[:, None]
    pairs = zip(self.keys, self.values, strict=True)
    return [(keys, values, mask) for keys, values in pairs]


@base.value
class KVCache:
  """The cache of a decoder.

  Attributes:
    keys: `[B, H, S, D]` of each layer (H key-value heads, S capacity, D head
      size), as `values`. Heads come before positions, so that attention
      contracts the cache as it lies.
    lengths: int32 `[B]`, the number of valid positions of every row.
    encoder: cross-attention's, if there is an encoder.
  """

  keys: tuple[Entries, ...]
  values: tuple[Entries, ...]
  lengths: Array
  encoder: CrossCache | None = None

  @property
  def capacity(self) -> int:
    return self.keys[0].shape[2]

  @property
  def crosses(self) -> Sequence[Cross | None]:
    """The encoder's keys, values and mask for every layer; None without one."""
    encoder = self.encoder
    return encoder.by_layer if encoder else [None] * len(self.keys)


def init(
  config: Any, batch_size: int, capacity: int, num_layers: int
) -> KVCache:
  """Makes an empty cache with room for `capacity` positions, rounded up to a
  multiple of 8, the rows of a TPU's tile.

  `config` has `head_dim`, `dtype`, perhaps `cache_dtype`, and `num_kv_heads`,
  or only `num_heads` if every head has keys of its own. If layers differ, or
  some have no keys, it has `cache_heads`: the number and size of the heads of
  each layer with keys.
  """
  heads = getattr(config, 'cache_heads', None)
  if heads is None:
    num_heads = getattr(config, 'num_kv_heads', config.num_heads)
    heads = [(num_heads, config.head_dim)] * num_layers
  # Otherwise 8 heads would pad less than positions do, and lie after them.
  capacity = -(-capacity // 8) * 8

  def empty_layer(num_heads: int, head_dim: int) -> Entries:
    shape = batch_size, num_heads, capacity, head_dim
    entries = jax.ShapeDtypeStruct(shape, config.dtype)
    shapes = jax.eval_shape(lambda x: _stored(config, x), entries)
    return jax.tree.map(jnp.zeros_like, shapes)

  empty = lambda: tuple(empty_layer(*layer_heads) for layer_heads in heads)
  return KVCache(
    keys=empty(), values=empty(), lengths=jnp.zeros(batch_size, jnp.int32)
  )


def crossed(
  config: Any, stack: Iterable[Any], encoded: Array, mask: Array
) -> CrossCache:
  """Makes the cache of a `stack` of layers with an `encoder_decoder_attention`
  from an encoder's output `[B, E, embed]` and mask, bool `[B, E]`; `config` is
  as in `init`."""
  keys, values = zip(
    *[layer.encoder_decoder_attention.keys_values(encoded) for layer in stack],
    strict=True,
  )
  store = lambda layers: tuple(_stored(config, entries) for entries in layers)
  return CrossCache(keys=store(keys), values=store(values), mask=mask)


def _stored(config: Any, entries: Array) -> Entries:
  """Quantizes keys or values if `config.cache_dtype` is set."""
  is_packed = getattr(config, 'cache_dtype', None) is not None
  return packed(entries) if is_packed else entries


def packed(entries: Array) -> Packed:
  """Quantises `[B, H, T, D]`, with a scale for each position and head."""
  entries = entries.astype(jnp.float32)
  most = jnp.max(jnp.abs(entries), axis=3, keepdims=True)
  # The largest becomes exactly 127. Halfway between two integers, as with
  # weights, its last bit would decide, which depends on the width of a call.
  scale = jnp.where(most == 0, 1.0, most / 127)
  return Packed(values=jnp.round(entries / scale).astype(jnp.int8), scale=scale)


# Each unrolled row write costs compile time.
_MAX_UNROLLED_ROWS = 8


def append(buffer: Entries, new: Array, lengths: Array) -> Entries:
  """Writes row b of `new`, `[B, H, T, D]`, into `[B, H, S, D]` at positions
  `lengths[b] + t`; ValueError if T exceeds S.

  Each row is one `dynamic_update_slice`: for a scatter, the TPU compiler would
  insert copies of the cache. It clamps its start, so callers keep spare
  capacity (invariant 3 of docs/design.md).
  """
  # Rows of lengths [2, 0] and T = 2 are written at [2, 3] and [0, 1].
  capacity = buffer.shape[2]
  if new.shape[2] > capacity:
    raise ValueError(
      f'{new.shape[2]} positions do not fit in {capacity}: make a larger cache'
    )
  if isinstance(buffer, Packed):
    write = functools.partial(append, lengths=lengths)
    return jax.tree.map(write, buffer, packed(new))
  by_head = ('batch', 'heads', 'length', 'kv')
  return rules.map_shards(
    _write_rows,
    (buffer, new.astype(buffer.dtype), lengths),
    (by_head, by_head, ('batch',)),
  )


def gather(buffer: Array, starts: Array, offsets: Array, span: int) -> Array:
  """Moves entries `starts[b] + offsets[b, i]` of `[B, H, S, D]` to `starts[b] +
  i`.

  `starts` is int32 `[B]`, `offsets` int32 `[B, N]`, 0 to `span - 1`; others
  move meaningless values. All `span` entries of a row are read, by one
  `dynamic_slice`, before N of them are written by one `dynamic_update_slice`,
  which clamps as in `append`.
  """
  # starts [5] and offsets [[0, 2, 5]]: entries 5, 7 and 10 move to 5, 6 and 7.
  by_head = ('batch', 'heads', 'length', 'kv')
  return rules.map_shards(
    functools.partial(_move_rows, span=span),
    (buffer, starts, offsets),
    (by_head, ('batch',), ('batch', None)),
  )


def rewind(cache: KVCache, lengths: Array) -> KVCache:
  """Sets a cache's lengths, int32 `[B]`."""
  return dataclasses.replace(cache, lengths=lengths.astype(jnp.int32))


def gather_all(
  cache: KVCache, starts: Array, offsets: Array, span: int
) -> KVCache:
  """Applies `gather` to the keys and values of all layers; lengths stay."""
  move = functools.partial(
    jax.tree.map, lambda x: gather(x, starts, offsets, span)
  )
  return dataclasses.replace(
    cache, keys=move(cache.keys), values=move(cache.values)
  )


def _move_rows(
  buffer: Array, starts: Array, offsets: Array, *, span: int
) -> Array:
  """Applies `gather` to the rows and heads of one device."""
  moved = jax.lax.platform_dependent(
    _read_rows(buffer, starts, span), offsets, cpu=_looked_up, default=_selected
  )
  return _write_rows(buffer, moved, starts)


def _read_rows(buffer: Array, starts: Array, span: int) -> Array:
  """Reads `[B, H, span, D]`, from `starts[b]` on.

  For a gather, as for a scatter, the TPU compiler inserts copies of the cache.
  It does so, too, if two programs that share a cache lay it out differently,
  and the axis order in which a slice is used becomes that of its source. So the
  slice is constrained to the order of caches that are only written.
  """
  batch_size, num_heads, capacity, head_dim = buffer.shape
  zero = jnp.zeros((), starts.dtype)
  order = _axes_on_tpus(capacity, head_dim)

  def read(row: Array | int) -> Array:
    start = (jnp.asarray(row, starts.dtype), zero, starts[row], zero)
    size = (1, num_heads, span, head_dim)
    return jax.lax.platform_dependent(
      jax.lax.dynamic_slice(buffer, start, size),
      tpu=lambda entries: layout.with_layout_constraint(entries, order),
      default=lambda entries: entries,
    )

  if batch_size <= _MAX_UNROLLED_ROWS:
    return jnp.concatenate([read(row) for row in range(batch_size)])
  rows = jnp.arange(batch_size, dtype=starts.dtype)
  return jax.lax.map(lambda row: read(row)[0], rows)


def _axes_on_tpus(capacity: int, head_dim: int) -> layout.Layout:
  """Returns the axis order in which a cache takes the least memory: TPUs pad
  the last axis to 128 entries and the one before to 8."""
  padded = lambda last, before: -(-last // 128) * 128 * (-(-before // 8) * 8)
  if padded(capacity, head_dim) < padded(head_dim, capacity):
    return layout.Layout((0, 1, 3, 2))
  return layout.Layout((0, 1, 2, 3))


def _looked_up(block: Array, offsets: Array) -> Array:
  """Picks `[B, H, N, D]` of `[B, H, span, D]`, entry by entry."""
  # Offsets are the same for all heads and all of an entry's features.
  places = offsets[:, None, :, None]
  return jnp.take_along_axis(block, places, axis=2, mode='clip')


def _selected(block: Array, offsets: Array) -> Array:
  """Does what `_looked_up` does, by masked sums, since TPUs look up entries one
  by one; a product with one-hot rows would spread a rejected sibling's NaN."""
  every = jnp.arange(block.shape[2], dtype=offsets.dtype)[None, None, :]
  is_it = offsets[:, :, None] == every
  chosen = jnp.where(is_it[:, None, :, :, None], block[:, :, None], 0)
  return jnp.sum(chosen, axis=3, dtype=block.dtype)


def _write_rows(buffer: Array, new: Array, lengths: Array) -> Array:
  """Applies `append` to the rows and heads of one device."""
  batch_size = buffer.shape[0]
  # All of an index must have one dtype, the lengths'.
  zero = jnp.zeros((), lengths.dtype)

  def write_row(row, buffer, new):
    update = jax.lax.dynamic_slice_in_dim(new, row, 1, axis=0)
    start = (jnp.asarray(row, lengths.dtype), zero, lengths[row], zero)
    return jax.lax.dynamic_update_slice(buffer, update, start)

  def write_unrolled(buffer):
    for row in range(batch_size):
      buffer = write_row(row, buffer, new)
    return buffer

  def write_in_scan(buffer):
    # A loop that slices `new` itself is more than libtpu can compile.
    def write(buffer, row):
      index, update, length = row
      start = (index, zero, length, zero)
      return jax.lax.dynamic_update_slice(buffer, update[None], start), None

    rows = jnp.arange(batch_size, dtype=lengths.dtype)
    return jax.lax.scan(write, buffer, (rows, new, lengths))[0]

  def write_in_opaque_loop(buffer):
    # XLA's CPU compiler fuses a plain write into its reader, computes it twice,
    # and copies the whole cache four times to keep the two apart. A loop stops
    # it, unless its trip count is known to be one.
    num_rows = jnp.where(lengths[0] >= 0, batch_size, 0)
    # It writes bfloat16 by way of float32, all of the buffer for every row, and
    # bits as they are.
    is_half = buffer.dtype.itemsize == 2
    as_bits = lambda x, dtype: (
      jax.lax.bitcast_convert_type(x, dtype) if is_half else x
    )
    bits = as_bits(new, jnp.uint16)
    written = jax.lax.fori_loop(
      0,
      num_rows,
      lambda row, buffer: write_row(row, buffer, bits),
      as_bits(buffer, jnp.uint16),
    )
    return as_bits(written, buffer.dtype)

  is_small = batch_size <= _MAX_UNROLLED_ROWS
  return jax.lax.platform_dependent(
    buffer,
    cpu=write_in_opaque_loop,
    default=write_unrolled if is_small else write_in_scan,
  )
