"""New prompts in the rows of finished ones, without a new batch.

`speculative.run` can return as soon as some rows are done. These functions put
others in their place: what a row decodes depends on itself alone (invariant 7),
so its neighbours may be at any point of their own decodes.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.decoding.state import DecodeState


def idle(fresh: DecodeState, num_rows: int) -> DecodeState:
  """A state of `num_rows` finished rows, all to be replaced.

  Args:
    fresh: any state of `init`, whose shapes the rows take.
    num_rows: B, which need not be that of `fresh`.
  """
  rows = jnp.arange(num_rows, dtype=jnp.int32) % fresh.done.size
  state = jax.tree.map(lambda leaf: leaf[rows], fresh)
  return dataclasses.replace(state, done=jnp.ones(num_rows, jnp.bool_))


def replace_rows(
  state: DecodeState, fresh: DecodeState, sources: Array
) -> DecodeState:
  """Row b becomes row `sources[b]` of `fresh`, caches and counters included.

  It is a selection over whole rows, which shards by the first axis as the loop
  does; its price is one pass over the caches.

  `fresh` is of `init` with the same `max_len`; of int32 `sources[B]` a negative
  one keeps the row. ValueError if an array of `fresh` has other rows than that
  of `state`.
  """

  def put(old: Array, new: Array) -> Array:
    if old.shape[1:] != new.shape[1:]:
      raise ValueError(
        f'rows of shape {list(new.shape[1:])} cannot take the place of rows of '
        f'shape {list(old.shape[1:])}'
      )
    is_new = jnp.reshape(sources >= 0, (-1,) + (1,) * (old.ndim - 1))
    return jnp.where(is_new, new[jnp.maximum(sources, 0)], old)

  return jax.tree.map(put, state, fresh)
