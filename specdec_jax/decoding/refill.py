"""Refilling: new prompts take the rows of finished ones within a batch.

`speculative.run` can return as soon as some rows are done; these functions put
others in their place. A row's output depends on that row alone (invariant 7),
so its neighbours may be at any point of their decodes.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.decoding.state import DecodeState


def idle(fresh: DecodeState, num_rows: int) -> DecodeState:
  """Makes a state of `num_rows` finished rows, all to be replaced; `fresh`, any
  state of `init` with any number of rows, gives the other shapes."""
  # 5 rows of a `fresh` with 2: [0, 1, 0, 1, 0]
  rows = jnp.arange(num_rows, dtype=jnp.int32) % fresh.done.size
  state = jax.tree.map(lambda leaf: leaf[rows], fresh)
  return dataclasses.replace(state, done=jnp.ones(num_rows, jnp.bool_))


def replace_rows(
  state: DecodeState, fresh: DecodeState, sources: Array
) -> DecodeState:
  """Replaces row b by row `sources[b]` of `fresh`, caches and counters too.

  `sources` is int32 `[B]`, negative to keep the row; `fresh` is a state of
  `init` with the same `max_len`. Selects whole rows, which shards by row as the
  loop does and costs one pass over the caches. Raises ValueError if rows of
  `fresh` and `state` differ in shape.
  """

  def put(old: Array, new: Array) -> Array:
    if old.shape[1:] != new.shape[1:]:
      raise ValueError(
        f'rows of shape {list(new.shape[1:])} cannot take the place of rows of '
        f'shape {list(old.shape[1:])}'
      )
    # sources [-1, 1]: row 0 stays, row 1 becomes row 1 of `fresh`
    is_new = jnp.reshape(sources >= 0, (-1,) + (1,) * (old.ndim - 1))
    return jnp.where(is_new, new[jnp.maximum(sources, 0)], old)

  return jax.tree.map(put, state, fresh)
