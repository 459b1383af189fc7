"""Lines of the results, as T5X writes them: from decoded rows to JSON.

A line has the texts of the example under `inputs`, the decoded text under
`prediction` (or the `score` of targets), and counters and rates under `aux`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.scoring import ScoreOutput
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.infer.marks import Counts

if TYPE_CHECKING:
  from specdec_jax.contrib.beams.beam_search import BeamOutput

# Other rows of a batch can change the last bits of a log-probability, but not
# these decimals: a restart writes the same bytes.
_DIGITS = 4
Record = dict[str, Any]


def of_samples(
  row: Row,
  outputs: Sequence[DecodeOutput],
  layout: Layout,
  *,
  with_scores: bool,
) -> Record:
  """Returns the line of an example's decodes, whose outputs have one row each.

  `aux` has the counters and rates of `decoding.rates.row_summary`; `log_prob`,
  the sum over new tokens; and `end`: `'eos'`, `'length'` or `'nan'`. For
  several decodes, `prediction` and the values of `aux` are lists, the likeliest
  last; then, or `with_scores`, `scores` are the log-probabilities under T5X's
  name.
  """
  decodes = []
  for output in outputs:
    span = slice(_start(row, layout), int(output.lengths[0]))
    text, end = _text(output.tokens[0, span], layout)
    aux: Record = {
      **metrics.row_summary(output.statistics, 0),
      'log_prob': round(float(output.log_probs[0, span].sum()), _DIGITS),
      'end': 'nan' if output.has_nan[0] else end,
    }
    if len(outputs) > 1 or with_scores:
      aux['scores'] = aux['log_prob']
    decodes.append((text, aux))
  # The likeliest is last, as with T5X's beams.
  decodes.sort(key=lambda decode: decode[1]['log_prob'])
  texts, auxes = zip(*decodes, strict=True)
  # From [{'tokens': 3}, {'tokens': 5}] to {'tokens': [3, 5]}.
  lists = {name: [aux[name] for aux in auxes] for name in auxes[0]}
  is_one = len(decodes) == 1
  return {
    'inputs': row.example.fields(),
    'prediction': texts[0] if is_one else list(texts),
    'aux': auxes[0] if is_one else lists,
  }


def of_beams(
  row: Row, output: 'BeamOutput', layout: Layout, is_all: bool
) -> Record:
  """Returns the line of an example's beams: all of them, the best last, or only
  the best. `aux` has `tokens`, `target_runs`, T5X's `scores`, and `end`, which
  is `'none'` for a missing beam."""
  start = _start(row, layout)
  beams = []
  for k in range(output.scores.shape[1]):
    # Fewer sequences than beams may have finished: the others have length 0.
    length = int(output.lengths[0, k])
    text, end = _text(output.tokens[0, k, start:length], layout)
    beams.append(
      {
        'prediction': text,
        'tokens': max(0, length - start),
        'scores': round(float(output.scores[0, k]), _DIGITS),
        'end': 'nan' if output.has_nan[0] else end if length else 'none',
      }
    )
  shown: Record = beams[-1]
  if is_all:
    shown = {name: [beam[name] for beam in beams] for name in shown}
  runs = int(output.statistics.num_target_runs[0])
  return {
    'inputs': row.example.fields(),
    'prediction': shown.pop('prediction'),
    'aux': {**shown, 'target_runs': runs},
  }


def of_score(row: Row, output: ScoreOutput, layout: Layout) -> Record:
  """Returns the line of an example's targets: `score`, None where logits were
  not numbers; `aux` has `tokens`, `target_runs` and `end`."""
  score = float(output.scores[0])
  is_nan = math.isnan(score)
  return {
    'inputs': row.example.fields(),
    'score': None if is_nan else round(score, _DIGITS),
    'aux': {
      'tokens': len(row.targets),
      'target_runs': 1,
      'end': 'nan' if is_nan else _end(row.targets, layout),
    },
  }


def counts(rows: Sequence[Row], records: Sequence[Record]) -> Counts:
  """Returns the counts of a chunk, the same in every run."""
  aux = [record['aux'] for record in records]
  total = lambda name: sum(int(np.sum(record_aux[name])) for record_aux in aux)
  return Counts(
    examples=len(rows),
    trimmed_examples=sum(row.num_cut > 0 for row in rows),
    trimmed_tokens=sum(row.num_cut for row in rows),
    tokens=total('tokens'),
    target_runs=total('target_runs'),
    nan_examples=sum(
      'nan' in np.atleast_1d(record_aux['end']) for record_aux in aux
    ),
  )


def texts(
  rows: Sequence[Row], records: Sequence[Record], layout: Layout
) -> Iterator[list[int]]:
  """Yields the tokens of inputs and predictions, encoded from the texts of the
  lines: the same for decoded chunks and for those read from files."""
  encode, ends = layout.vocabulary.encode, layout.vocabulary.eos_ids[:1]
  for row, record in zip(rows, records, strict=True):
    # The encoder's text comes before the start tokens of the decoder.
    prefix = [*layout.starts, *row.ids]
    if layout.is_encoder_decoder:
      prefix = [*row.ids, *layout.starts]
    prediction = record['prediction']
    for text in [prediction] if isinstance(prediction, str) else prediction:
      yield [*prefix, *encode(text, add_special_tokens=False), *ends]


def _start(row: Row, layout: Layout) -> int:
  """Returns the position of the first new token."""
  num_inputs = 0 if layout.is_encoder_decoder else len(row.ids)
  return len(layout.starts) + num_inputs


def _text(tokens: Any, layout: Layout) -> tuple[str, str]:
  """Returns the text of new tokens, and how they end."""
  ids, eos_ids = tokens.tolist(), layout.vocabulary.eos_ids
  text = layout.vocabulary.decode([i for i in ids if i not in eos_ids])
  return text, _end(ids, layout)


def _end(ids: Sequence[int], layout: Layout) -> str:
  has_ended = bool(ids) and ids[-1] in layout.vocabulary.eos_ids
  return 'eos' if has_ended else 'length'
