"""Drafts that cost nothing, for the costs of everything else."""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.base import Array, Context, Draft, Drafter, Tree


def always_full(
  gamma: int,
  vocab_size: int | None = None,
  *,
  may_abstain: bool = False,
  tree: Tree | None = None,
) -> Drafter:
  """A drafter that proposes gamma copies of the last token, at no cost.

  An iteration costs a target call over gamma + 1 positions: with gamma 0, a
  plain step.

  Args:
    gamma: tokens of a draft, or nodes of a tree.
    vocab_size: makes drafts have a distribution, one-hot, so that verification
      costs as much as with a draft model; None: no distribution.
    may_abstain: makes the loop that of a drafter that may have no draft. The
      params of this one, a bool scalar, say whether it drafts.
    tree: the shape of the draft; None for a chain.
  """

  def propose(params: Any, row_keys: Array, context: Context, state: Any):
    del row_keys
    # Of a context [5, 6, 7] and gamma 2, [7, 7].
    at = context.lengths[:, None] - 1
    last = jnp.take_along_axis(context.tokens, at, axis=1)
    tokens = jnp.repeat(last, gamma, axis=1)
    lengths = jnp.full_like(context.lengths, gamma)
    draft = Draft(
      tokens=tokens,
      probs=None if vocab_size is None else jax.nn.one_hot(tokens, vocab_size),
      lengths=jnp.where(params, lengths, 0) if may_abstain else lengths,
    )
    return draft, state

  return Drafter(
    gamma,
    lambda params, prompt, max_len: (),
    propose,
    may_abstain,
    tree=tree,
    takes_guesses=False,
  )
