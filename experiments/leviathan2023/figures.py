"""Figures 1 to 5, as SVG: theory's from theory, the trace and the timeline from
a decode and the times of its parts."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import common, plots
from experiments.leviathan2023 import measured, pairs, paper
from experiments.leviathan2023.measured import RULE, Settings
from experiments.leviathan2023.pairs import Pair
from experiments.plots import Measured
from specdec_jax.assembly import recording, running
from specdec_jax.assembly import trace_files as storage
from specdec_jax.assembly.recording import Record
from specdec_jax.assembly.trace_files import Trace
from specdec_jax.base import Prompt
from specdec_jax.cli import wording
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Row
from specdec_jax.measure import stopwatch
from specdec_jax.text.prompts import Batch
from specdec_jax.text.tasks import Example
from specdec_jax.theory.costs import Costs
from specdec_jax.trace import svg

# Of the trace, and the two of the timeline as far as scoring was timed.
GAMMA, GAMMAS = 7, (7, 3)
# What Figure 1 decodes; the note below the figure says that it was chosen.
_TEXT = (
  'Select the printer and the number of pages that you want to print, and then '
  'click the button to start the printing.'
)
# The timeline's text is the first of the split whose input is at least so long.
_NUM_INPUTS = 16
# What a segment of a timeline is, and its colour.
_PARTS = {'encoder': '#9aa3b2', 'draft': '#d9730d', 'target': '#2458c5'}


class Segment(NamedTuple):
  """A stretch of a timeline: `part` is encoder, draft or target."""

  part: str
  seconds: float


def draw(
  given: Sequence[Pair], settings: Settings, folder: Path
) -> dict[str, Any]:
  """All five, trace and timeline of the first pair; rows, names of files
  and notes."""
  folder.mkdir(parents=True, exist_ok=True)
  theirs = {
    'figure_2.svg': plots.tokens_by_alpha(paper.FIGURE_2_GAMMAS),
    'figure_3.svg': plots.best_gamma_by_alpha(paper.FIGURE_3_C),
    'figure_4.svg': plots.speed_and_operations(paper.FIGURE_4_GAMMAS),
  }
  for name, figure in theirs.items():
    plots.save(figure, folder / name)
  rows = [
    {'figure': 2, 'what': 'expected tokens per target run', 'from': 'theory'},
    {'figure': 3, 'what': 'the best gamma', 'from': 'theory'},
    {'figure': 4, 'what': 'speed and arithmetic at c = 0', 'from': 'theory'},
  ]
  notes = []
  if given:
    pair = given[0]
    traced = trace_of(pair)
    line = wording.summary_line(traced.summarize())
    picture = svg.render(traced)
    (folder / 'figure_1.svg').write_text(picture, encoding='utf-8')
    plots.save(timeline(_lanes(pair, settings)), folder / 'figure_5.svg')
    rows = [
      {'figure': 1, 'what': f'a trace: {line}', 'from': pair.names},
      *rows,
      {'figure': 5, 'what': 'a timeline of one text', 'from': pair.names},
    ]
    notes = [
      f'Figure 1: T = 0, gamma {GAMMA}; a line is an iteration. The text was '
      'chosen for a readable translation and is not part of the split; Table 3 '
      f"has the split's alpha. The paper's has {paper.FIGURE_1_TOKENS} tokens "
      f'in {paper.FIGURE_1_RUNS} target runs {paper.TAG}.'
    ]
  names = [f'figure_{row["figure"]}.svg' for row in rows]
  return {'rows': rows, 'figures': names, 'notes': notes}


def trace_of(pair: Pair) -> Trace:
  """The greedy decode of Figure 1."""
  inputs = pair.kind.prefix + _TEXT
  row = examples.encode_one(0, Example(inputs=inputs), pair.layout)
  prompt = _packed(pair, row)
  records = _decode(pair, prompt, GAMMA)
  header = recording.header(
    target=common.short(pair.target.name),
    drafter=common.short(pair.draft_model.name),
    verification='speculative_sampling',
    gamma=GAMMA,
    temperature=0.0,
  )
  summary = recording.summary_record(recording.summarize(records, GAMMA))
  prompts = recording.prompt_records(prompt, [inputs])
  return storage.assemble([header, *prompts, *records, summary])


def speedups(
  folder: Path,
  predicted: Mapping[str, Mapping[int, float]],
  points: Mapping[str, Mapping[int, Measured]],
) -> str:
  """Speed by gamma, as predicted and as measured; the name of the file."""
  folder.mkdir(parents=True, exist_ok=True)
  plots.save(
    plots.speedup_by_gamma(predicted, points), folder / 'speedup_by_gamma.svg'
  )
  return 'speedup_by_gamma.svg'


def timeline(lanes: Mapping[str, Sequence[Segment]]) -> Any:
  """What runs when, a lane for each way of decoding (Figure 5)."""
  figure, axes = plots.new_figure()
  from matplotlib.patches import Patch

  figure.set_size_inches(9, 0.7 + 0.6 * len(lanes))
  for height, segments in enumerate(lanes.values()):
    start = 0.0
    for part, seconds in segments:
      axes.barh(
        height,
        1e3 * seconds,
        left=1e3 * start,
        height=0.55,
        color=_PARTS[part],
        edgecolor='white',
        linewidth=0.15,
      )
      start += seconds
  axes.set_yticks(range(len(lanes)), labels=list(lanes))
  axes.invert_yaxis()
  axes.set_xlabel('milliseconds')
  axes.grid(False, axis='y')
  shown = {part for segments in lanes.values() for part, _ in segments}
  parts = [part for part in _PARTS if part in shown]
  axes.legend(
    handles=[Patch(color=_PARTS[part], label=part) for part in parts],
    ncols=len(parts),
    loc='lower right',
    frameon=False,
    bbox_to_anchor=(1, 1),
  )
  return figure


def _lanes(pair: Pair, settings: Settings) -> dict[str, list[Segment]]:
  """Plain decoding and two gammas of one text, part by part."""
  parts = measured.costs(pair, 0.0, settings)
  prompt = _example(pair)
  encoder = []
  if prompt.encoder_tokens is not None:
    encoder = [Segment('encoder', _prefill_seconds(pair, prompt))]
  lanes, num_tokens = {}, 0
  for gamma in sorted({min(each, parts.max_gamma) for each in GAMMAS})[::-1]:
    records = _decode(pair, prompt, gamma)
    num_tokens = sum(record['committed'] for record in records)
    iteration = _iteration(parts, gamma)
    lanes[f'gamma {gamma}'] = [*encoder, *iteration * len(records)]
  plain = Segment('target', parts.plain_seconds)
  return lanes | {'plain': [*encoder, *[plain] * num_tokens]}


def _iteration(parts: Costs, gamma: int) -> list[Segment]:
  drafted = [parts.first_draft_seconds, *[parts.draft_seconds] * (gamma - 1)]
  return [
    *(Segment('draft', seconds) for seconds in drafted),
    Segment('target', parts.scoring_seconds(gamma)),
  ]


def _example(pair: Pair) -> Prompt:
  rows = [row for row in pair.rows if len(row.ids) >= _NUM_INPUTS]
  return _packed(pair, (rows or pair.rows)[0])


def _packed(pair: Pair, row: Row) -> Prompt:
  return common.pack(pair.layout, [row], 1)


def _prefill_seconds(pair: Pair, prompt: Prompt) -> float:
  """Of the target alone."""

  def prefill(params: Any, prompt: Prompt) -> Any:
    return pair.model.init(params, prompt, pair.max_len)

  call = functools.partial(jax.jit(prefill), pair.params.target, prompt)
  seconds, _ = stopwatch.alternate({'prefill': call}, 5)
  return float(np.median(seconds['prefill']))


def _decode(pair: Pair, prompt: Prompt, gamma: int) -> list[Record]:
  """The iterations of one greedy decode."""
  batch = Batch(prompt=prompt, texts=('',))
  decode = running.compile_decode(
    pairs.decoder(pair, gamma, 0.0, RULE),
    batch,
    running.DecodeSettings(max_new_tokens=pair.kind.targets_length),
  )
  records: list[Record] = []
  decode(batch, [records.append])
  return records
