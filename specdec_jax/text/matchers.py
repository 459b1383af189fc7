"""Matchers of `llguidance`: the state of a grammar after a text.

A matcher is changed by what it reads, and goes back by as many tokens
(`rollback`). Those of texts that were read before are kept.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Matcher = Any


class Chain(NamedTuple):
  """A completed draft: its tokens, and whether each is the grammar's own."""

  tokens: list[int]
  is_forced: list[bool]


class Matchers:
  """The matchers of texts that were read, by grammar and text.

  Args:
    make: returns the matcher of a grammar, by its number, after no text.
  """

  def __init__(self, make: Callable[[int], Matcher]):
    self._make = make
    # By a grammar's number and the bytes of a text's ids, the oldest first. Two
    # rows may have the same text.
    self._by_text: collections.OrderedDict[tuple[int, bytes], list[Matcher]]
    self._by_text = collections.OrderedDict()
    # Several devices of a process call at once.
    self._lock = threading.Lock()

  def take(self, number: int, text: np.ndarray, width: int) -> Matcher | None:
    """Returns the matcher after a text, int32 `[N]`, which reads at most the
    last `width` tokens if a shorter text is known. None if no text of the
    grammar begins so; an error, such as a limit, is the matcher's state."""
    matcher, num_read = self._nearest(number, text, width)
    unread = text[num_read:].tolist()
    count = matcher.try_consume_tokens(unread) if unread else 0
    if count < len(unread) and not matcher.is_error():
      return None
    return matcher

  def keep(
    self, number: int, text: np.ndarray, matcher: Matcher, most: int
  ) -> None:
    """Keeps a matcher for later; of more than `most` texts, the oldest go."""
    with self._lock:
      self._by_text.setdefault((number, text.tobytes()), []).append(matcher)
      while len(self._by_text) > most:
        self._by_text.popitem(last=False)

  def _nearest(
    self, number: int, text: np.ndarray, width: int
  ) -> tuple[Matcher, int]:
    """Finds a matcher of a prefix, and the length of that."""
    shortest = max(len(text) - width, 0)
    for length in range(len(text), shortest - 1, -1):
      key = number, text[:length].tobytes()
      with self._lock:
        matchers = self._by_text.pop(key, [])
        if len(matchers) > 1:
          self._by_text[key] = matchers[:-1]
      if matchers:
        return matchers[-1], length
    return self._make(number), 0


def completed(
  matcher: Matcher,
  tokenizer: Any,
  drafted: Sequence[int],
  *,
  gamma: int,
  is_certain: bool,
) -> Chain:
  """Completes a chain by the tokens that the grammar leaves no choice of.

  They take the place of what was drafted. Where a drafter has nothing to say,
  and only one text may follow, the chain has the likeliest spelling of that.

  Args:
    matcher: of the text before the chain; it is the same afterwards.
    tokenizer: its `LLTokenizer`.
    drafted: tokens from a drafter.
    gamma: the most tokens of a chain.
    is_certain: whether they were not drawn. Only then may it depend on a token
      itself whether that is left out, as those that may not come.
  """
  chain: list[int] = []
  is_forced: list[bool] = []
  # Whether the drafter's tokens continue the chain.
  is_own, num_read = True, 0
  while len(chain) < gamma:
    place = len(chain)
    is_own = is_own and place < len(drafted)
    forced = _forced(matcher, tokenizer)
    if not forced and is_own and is_certain:
      is_own = matcher.validate_tokens([drafted[place]]) == 1
    if not forced and not is_own:
      forced = tokenizer.tokenize_bytes(matcher.compute_ff_bytes())[:1]
      if not forced:
        break
    token = forced[0] if forced else drafted[place]
    is_own = is_own and drafted[place] == token
    chain.append(token)
    is_forced.append(bool(forced))
    if not matcher.try_consume_tokens([token]):
      # What was drawn has to stay, though it may not come.
      rest = drafted[place + 1 :] if is_own else []
      chain += rest
      is_forced += [False] * len(rest)
      break
    num_read += 1
  matcher.rollback(num_read)
  return Chain(chain, is_forced)


def _forced(matcher: Matcher, tokenizer: Any) -> list[int]:
  """The tokens that alone may come next, none if there is a choice."""
  if matcher.is_error():
    return []
  if matcher.is_stopped():
    # The text is complete; its end may have been read as well.
    has_ended = matcher.stop_reason() == 'EndOfSentence'
    return [] if has_ended else [tokenizer.eos_token]
  return matcher.compute_ff_tokens()[:1]
