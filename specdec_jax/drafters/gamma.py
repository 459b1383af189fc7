"""The one check that all drafters make of their gamma."""


def check_gamma(gamma: int) -> None:
  """Raises ValueError unless `gamma` is a positive integer."""
  if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1:
    raise ValueError(f'gamma must be an integer of at least 1, got {gamma!r}')
