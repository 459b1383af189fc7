"""Drafters without weights and without state."""

from collections.abc import Callable

import jax.numpy as jnp

from specdec_jax.base import Array, Context, Draft, Drafter

# A target call has gamma + 1 positions with V probabilities each: far larger
# ones overflow the compiler's sizes.
MAX_GAMMA = 1024


def check_gamma(gamma: int) -> None:
  """Raises ValueError unless `gamma` is an integer from 1 to `MAX_GAMMA`."""
  if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1:
    raise ValueError(f'gamma must be an integer of at least 1, got {gamma!r}')
  if gamma > MAX_GAMMA:
    raise ValueError(f'gamma must be at most {MAX_GAMMA}, got {gamma}')


def stateless(
  gamma: int, propose: Callable[[Array, Context], Draft]
) -> Drafter:
  """Returns a drafter of up to gamma tokens from `propose`, `(row_keys[B],
  context) -> Draft`. Raises ValueError if `gamma` is out of range."""
  check_gamma(gamma)
  return _drafter(gamma, propose)


def none(gamma: int = 0) -> Drafter:
  """Returns a drafter without drafts. With gamma 0 an iteration is a plain
  step, otherwise it is as wide as with drafts of gamma tokens."""

  def propose(row_keys: Array, context: Context) -> Draft:
    del row_keys
    lengths = jnp.zeros_like(context.lengths)
    tokens = jnp.zeros((lengths.size, gamma), jnp.int32)
    return Draft(tokens=tokens, probs=None, lengths=lengths)

  return _drafter(gamma, propose)._replace(takes_guesses=False)


def _drafter(gamma: int, propose: Callable[[Array, Context], Draft]) -> Drafter:
  init = lambda params, prompt, max_len: ()
  propose_fn = lambda params, keys, context, state: (
    propose(keys, context),
    state,
  )
  return Drafter(gamma, init, propose_fn)
