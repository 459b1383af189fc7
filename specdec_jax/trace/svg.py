"""Traces as one SVG that needs nothing else, as in Figure 1 of Leviathan et al.
(https://arxiv.org/abs/2211.17192): a line per iteration.

Accepted tokens are green, the rejected one red and struck, the target's own
blue. What was drafted beyond the rejected token is left out. Colours follow the
reader's light or dark theme. Needs rich, which knows how wide characters are.
"""

import html
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from specdec_jax.files.require import require
from specdec_jax.trace import recording, wording
from specdec_jax.trace.recording import Summary
from specdec_jax.trace.storage import Trace

# In pixels; GitHub shows a page in a column of about 830.
_WIDTH, _PADDING = 820, 24
_LEFT, _RIGHT = _PADDING, _WIDTH - _PADDING
# Tokens are set in a grid of characters, so that their spaces are seen whatever
# the font: where its characters are wider or narrower, they are fitted.
_ADVANCE, _LINE, _TILE = 9.0, 28, 22
_NUMBERS, _COUNTS, _TOKENS = _LEFT + 18, _LEFT + 54, _LEFT + 68
_NUM_COLUMNS = int((_RIGHT - _TOKENS) / _ADVANCE)
_PROMPT_LINES, _HEAD_SIZE = 2, 52

_VERDICTS = ('accepted', 'rejected', 'correction', 'bonus', 'plain')


class _Part(NamedTuple):
  """A stretch of the drawing: elements, and how far they reach down."""

  height: int
  body: str


_RULE = _Part(
  14,
  f'<rect class="rule" x="{_LEFT}" y="0" width="{_RIGHT - _LEFT}" height="1"/>',
)


def render(traced: Trace, *, max_iterations: int | None = None) -> str:
  """Draws all rows, with at most `max_iterations` of each; a string to be
  written as UTF-8. Raises ImportError without rich."""
  require('rich.cells', extra='models', purpose='a picture of a trace')
  parts = [*_head(traced)]
  for row in traced.rows:
    parts += _row(traced, row, max_iterations)
  legend = [(each, each) for each in _VERDICTS if each in traced.verdicts]
  parts.append(_Part(_LINE, _line(legend, gap=2)))
  body, y = [], 12
  for part in parts:
    body.append(f'<g transform="translate(0,{y})">{part.body}</g>\n')
    y += part.height
  height = y + 12
  style = ''.join(map(str.strip, wording.asset('svg.css').splitlines()))
  models = wording.models_line(traced.header)
  title = f'{models}: {wording.summary_line(traced.summarize())}'
  texts = [
    ''.join(
      token['text']
      for record in traced.iterations.get(row, [])
      for token in recording.committed(record)
    )
    for row in traced.rows
  ]
  description = '\n'.join(map(wording.visible, texts))
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
    f'height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
    f'xml:space="preserve">\n<title>{html.escape(title)}</title>\n'
    f'<desc>{html.escape(description)}</desc>\n'
    f'<style>{style}</style>\n<rect class="rule" x="0" y="0" '
    f'width="{_WIDTH}" height="{height}" rx="8"/><rect class="card" x="1" '
    f'y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="7"/>\n'
    f'{"".join(body)}</svg>\n'
  )


def _head(traced: Trace) -> Iterator[_Part]:
  """Models and settings on the left, tokens and target runs on the right."""
  summary = traced.summarize()
  models = _shortened(wording.models_line(traced.header))
  settings = _shortened(wording.settings_line(traced.header))
  rate = ''
  if summary.block_efficiency is not None:
    rate = f'{summary.block_efficiency:.2f} tokens per target run'
  totals = _totals(summary) + ', interrupted' * traced.is_interrupted
  yield _Part(24, _both(models, rate, 'title'))
  yield _Part(30, _both(settings, totals, 'dim'))
  yield _RULE


def _row(
  traced: Trace, row: int, max_iterations: int | None
) -> Iterator[_Part]:
  if len(traced.rows) > 1:
    name = f'row {wording.ordinal(row)}'
    yield _Part(24, _both(name, _totals(traced.summarize(row)), 'dim'))
  if row in traced.prompts:
    yield from _prompt(traced.prompts[row]['text'])
  records = traced.iterations.get(row, [])
  shown = records[:max_iterations]
  for record in shown:
    tokens = [
      (token['verdict'], wording.shown(token['text']))
      for token in recording.tokens(record)
      if token['verdict'] in _VERDICTS
    ]
    number = wording.ordinal(record['iteration'])
    beside = _sans(_NUMBERS, str(number), 'dim end')
    beside += _sans(_COUNTS, f'+{record["committed"]}', 'dim end')
    for line in _wrapped(tokens, _NUM_COLUMNS):
      yield _Part(_LINE, f'<g class="line">{beside}{_line(line)}</g>')
      beside = ''
  if num_left := len(records) - len(shown):
    text = f'… {wording.count(num_left, "more iteration")}'
    yield _Part(_LINE, _sans(_TOKENS, text, 'dim'))
  yield _Part(6, '')
  yield _RULE


def _prompt(text: str) -> Iterator[_Part]:
  # 'in a  box' is ['in', ' a', '  box']: lines break before a space.
  pieces = re.findall(r'\s*\S+', wording.visible(text))
  lines = [
    ''.join(piece for _, piece in line)
    for line in _wrapped([('', piece) for piece in pieces], _NUM_COLUMNS - 1)
  ]
  if len(lines) > _PROMPT_LINES:
    lines[_PROMPT_LINES - 1] += '…'
  beside = _sans(_COUNTS, 'prompt', 'dim end')
  for line in lines[:_PROMPT_LINES]:
    shown = line.strip(' ')
    size = _columns(shown) * _ADVANCE
    words = _fitted(_TOKENS, size, html.escape(shown), 'dim')
    yield _Part(22, beside + words)
    beside = ''
  yield _Part(8, '')


def _line(tokens: Sequence[tuple[str, str]], gap: int = 0) -> str:
  """Draws tokens on their tiles; leading spaces stand before the tile."""
  x, drawn = float(_TOKENS), []
  for verdict, text in tokens:
    word = text.lstrip(' ') or text
    space = text[: len(text) - len(word)]
    shown = html.escape(word)
    if verdict == 'rejected':
      shown = f'<tspan class="struck">{shown}</tspan>'
    left, right = x + len(space) * _ADVANCE, x + _columns(text) * _ADVANCE
    drawn.append(
      f'<g class="{verdict}"><rect x="{left + 0.4:.1f}" y="0" '
      f'width="{right - left - 0.8:.1f}" height="{_TILE}" rx="3"/>'
      f'{_fitted(x, right - x, space + shown)}</g>'
    )
    x = right + gap * _ADVANCE
  return ''.join(drawn)


def _both(left: str, right: str, kind: str) -> str:
  return _sans(_LEFT, left, kind) + _sans(_RIGHT, right, f'{kind} end')


def _sans(x: float, text: str, kind: str) -> str:
  return f'<text class="sans {kind}" x="{x}" y="16">{html.escape(text)}</text>'


def _fitted(x: float, size: float, escaped: str, kind: str = '') -> str:
  """Draws text of the trace, fitted to its columns of the grid."""
  of_kind = f' class="{kind}"' if kind else ''
  return (
    f'<text{of_kind} x="{x:.1f}" y="16" textLength="{size:.1f}" '
    f'lengthAdjust="spacingAndGlyphs">{escaped}</text>'
  )


def _totals(summary: Summary) -> str:
  """Says such as '38 tokens in 9 target runs, alpha 0.87'."""
  line = wording.totals(summary)
  if summary.alpha is not None:
    line += f', alpha {summary.alpha:.2f}'
  return line


def _wrapped(
  tokens: Sequence[tuple[str, str]], num_columns: int
) -> list[list[tuple[str, str]]]:
  """Puts verdicts and texts in lines; what is wider than a line is cut."""
  from rich import cells

  lines: list[list[tuple[str, str]]] = [[]]
  room = num_columns
  # In 4 columns, 'ab', 'cde', 'fghijk' are the lines 'ab', 'cde', 'fghi', 'jk'.
  for verdict, text in tokens:
    for piece in cells.chop_cells(text, num_columns):
      size = _columns(piece)
      if size > room and lines[-1]:
        lines.append([])
        room = num_columns
      lines[-1].append((verdict, piece))
      room -= size
  return lines


def _columns(text: str) -> int:
  """Cells of the grid: two for a wide character, none for a combining one."""
  from rich import cells

  return max(cells.cell_len(text), 1)


def _shortened(text: str) -> str:
  return text if len(text) <= _HEAD_SIZE else f'{text[: _HEAD_SIZE - 1]}…'
