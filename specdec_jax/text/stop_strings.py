"""Stop strings: `generate --stop`.

The first stop string that is complete in a row's text ends the row, as EOS
does: the token that completes it is the last that is committed, counted and
traced, whatever else its iteration accepted. The text ends before the string.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

import numpy as np

from specdec_jax.decoding.step_values import StepValues
from specdec_jax.text import token_bytes, vocabularies
from specdec_jax.text.vocabularies import AnyVocabulary, TextStream

_log = logging.getLogger('specdec_jax')

# From the values of an iteration, on the host, to the number of tokens of every
# row to commit, int32 `[B]`, and which rows have ended, bool `[B]`.
Watch = Callable[[StepValues], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Reading:
  """A row's text so far, without an incomplete character, and the state of its
  stream."""

  text: str = ''
  stream: TextStream = dataclasses.field(default_factory=TextStream)


def check_vocabulary(stops: Sequence[str], vocabulary: AnyVocabulary) -> None:
  """Raises ValueError for a string that cannot occur in a text: of special
  tokens, or with characters that no token spells.

  The logger `specdec_jax` warns, once, of a string that the vocabulary spells
  in another way, as T5 writes one space for two.
  """
  for stop in stops:
    complaint = _complaint(stop, vocabulary)
    if complaint:
      raise ValueError(complaint)


# Cached, since a conversation checks before every turn, and should warn once.
@functools.lru_cache(maxsize=64)
def _complaint(stop: str, vocabulary: AnyVocabulary) -> str | None:
  """Describes why a stop string cannot occur; None if it can."""
  ids = vocabulary.encode(stop, add_special_tokens=False)
  if ids and set(ids) <= vocabulary.special_ids:
    return (
      f'the stop string {stop!r} is a special token of this vocabulary, and '
      'never occurs in the text'
    )
  # Vocabularies drop or add spaces at the ends of a text, but not within it.
  # The space before a sentinel such as `<extra_id_0>` is part of the token.
  round_trip = lambda text: vocabulary.decode(
    vocabulary.encode(text, add_special_tokens=False)
  )
  text = f'a{stop}a'
  written = round_trip(text)
  if stop in written or stop in round_trip(f'a {stop} a'):
    return None
  reason = f'this vocabulary writes {text!r} as {written!r}'
  if not _is_spelled(stop, vocabulary):
    return (
      f'the stop string {stop!r} never occurs: {reason}, and no tokens spell it'
    )
  _log.warning('the stop string %r may never occur: %s', stop, reason)
  return None


def _is_spelled(stop: str, vocabulary: AnyVocabulary) -> bool:
  """Tells whether tokens, one after the other, can have a string in their text;
  True if the vocabulary does not say how its tokens are spelled."""
  try:
    spelled = token_bytes.token_bytes(vocabulary)
  except ValueError:
    return True
  # Grammars allow no sentinels, such as `<extra_id_0>`, but they are text.
  texts = {
    text or vocabulary.decode([token_id]).encode()
    for token_id, text in enumerate(spelled)
  }
  texts.discard(b'')
  target = stop.encode()
  if any(target in text for text in texts):
    return True
  # Lengths of what is spelled so far. Of '. \n', a token '.' spells one byte,
  # as does the end of 'a.', and one of ' \n\n' the rest.
  reached = {
    length
    for text in texts
    for length in range(1, len(target))
    if text.endswith(target[:length])
  }
  for length in range(1, len(target)):
    if length not in reached:
      continue
    rest = target[length:]
    if any(text.startswith(rest) for text in texts):
      return True
    reached |= {length + len(t) for t in texts if rest.startswith(t)}
  return False


def split_stops(
  stops: Sequence[str], vocabulary: AnyVocabulary
) -> tuple[tuple[str, ...], AnyVocabulary]:
  """Splits a model's stop strings into those that are text, which are returned,
  and special tokens, which become `eos_ids` of the returned vocabulary.

  The logger `specdec_jax` warns of a string that no text can contain, which is
  left out: unlike a user, the model's folder is not refused for it.
  """
  texts = []
  eos_ids = [*vocabulary.eos_ids]
  for stop in stops:
    ids = vocabulary.encode(stop, add_special_tokens=False)
    if len(ids) == 1 and ids[0] in vocabulary.special_ids:
      eos_ids += ids
      continue
    complaint = _complaint(stop, vocabulary)
    if complaint:
      _log.warning("ignored of the model's stop_strings: %s", complaint)
    else:
      texts.append(stop)
  ends = tuple(dict.fromkeys(eos_ids))
  return tuple(texts), dataclasses.replace(vocabulary, eos_ids=ends)


def read_on(
  vocabulary: AnyVocabulary,
  stops: Sequence[str],
  reading: Reading,
  tokens: Sequence[int],
) -> tuple[Reading, int | None]:
  """Reads further tokens of a row, up to the one that completes a stop string.

  `reading` is `Reading()` at the start. Returns the new reading, and the number
  of tokens up to the end of a stop string, or None.
  """
  longest = max(map(len, stops))
  for i, token in enumerate(tokens):
    if token in vocabulary.eos_ids:
      continue
    stream = reading.stream
    piece, stream = vocabularies.stream_text(vocabulary, stream, [token])
    # A stop string may begin in the earlier text, as '\n\n' after 'a\n': search
    # from the first place at which the new piece can complete one.
    start = max(0, len(reading.text) - longest + 1)
    reading = Reading(reading.text + piece, stream)
    if any(stop in reading.text[start:] for stop in stops):
      return reading, i + 1
  return reading, None


def text_of(
  vocabulary: AnyVocabulary, stops: Sequence[str], tokens: Sequence[int]
) -> tuple[str, str | None]:
  """Returns the text of new tokens before the first stop string, and that
  string; or the whole text, and None."""
  if stops:
    reading, count = read_on(vocabulary, stops, Reading(), tokens)
    if count is not None:
      text = reading.text
      place, stop = min((text.find(s), s) for s in stops if s in text)
      return text[:place], stop
  ids = [token for token in tokens if token not in vocabulary.eos_ids]
  return vocabulary.decode(ids), None


def watch(vocabulary: AnyVocabulary, stops: Sequence[Sequence[str]]) -> Watch:
  """Returns a function that searches the texts of rows, step by step, for their
  stop strings."""
  readings = [Reading()] * len(stops)

  def find_ends(values: StepValues) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array(values.counts)
    has_ended = np.zeros(counts.size, bool)
    verdict = values.verification
    for row, row_stops in enumerate(stops):
      if not row_stops:
        continue
      # Accepted tokens and the next one, up to EOS or the maximum length.
      accepted = values.draft.tokens[row, : int(verdict.num_accepted[row])]
      tokens = [*accepted.tolist(), int(verdict.next_token[row])][: counts[row]]
      readings[row], count = read_on(
        vocabulary, row_stops, readings[row], tokens
      )
      if count is not None:
        counts[row] = count
        has_ended[row] = True
    return counts, has_ended

  return find_ends
