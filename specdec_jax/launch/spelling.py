"""What may have been meant by a name that is not known."""

import difflib
from collections.abc import Iterable


def did_you_mean(
  name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6
) -> str:
  """Returns '; did you mean X or Y?' with those of `known` that `name` is like,
  whatever their case, or '' without any; see `difflib.get_close_matches`."""
  by_lower = {each.lower(): each for each in known}
  near = difflib.get_close_matches(name.lower(), by_lower, most, cutoff)
  found = ' or '.join(by_lower[each] for each in near)
  return f'; did you mean {found}?' if found else ''
