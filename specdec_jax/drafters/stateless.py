"""What drafters without weights and without memory are made of."""

from collections.abc import Callable

from specdec_jax.base import Array, Context, Draft, Drafter

# Of an iteration. Its target call has gamma + 1 positions with V probabilities
# each: far more overflow the compiler's sizes.
MAX_GAMMA = 1024


def check_gamma(gamma: int) -> None:
  """Raises ValueError unless `gamma` is an integer from 1 to `MAX_GAMMA`."""
  if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1:
    raise ValueError(f'gamma must be an integer of at least 1, got {gamma!r}')
  if gamma > MAX_GAMMA:
    raise ValueError(f'gamma must be at most {MAX_GAMMA}, got {gamma}')


def stateless(
  gamma: int,
  propose: Callable[[Array, Context], Draft],
  *,
  may_abstain: bool = False,
) -> Drafter:
  """A drafter that looks at the context alone.

  Args:
    gamma: tokens per iteration, at most.
    propose: `(row_keys[B], context) -> Draft`.
    may_abstain: see `Drafter`.

  Raises:
    ValueError: if `gamma` is less than 1.
  """
  check_gamma(gamma)
  return Drafter(
    gamma=gamma,
    init=lambda params, prompt, max_len: (),
    propose=lambda params, row_keys, context, state: (
      propose(row_keys, context),
      state,
    ),
    may_abstain=may_abstain,
  )
