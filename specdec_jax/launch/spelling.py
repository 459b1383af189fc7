"""Suggestions for misspelt names."""

import difflib
import re
from collections.abc import Iterable


def did_you_mean(
  name: str, names: Iterable[str], *, most: int = 1, cutoff: float = 0.6
) -> str:
  """Returns '; did you mean X or Y?' with names similar to `name`, ignoring
  case, or '' if there are none.

  Names with all of its words come first, if it has several, then those of
  `difflib.get_close_matches`.
  """
  name = name.lower()
  by_lower = {candidate.lower(): candidate for candidate in names}
  # 't5_xxl' is closer to 'mt5_xxl' by letters, and to 't5_1_1_xxl' by words.
  words = _words(name)
  complete = [candidate for candidate in by_lower if words <= _words(candidate)]
  if len(words) < 2:
    complete = []
  near = [
    *difflib.get_close_matches(name, complete, most, 0.0),
    *difflib.get_close_matches(name, by_lower, most, cutoff),
  ]
  # Without repetitions.
  chosen = [*dict.fromkeys(near)][:most]
  suggestions = ' or '.join(by_lower[candidate] for candidate in chosen)
  return f'; did you mean {suggestions}?' if suggestions else ''


def _words(name: str) -> set[str]:
  """Returns the words of a name, such as 't5' and 'xxl' of 't5_xxl'."""
  return {*re.findall(r'[^\W_]+', name)}
