"""Whether the next call of a training drafts, by what earlier calls took."""

# Of the seconds of a training, what trying the slower of the two may take.
_SHARE = 0.02
# Assumed of drafts until they are tried: calls, and compiling, take so many
# times as long as without.
_SLOWNESS = 3.0


class Turns:
  """Plain decoding, and drafts where they are faster.

  The slower of the two is tried, and tried again as the policy changes, once
  that is estimated to take at most 2% of the seconds of all calls so far,
  together with what such trials took before.
  """

  def __init__(self) -> None:
    self._num_tokens, self._spent, self._lost = 0, 0.0, 0.0
    # Seconds per token of the last call with drafts, and without.
    self._paces: dict[bool, float] = {}
    self._compiling = 0.0

  def drafts_next(self) -> bool:
    """Tells whether to draft in the next call."""
    if not self._paces:
      return False
    fastest = min(self._paces, key=lambda drafts: self._paces[drafts])
    best = self._paces[fastest]
    price = self._num_tokens * (self._paces.get(not fastest, 0.0) - best)
    if len(self._paces) == 1:
      plain = self._num_tokens * best
      price = (_SLOWNESS - 1) * plain + _SLOWNESS * self._compiling
    is_tried = self._lost + price <= _SHARE * self._spent
    return not fastest if is_tried else fastest

  def count(
    self, drafts: bool, num_tokens: int, seconds: float, compiling: float
  ) -> None:
    """Adds a call: whether it drafted, its tokens, and the seconds of decoding
    and of compiling for it."""
    self._num_tokens, self._paces[drafts] = num_tokens, seconds / num_tokens
    self._spent += seconds + compiling
    other = self._paces.get(not drafts, self._paces[drafts])
    self._lost += max(0.0, seconds - num_tokens * other) + drafts * compiling
    self._compiling = max(self._compiling, compiling)
