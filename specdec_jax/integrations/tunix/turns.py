"""Decides by the times of earlier calls whether the next call drafts."""

# The share of the time of all calls that may go to trying the slower mode.
_SHARE = 0.02
# The slowdown of calls and of compiling that is assumed of drafting until it is
# measured.
_SLOWDOWN = 3.0


class Turns:
  """Chooses between plain and speculative decoding, whichever is faster.

  The slower of the two is measured again, as the policy changes, once all such
  measurements are estimated to take at most 2% of the time of all calls.
  """

  def __init__(self) -> None:
    # Tokens of the last call, seconds of all calls, and those of them that the
    # faster mode would have saved.
    self._num_tokens = 0
    self._seconds = 0.0
    self._lost_seconds = 0.0
    # Seconds per token of the last call with drafts (True) and without.
    self._paces: dict[bool, float] = {}
    self._compile_seconds = 0.0

  def drafts_next(self) -> bool:
    """Tells whether to draft in the next call."""
    if not self._paces:
      return False
    fastest = min(self._paces, key=lambda drafts: self._paces[drafts])
    best_pace = self._paces[fastest]
    # The seconds that a call in the slower mode would lose.
    if len(self._paces) == 1:
      plain_seconds = self._num_tokens * best_pace
      cost = (_SLOWDOWN - 1) * plain_seconds
      cost += _SLOWDOWN * self._compile_seconds
    else:
      cost = self._num_tokens * (self._paces[not fastest] - best_pace)
    is_affordable = self._lost_seconds + cost <= _SHARE * self._seconds
    return not fastest if is_affordable else fastest

  def count(
    self, drafts: bool, num_tokens: int, seconds: float, compiling: float
  ) -> None:
    """Adds a call: whether it drafted, its tokens, and the seconds that it took
    to decode and to compile."""
    self._num_tokens = num_tokens
    self._paces[drafts] = seconds / num_tokens
    self._seconds += seconds + compiling
    other_pace = self._paces.get(not drafts, self._paces[drafts])
    self._lost_seconds += max(0.0, seconds - num_tokens * other_pace)
    if drafts:
      self._lost_seconds += compiling
    self._compile_seconds = max(self._compile_seconds, compiling)
