"""No drafter: plain decoding through the speculative loop."""

import jax.numpy as jnp

from specdec_jax.base import Array, Context, Draft, Drafter


def none() -> Drafter:
  """A drafter with gamma 0, so that an iteration is a plain step."""

  def propose(
    params: tuple[()], row_keys: Array, context: Context, state: tuple[()]
  ) -> tuple[Draft, tuple[()]]:
    del params, row_keys
    lengths = jnp.zeros_like(context.lengths)
    tokens = jnp.zeros((lengths.size, 0), jnp.int32)
    return Draft(tokens=tokens, probs=None, lengths=lengths), state

  return Drafter(0, lambda params, prompt, max_len: (), propose)
