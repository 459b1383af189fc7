"""What an inference says of itself while it runs: one line, and TensorBoard."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.decoding.statistics import Statistics
from specdec_jax.files.require import require
from specdec_jax.infer.decode_many import Utilisation
from specdec_jax.infer.examples import Row
from specdec_jax.measure import metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
  """One chunk, or several together: counters of every row, use of the batch,
  and seconds of decoding, without loading and compiling."""

  statistics: Statistics
  utilisation: Utilisation
  seconds: float

  def figures(self) -> dict[str, float]:
    """Rates by name; those that are no number are left out."""
    rates = metrics.rates(self.statistics)
    num_rows = self.statistics.num_tokens.size
    figures: dict[str, Any] = {
      'tokens_per_second': self.statistics.num_tokens.sum() / self.seconds,
      'examples_per_second': num_rows / self.seconds,
      'tokens_per_target_run': rates.block_efficiency,
      'alpha': rates.alpha,
      'row_utilisation': self.utilisation.share,
    }
    known = {k: v for k, v in figures.items() if v is not None}
    return {k: float(v) for k, v in known.items() if not np.isnan(v)}


def together(chunks: Sequence[Timed]) -> Timed:
  """Several chunks as one."""
  used = [vars(chunk.utilisation) for chunk in chunks]
  added = {name: sum(each[name] for each in used) for name in used[0]}
  added['num_rows'] = used[0]['num_rows']
  return Timed(
    statistics=joined([chunk.statistics for chunk in chunks]),
    utilisation=Utilisation(**added),
    seconds=sum(chunk.seconds for chunk in chunks),
  )


def joined(statistics: Sequence[Statistics]) -> Statistics:
  """Counters of all rows, those by position as wide as the longest drafts."""
  gamma = max(each.num_tested.shape[1] for each in statistics)

  def widen(values: np.ndarray) -> np.ndarray:
    if values.ndim == 1:
      return values
    return np.pad(values, ((0, 0), (0, gamma - values.shape[1])))

  return jax.tree.map(
    lambda *rows: np.concatenate([widen(row) for row in rows]), *statistics
  )


def counts(rows: Sequence[Row], records: Sequence[Mapping]) -> dict[str, int]:
  """What a chunk's `.COMPLETED` says of it: the same in every run."""
  aux = [record['aux'] for record in records]
  return {
    'examples': len(rows),
    'trimmed_examples': sum(row.num_cut > 0 for row in rows),
    'trimmed_tokens': sum(row.num_cut for row in rows),
    'tokens': sum(each['tokens'] for each in aux),
    'target_runs': sum(each['target_runs'] for each in aux),
    'nan_examples': sum(each['end'] == 'nan' for each in aux),
  }


def sentences(
  total: Mapping[str, int], chunks: Sequence[Timed], inputs_length: int
) -> list[str]:
  """The last lines of a run: of `counts` of all chunks, and those that this run
  decoded."""
  lines = []
  if chunks:
    timed = together(chunks)
    figures = timed.figures()
    shown = {
      'tokens_per_target_run': '{:.2f} tokens per target run',
      'alpha': 'alpha {:.2f}',
      'row_utilisation': 'rows used {:.0%}',
    }
    parts = [
      f'{timed.statistics.num_tokens.size} examples decoded in '
      f'{timed.seconds:.1f} s: {figures["tokens_per_second"]:.1f} tokens/s',
      *(shown[name].format(figures[name]) for name in shown if name in figures),
    ]
    lines.append(', '.join(parts))
  if total['trimmed_examples']:
    lines.append(
      f'{total["trimmed_examples"]} of {total["examples"]} inputs were longer '
      f'than {inputs_length} tokens and were trimmed by '
      f'{total["trimmed_tokens"]} tokens together'
    )
  if total['nan_examples']:
    lines.append(
      f'error: logits of {total["nan_examples"]} examples were not numbers '
      '(NaN), and their decoding stopped; their "end" is "nan"'
    )
  return lines


@contextlib.contextmanager
def metric_writer(folder: str | None) -> Iterator[Any]:
  """Yields `(step, figures)`, which writes them for TensorBoard with clu, if
  there is a folder; ImportError if clu or TensorFlow is not installed."""
  if folder is None:
    yield lambda step, figures: None
    return
  metric_writers = require(
    'clu.metric_writers',
    extra='infer,data',
    purpose='writing metrics for TensorBoard',
  )
  writer = metric_writers.create_default_writer(folder, asynchronous=False)
  try:
    yield writer.write_scalars
  finally:
    writer.close()
