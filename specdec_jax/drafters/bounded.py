"""Drafters whose model has fewer positions than texts may need."""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays, trees
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter


def within(drafter: Drafter, num_positions: int) -> Drafter:
  """Returns the drafter without drafts for rows in which a full draft would end
  beyond the `num_positions` of its model.

  Such rows continue without drafts. If all rows are that long, the model is not
  run either.
  """
  depth = drafter.gamma if drafter.tree is None else trees.depth(drafter.tree)

  def propose(
    params: Arrays,
    row_keys: Array,
    context: Context,
    state: Arrays,
    *target: Arrays,
  ) -> tuple[Draft, Arrays]:
    def draft(carry: tuple[Any, Arrays]) -> tuple[Any, Arrays]:
      return drafter.propose(params, row_keys, context, carry[1], *target)

    has_room = context.lengths + depth <= num_positions
    shapes, _ = jax.eval_shape(draft, (None, state))
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    drafted, state = arrays.run_if(jnp.any(has_room), draft, (empty, state))
    lengths = jnp.where(has_room, drafted.lengths, 0)
    return drafted.replace(lengths=lengths), state

  return drafter._replace(propose=propose, may_abstain=True)
