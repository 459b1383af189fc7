"""Uniform random drafts: the weakest drafter, and decoding is still exact."""

import jax
import jax.numpy as jnp

from specdec_jax.base import Array, Context, Draft, Drafter
from specdec_jax.drafters.stateless import stateless
from specdec_jax.sampling import keys


def uniform(
  *, gamma: int, vocab_size: int, padded_vocab_size: int | None = None
) -> Drafter:
  """Draws each of gamma tokens uniformly from ids 0 to `vocab_size - 1`.

  `padded_vocab_size` is V if the target's logits are padded; padding ids get
  probability zero. Raises ValueError if `gamma` or `vocab_size` is below 1, or
  `padded_vocab_size` is below `vocab_size`.
  """
  padded_vocab_size = padded_vocab_size or vocab_size
  if not 1 <= vocab_size <= padded_vocab_size:
    raise ValueError(
      f'vocab_size should be 1 to {padded_vocab_size}, got {vocab_size}'
    )

  def propose(row_keys: Array, context: Context) -> Draft:
    draw_fn = lambda key: jax.random.randint(
      key, (gamma,), 0, vocab_size, jnp.int32
    )
    is_real = jnp.arange(padded_vocab_size) < vocab_size  # not padding
    probs = jnp.where(is_real, 1.0 / vocab_size, 0.0).astype(jnp.float32)
    shape = context.lengths.size, gamma, padded_vocab_size
    return Draft(
      tokens=keys.draw(draw_fn, row_keys),
      probs=jnp.broadcast_to(probs, shape),
      lengths=jnp.full_like(context.lengths, gamma),
    )

  return stateless(gamma, propose)
