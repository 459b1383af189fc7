"""Guesses at random: the weakest drafter that speculation still survives."""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.base import Array, Context, Draft, Drafter, Prompt
from specdec_jax.drafters.gamma import check_gamma


def uniform(
  *, gamma: int, vocab_size: int, padded_vocab_size: int | None = None
) -> Drafter:
  """Draws each token uniformly from the vocabulary.

  Args:
    gamma: tokens an iteration.
    vocab_size: ids 0 to `vocab_size - 1` are drawn.
    padded_vocab_size: V, where the target's logits have padding; those ids get
      probability zero.

  Raises:
    ValueError: if `gamma` or `vocab_size` is less than 1, or the padded size is
      the smaller one.
  """
  check_gamma(gamma)
  padded_vocab_size = padded_vocab_size or vocab_size
  if not 1 <= vocab_size <= padded_vocab_size:
    raise ValueError(
      f'a vocabulary of {vocab_size} ids does not fit in {padded_vocab_size}'
    )

  def init(params: Any, prompt: Prompt, max_len: int) -> tuple[()]:
    del params, prompt, max_len
    return ()

  def propose(
    params: Any, row_keys: Array, context: Context, state: tuple[()]
  ) -> tuple[Draft, tuple[()]]:
    del params
    draw = lambda key: jax.random.randint(
      key, (gamma,), 0, vocab_size, jnp.int32
    )
    law = jnp.where(
      jnp.arange(padded_vocab_size) < vocab_size, 1.0 / vocab_size, 0.0
    ).astype(jnp.float32)
    draft = Draft(
      tokens=jax.vmap(draw)(row_keys),
      probs=jnp.broadcast_to(
        law, (row_keys.shape[0], gamma, padded_vocab_size)
      ),
      lengths=jnp.full_like(context.lengths, gamma),
    )
    return draft, state

  return Drafter(gamma, init, propose)
