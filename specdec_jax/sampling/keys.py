"""Random streams: one per row, with fresh keys for each iteration.

A row's draws depend on `(rng_key, row_id, committed length)` alone, so they are
the same whatever batch, padding or mesh the row is in. An iteration is keyed by
the length it starts from. Keying draws by absolute token position instead would
bias block verification, whose accepted length depends on later draws.

All streams use threefry, whatever kind of key they start from: for a batch of
`rbg` or `unsafe_rbg` keys, JAX's draws depend on the first key alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.base import Array

_THREEFRY = 'threefry2x32'


def threefry(keys: Array) -> Array:
  """Converts keys of any kind to threefry keys of the same shape.

  Threefry keys stay as they are. `rbg` makes, splits and folds keys as threefry
  does and stores the two words twice: [a, b, a, b] becomes threefry's [a, b].
  If the halves differ, the second is folded into the first. Raw keys are
  uint32, `[..., 2]` for threefry and `[..., 4]` for the other kinds. Raises
  ValueError for any other dtype or number of words.
  """
  is_typed = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
  words = jax.random.key_data(keys) if is_typed else jnp.asarray(keys)
  if words.dtype != jnp.uint32 or words.shape[-1:] not in ((2,), (4,)):
    raise ValueError(
      'a random key has 2 or 4 words of uint32, got '
      f'{words.dtype}{list(words.shape)}: make one by jax.random.key'
    )
  first, second = words[..., :2], words[..., 2:]
  if second.size:
    is_twice = jnp.all(first == second, axis=-1, keepdims=True)  # [a, b, a, b]
    first = jnp.where(is_twice, first, _fold(first, second))
  return jax.random.wrap_key_data(first, impl=_THREEFRY)


def _fold(first: Array, second: Array) -> Array:
  """Folds both words of `second[..., 2]` into the keys `first[..., 2]`."""

  def fold(words: Array, more: Array) -> Array:
    key = jax.random.wrap_key_data(words, impl=_THREEFRY)
    key = jax.random.fold_in(jax.random.fold_in(key, more[0]), more[1])
    return jax.random.key_data(key)

  folded = jax.vmap(fold)(first.reshape(-1, 2), second.reshape(-1, 2))
  return folded.reshape(first.shape)


def row_keys(rng_key: Array, row_ids: Array) -> Array:
  """Derives keys `[B]` from one key of any kind and int32 row ids `[B]`; given
  B keys, returns those. Raises ValueError for another number of keys."""
  rng_key = threefry(rng_key)
  if rng_key.shape == row_ids.shape:  # a key per row
    return rng_key
  if rng_key.shape:
    raise ValueError(
      f'expected one random key or {row_ids.size}, got {list(rng_key.shape)}'
    )
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng_key, row_ids)


def iteration_keys(row_keys: Array, lengths: Array) -> tuple[Array, Array]:
  """Derives keys `[B]` for drafting, and `[B]` for verifying, from committed
  lengths int32 `[B]`."""
  keys = jax.vmap(jax.random.fold_in)(threefry(row_keys), lengths)
  draft, verify = split(keys, 2)
  return draft, verify


def split(row_keys: Array, count: int) -> Array:
  """Splits keys `[B]` into `[count, B]`."""
  split_key = lambda key: jax.random.split(key, count)
  return jax.vmap(split_key, out_axes=1)(threefry(row_keys))


def draw(draw_fn: Callable[[Array], Any], row_keys: Array) -> Any:
  """Calls `draw_fn` with each row's key and stacks the results, any pytree of
  arrays, to `[B, ...]`."""
  return jax.vmap(draw_fn)(threefry(row_keys))
