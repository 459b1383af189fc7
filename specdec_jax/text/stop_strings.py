"""Strings that end a text: `generate --stop`.

The first of them to be complete in a row's text ends the row as an end token
would: the token that completes it is the last that is committed, counted and
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

# From the values of an iteration, on the host, to how many tokens of each row
# are kept of it, int32 `[B]`, and which rows a string has ended, bool `[B]`.
Watch = Callable[[StepValues], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Reading:
  """A row's text, but for an unfinished character, and where it stands."""

  text: str = ''
  stream: TextStream = dataclasses.field(default_factory=TextStream)


def check_vocabulary(stops: Sequence[str], vocabulary: AnyVocabulary) -> None:
  """Raises ValueError for a string that no text of the vocabulary holds: of
  special tokens, or with characters that no token spells.

  A string that the vocabulary only spells otherwise, as T5 writes one space for
  two, is told to the logger `specdec_jax`, once.
  """
  for stop in stops:
    if complaint := _complaint(stop, vocabulary):
      raise ValueError(complaint)


# A conversation asks before each turn, and is told once.
@functools.lru_cache(maxsize=64)
def _complaint(stop: str, vocabulary: AnyVocabulary) -> str | None:
  """Says why no text holds a stop string; None if one may."""
  ids = vocabulary.encode(stop, add_special_tokens=False)
  if ids and set(ids) <= vocabulary.special_ids:
    return (
      f'the stop string {stop!r} is a special token of this vocabulary, and '
      'the text holds none: it never occurs'
    )
  # At the ends of a text, vocabularies drop or add spaces: within one, none. A
  # space before it is part of a sentinel such as `<extra_id_0>`.
  text, spaced = f'a{stop}a', f'a {stop} a'
  written, also_written = (
    vocabulary.decode(vocabulary.encode(each, add_special_tokens=False))
    for each in (text, spaced)
  )
  if stop in written or stop in also_written:
    return None
  how = f'this vocabulary writes {text!r} as {written!r}'
  if not _is_spelled(stop, vocabulary):
    return (
      f'the stop string {stop!r} never occurs: {how}, and no tokens spell it'
    )
  _log.warning('the stop string %r may never occur: %s', stop, how)
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
  """Returns those of a model's own strings that are text, and a vocabulary
  that ends texts at the others too, which are special tokens of it."""
  texts, eos_ids = [], [*vocabulary.eos_ids]
  for stop in stops:
    ids = vocabulary.encode(stop, add_special_tokens=False)
    if len(ids) == 1 and ids[0] in vocabulary.special_ids:
      eos_ids += ids
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
  """Reads further tokens of a row, up to the one that completes a string;
  returns the new reading, from `Reading()` on, and how many tokens were read if
  a string is complete."""
  longest = max(map(len, stops))
  for i, token in enumerate(tokens):
    if token in vocabulary.eos_ids:
      continue
    stream = reading.stream
    piece, stream = vocabularies.stream_text(vocabulary, stream, [token])
    # A string may begin in the text before: of '\n\n' after 'a\n', only what
    # the new piece can complete is searched.
    start = max(0, len(reading.text) - longest + 1)
    reading = Reading(reading.text + piece, stream)
    if any(stop in reading.text[start:] for stop in stops):
      return reading, i + 1
  return reading, None


def text_of(
  vocabulary: AnyVocabulary, stops: Sequence[str], tokens: Sequence[int]
) -> tuple[str, str | None]:
  """Returns the text of new tokens before the first string in it, and that
  string; or all of it, and None."""
  if stops:
    reading, count = read_on(vocabulary, stops, Reading(), tokens)
    if count is not None:
      text = reading.text
      place, stop = min((text.find(s), s) for s in stops if s in text)
      return text[:place], stop
  ids = [token for token in tokens if token not in vocabulary.eos_ids]
  return vocabulary.decode(ids), None


def watch(vocabulary: AnyVocabulary, stops: Sequence[Sequence[str]]) -> Watch:
  """Follows the texts of rows, each with its own strings, step by step."""
  readings = [Reading()] * len(stops)

  def find_ends(values: StepValues) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array(values.counts)
    has_ended = np.zeros(counts.size, bool)
    verdict = values.verification
    for row, own in enumerate(stops):
      if not own:
        continue
      # Accepted tokens and the next one, as many as an EOS or a limit leaves.
      accepted = values.draft.tokens[row, : int(verdict.num_accepted[row])]
      tokens = [*accepted.tolist(), int(verdict.next_token[row])][: counts[row]]
      readings[row], count = read_on(vocabulary, own, readings[row], tokens)
      if count is not None:
        counts[row], has_ended[row] = count, True
    return counts, has_ended

  return find_ends
