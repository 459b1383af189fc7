"""What may have been meant by a name that is not known."""

import difflib
import re
from collections.abc import Iterable


def did_you_mean(
  name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6
) -> str:
  """Returns '; did you mean X or Y?' with those of `known` that `name` is like,
  whatever their case, or '' without any.

  First come names with all of its words, if it has several, then those of
  `difflib.get_close_matches`.
  """
  name = name.lower()
  by_lower = {each.lower(): each for each in known}
  # 't5_xxl' is closer to 'mt5_xxl' by letters, and to 't5_1_1_xxl' by words.
  words = _words(name)
  complete = [each for each in by_lower if words <= _words(each)]
  if len(words) < 2:
    complete = []
  near = [
    *difflib.get_close_matches(name, complete, most, 0.0),
    *difflib.get_close_matches(name, by_lower, most, cutoff),
  ]
  # Without repetitions.
  chosen = [*dict.fromkeys(near)][:most]
  found = ' or '.join(by_lower[each] for each in chosen)
  return f'; did you mean {found}?' if found else ''


def _words(name: str) -> set[str]:
  """Returns the words of a name, such as 't5' and 'xxl' of 't5_xxl'."""
  return {*re.findall(r'[^\W_]+', name)}
