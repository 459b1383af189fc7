"""Random streams: each row its own, each iteration fresh.

A row's draws depend on `(rng_key, row_id, committed length)` alone, so they are
the same whatever batch, padding or mesh the row is in. An iteration is keyed by
the length it starts from. Keying draws by absolute token position instead would
bias block verification, whose accepted length depends on later draws.
"""

import jax

from specdec_jax.base import Array


def row_keys(rng_key: Array, row_ids: Array) -> Array:
  """Keys `[B]` from one key and int32 row ids `[B]`."""
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng_key, row_ids)


def iteration_keys(row_keys: Array, lengths: Array) -> tuple[Array, Array]:
  """Keys `[B]` for drafting and for verifying, from committed lengths `[B]`."""
  keys = jax.vmap(jax.random.fold_in)(row_keys, lengths)
  keys = jax.vmap(jax.random.split)(keys)
  return keys[:, 0], keys[:, 1]
