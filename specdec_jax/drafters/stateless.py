"""What drafters without weights and without memory are made of."""

from collections.abc import Callable

from specdec_jax.base import Array, Context, Draft, Drafter


def check_gamma(gamma: int) -> None:
  """Raises ValueError unless `gamma` is a positive integer."""
  if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1:
    raise ValueError(f'gamma must be an integer of at least 1, got {gamma!r}')


def stateless(
  gamma: int,
  propose: Callable[[Array, Context], Draft],
  *,
  may_abstain: bool = False,
) -> Drafter:
  """A drafter that looks at the context alone.

  Args:
    gamma: tokens an iteration at most.
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
