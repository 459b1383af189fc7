"""Strings that end a text: `generate --stop`.

The first of them to be complete in a row's text ends the row as an end token
would: the token that completes it is the last that is committed, counted and
traced, whatever else its iteration accepted. The text ends before the string.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specdec_jax.text import vocabularies
from specdec_jax.text.vocabularies import AnyVocabulary, TextStream
from specdec_jax.trace.recording import StepValues

# From the values of an iteration, on the host, to how many tokens of each row
# are kept of it, int32 `[B]`, and which rows a string has ended, bool `[B]`.
Watch = Callable[[StepValues], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Reading:
  """A row's text, but for an unfinished character, and where it stands."""

  text: str = ''
  stream: TextStream = dataclasses.field(default_factory=TextStream)


def check_vocabulary(stops: Sequence[str], vocabulary: AnyVocabulary) -> None:
  """Raises ValueError if a string is made of tokens that are no text."""
  for stop in stops:
    ids = vocabulary.encode(stop, add_special_tokens=False)
    if ids and set(ids) <= vocabulary.special_ids:
      raise ValueError(
        f'the stop string {stop!r} is a special token of this vocabulary, and '
        'the text holds none: it never occurs'
      )


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
