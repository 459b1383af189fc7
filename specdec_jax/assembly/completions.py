"""What was decoded for each text of a batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec_jax.assembly.decoder import Decoder
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.measure import metrics
from specdec_jax.text import stop_strings
from specdec_jax.text.prompts import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """What was decoded for one prompt; `print` shows its text.

  Attributes:
    text: the continuation, without what ended it.
    tokens: its ids, EOS included.
    log_probs: the model's own log-probabilities of them.
    stop: the string that ended it, or None.
    finish_reason: 'stop' after EOS or a stop string, 'length' at the limit,
      'nan' where logits were not numbers.
    statistics: by name: tokens, target runs, tokens per target run, drafted
      and accepted tokens, the acceptance rate; see `measure.metrics`.
  """

  prompt: str
  text: str
  tokens: tuple[int, ...]
  log_probs: tuple[float, ...]
  stop: str | None
  finish_reason: str
  statistics: Mapping[str, Any]

  def __str__(self) -> str:
    return self.text


def of_row(
  decoder: Decoder,
  batch: Batch,
  output: DecodeOutput,
  row: int,
) -> Completion:
  """Reads a row of an output that is on the host."""
  # The prompt is in the buffer, too: [prompt | continuation | padding].
  span = slice(int(batch.prompt.decoder_lengths[row]), int(output.lengths[row]))
  tokens = output.tokens[row, span].tolist()
  stops = batch.stops[row]
  text, found = stop_strings.text_of(decoder.vocabulary, stops, tokens)
  has_eos = not set(tokens[-1:]).isdisjoint(decoder.vocabulary.eos_ids)
  reason = 'stop' if has_eos or found is not None else 'length'
  return Completion(
    prompt=batch.texts[row],
    text=text,
    tokens=tuple(tokens),
    log_probs=tuple(output.log_probs[row, span].tolist()),
    stop=found,
    finish_reason='nan' if output.has_nan[row] else reason,
    statistics=metrics.row_summary(output.statistics, row),
  )


def error_of_row(
  batch: Batch, output: DecodeOutput, row: int, num_samples: int = 1
) -> str | None:
  """Says that a row ended since its logits were NaN; None if it did not."""
  if not output.has_nan[row]:
    return None
  # Row ids count samples: with 2 of each, rows 4 and 5 are of prompt 3.
  number = int(batch.prompt.row_ids[row]) // num_samples + 1
  num_new = int(output.lengths[row] - batch.prompt.decoder_lengths[row])
  return (
    f'prompt {number}: after {num_new} new tokens the logits were not numbers '
    '(NaN), and its decoding stopped'
  )
