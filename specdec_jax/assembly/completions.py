"""What was decoded for each text of a batch: whole, or piece by piece."""

import dataclasses
import functools
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import jax

from specdec_jax.assembly import recording
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.log_probs import Scored, Top
from specdec_jax.assembly.running import Iterations
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.text import stop_strings, vocabularies
from specdec_jax.text.prompts import Batch

_log = logging.getLogger('specdec_jax')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """What was decoded for one prompt; `print` shows its text.

  Attributes:
    text: the continuation, without what ended it.
    tokens: its ids, EOS included.
    context: those of all that was read and written, `tokens` at the end; what
      `Decoder.remember` takes.
    log_probs: the model's own log-probabilities of them.
    processed_log_probs: those by which they were drawn, if asked for.
    top_log_probs: of each place, the likeliest ids and the model's own
      log-probabilities, the best first.
    top_processed_log_probs: the same of those by which tokens were drawn.
    stop: the string that ended it, or None.
    finish_reason: 'stop' after EOS or a stop string, 'length' at the limit,
      'nan' where logits were not numbers, or settings left no token.
    gamma: drafted tokens per iteration, at most; 0 for plain decoding.
    statistics: by name: tokens, target runs, tokens per target run, drafted
      and accepted tokens, the acceptance rate; see `decoding.rates`.
  """

  prompt: str
  text: str
  tokens: tuple[int, ...]
  context: tuple[int, ...]
  log_probs: tuple[float, ...]
  stop: str | None
  finish_reason: str
  gamma: int
  statistics: Mapping[str, Any]
  processed_log_probs: tuple[float, ...] | None = None
  top_log_probs: Sequence[Top] | None = None
  top_processed_log_probs: Sequence[Top] | None = None

  def __str__(self) -> str:
    return self.text


def of_row(
  decoder: Decoder,
  batch: Batch,
  output: DecodeOutput,
  row: int,
  scored: tuple[Scored, Scored] | None = None,
) -> Completion:
  """Reads a row of an output that is on the host, `scored` by `log_probs`.

  If a model that answers messages ended a text that is none at once, that is
  told to the logger `specdec_jax`, once for each model.
  """
  # The prompt is in the buffer, too: [prompt | continuation | padding].
  span = slice(int(batch.prompt.decoder_lengths[row]), int(output.lengths[row]))
  tokens = output.tokens[row, span].tolist()
  source = batch.prompt.encoder_tokens
  read = () if source is None else source[row][source[row] != 0].tolist()
  stops = batch.stops[row]
  text, stop = stop_strings.text_of(decoder.vocabulary, stops, tokens)
  has_eos = not set(tokens[-1:]).isdisjoint(decoder.vocabulary.eos_ids)
  reason = 'stop' if has_eos or stop is not None else 'length'
  # Most models that follow instructions end a text that is no message so.
  has_ended = has_eos and stop is None and not text.strip()
  is_plain_text = any(batch.is_plain[row : row + 1])
  if has_ended and is_plain_text and decoder.vocabulary.chat_template:
    _tell_of_chat(decoder.model.checkpoint)
  # With `exact_bits` it has the depth of what drafts beside it.
  is_plain = decoder.recipe.decodes_plainly
  more: dict[str, Any] = {}
  if scored is not None:
    raw, processed = scored
    _, more['top_log_probs'] = raw.of_row(row, len(tokens))
    log_probs, tops = processed.of_row(row, len(tokens))
    more['processed_log_probs'] = log_probs
    more['top_processed_log_probs'] = tops
  return Completion(
    prompt=batch.texts[row],
    text=text,
    tokens=tuple(tokens),
    context=(*read, *output.tokens[row, : span.stop].tolist()),
    log_probs=tuple(output.log_probs[row, span].tolist()),
    stop=stop,
    finish_reason='nan' if output.has_nan[row] else reason,
    gamma=0 if is_plain else decoder.method.depth,
    statistics=metrics.row_summary(output.statistics, row),
    **more,
  )


@functools.lru_cache(maxsize=64)
def _tell_of_chat(model: str) -> None:
  """Says once of a model why its texts may be empty."""
  _log.warning(
    '%s ended a text at once: it has a chat template, and prompts are given as '
    'they are; --chat, in Python chat=True, makes messages of them',
    model,
  )


def error_of_row(
  batch: Batch, output: DecodeOutput, row: int, num_samples: int = 1
) -> str | None:
  """Says that a row ended since its logits were NaN, or its settings left no
  token; None if neither is so."""
  if not output.has_nan[row]:
    return None
  reason = 'the logits were not numbers (NaN)'
  if not (batch.prompt.processors is None and batch.prompt.grammar is None):
    reason += ', or its settings left no token'
  # Row ids count samples: with 2 of each, rows 4 and 5 are of prompt 3.
  number = int(batch.prompt.row_ids[row]) // num_samples + 1
  num_new = int(output.statistics.num_tokens[row])
  return f'prompt {number}: after {num_new} new tokens {reason}; it ended there'


class Stream:
  """Yields the text of one prompt as it is decoded. `completion` is None until
  the iteration has ended, and then all of it."""

  def __init__(self, pieces: Generator[str, None, Completion]):
    self.completion: Completion | None = None
    self._pieces = self._told(pieces)

  def _told(
    self, pieces: Generator[str, None, Completion]
  ) -> Generator[str, None, None]:
    self.completion = yield from pieces

  def __iter__(self) -> Iterator[str]:
    return self._pieces

  def __next__(self) -> str:
    return next(self._pieces)

  def close(self) -> None:
    """Breaks the decode off."""
    self._pieces.close()


def pieces(
  decoder: Decoder, batch: Batch, iterations: Iterations
) -> Generator[str, None, Completion]:
  """Yields text that no later token can change, and returns all of it."""
  vocabulary, read = decoder.vocabulary, vocabularies.TextStream()
  text, num_shown = '', 0
  while True:
    try:
      records = next(iterations)
    except StopIteration as end:
      output = jax.device_get(end.value)
      if error := error_of_row(batch, output, 0):
        raise ValueError(error) from None
      completion = of_row(decoder, batch, output, 0)
      # Text was held back that looked like the beginning of a stop string.
      held_back = completion.text[num_shown:]
      if held_back:
        yield held_back
      return completion
    ids = [
      token['token']
      for record in records
      for token in recording.committed(record)
      if token['token'] not in vocabulary.eos_ids
    ]
    # A character of several tokens comes with the last of them.
    piece, read = vocabularies.stream_text(vocabulary, read, ids)
    text += piece
    # With the stop string 'STOP', of 'say STO' only 'say ' is shown.
    num_safe = len(text) - _longest_beginning(text, batch.stops[0])
    if num_safe > num_shown:
      yield text[num_shown:num_safe]
      num_shown = num_safe


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
  """Counts the characters at the end of a text that may begin a stop string, or
  belong to one that is complete."""
  # Of 'say STO' with the stop string 'STOP' these are 3.
  lengths = [0, *(len(text) - text.find(s) for s in stops if s in text)]
  for stop in stops:
    lengths += [n for n in range(1, len(stop)) if text.endswith(stop[:n])]
  return max(lengths)
