"""Traces as a self-contained SVG, as in Figure 1 of Leviathan et al.
(https://arxiv.org/abs/2211.17192): a line per iteration.

Accepted tokens are green, the rejected one red and struck, the target's own
blue: corrections bold, bonus tokens underlined. Tokens drafted beyond the
rejected one are left out. Colours follow the reader's light or dark theme.
Needs jinja2, for the template `svg.html`, and rich, for the widths of
characters.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from specdec_jax.assembly import recording
from specdec_jax.assembly.recording import Record
from specdec_jax.assembly.trace_files import Trace
from specdec_jax.cli import wording
from specdec_jax.files.require import require
from specdec_jax.launch.visible_text import visible
from specdec_jax.trace import templates

# Characters in a line of tokens, lines of a prompt, characters in the title.
_NUM_COLUMNS, _PROMPT_LINES, _HEAD_SIZE = 78, 2, 52

_VERDICTS = ('accepted', 'rejected', 'correction', 'bonus', 'plain')


def render(traced: Trace, *, max_iterations: int | None = None) -> str:
  """Draws all rows, with at most `max_iterations` of each; returns text for a
  UTF-8 file. ImportError without jinja2 or rich."""
  require('rich.cells', extra='models', purpose='a picture of a trace')
  committed = (
    ''.join(
      token['text']
      for record in traced.iterations.get(row, [])
      for token in recording.committed(record)
    )
    for row in traced.rows
  )
  return _template().render(
    traced=traced,
    max_iterations=max_iterations,
    description='\n'.join(map(visible, committed)),
    legend=[
      (verdict, verdict) for verdict in _VERDICTS if verdict in traced.verdicts
    ],
    style=''.join(map(str.strip, templates.asset('svg.css').splitlines())),
  )


@functools.cache
def _template() -> Any:
  return templates.template(
    'svg.html',
    columns=_columns,
    models_line=wording.models_line,
    prompt_lines=_prompt_lines,
    settings_line=wording.settings_line,
    shortened=_shortened,
    token_lines=_token_lines,
    totals=wording.totals,
  )


def _prompt_lines(text: str) -> list[str]:
  """Returns the first lines of a prompt."""
  # 'in a  box' is ['in', ' a', '  box']: lines break before a space.
  pieces = re.findall(r'\s*\S+', visible(text))
  lines = [
    ''.join(piece for _, piece in line)
    for line in _wrapped([('', piece) for piece in pieces], _NUM_COLUMNS - 1)
  ]
  if len(lines) > _PROMPT_LINES:
    lines[_PROMPT_LINES - 1] += '…'
  return [line.strip(' ') for line in lines[:_PROMPT_LINES]]


def _token_lines(record: Record) -> list[list[tuple[str, str]]]:
  """Returns the verdicts and texts of the tokens of an iteration by line."""
  tokens = [
    (token['verdict'], wording.shown(token['text']))
    for token in recording.tokens(record)
    if token['verdict'] in _VERDICTS
  ]
  return _wrapped(tokens, _NUM_COLUMNS)


def _wrapped(
  tokens: Sequence[tuple[str, str]], num_columns: int
) -> list[list[tuple[str, str]]]:
  """Breaks verdicts and texts into lines; texts wider than a line are split."""
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
  """Counts cells: two for a wide character, none for a combining one."""
  from rich import cells

  return max(cells.cell_len(text), 1)


def _shortened(text: str) -> str:
  return text if len(text) <= _HEAD_SIZE else f'{text[: _HEAD_SIZE - 1]}…'
