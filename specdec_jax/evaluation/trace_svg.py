"""Traces as a drawing, as in Figure 1 of Leviathan et al.
(https://arxiv.org/abs/2211.17192): a line for each iteration."""

import html
from collections.abc import Sequence

from specdec_jax.evaluation import trace_text
from specdec_jax.evaluation.trace import Record

# A monospaced character at this font size, in pixels.
_FONT, _ADVANCE, _LINE = 13, 7.83, 21
_MARGIN = 10
_STYLES = {
  'accepted': 'fill:#11662f',
  'rejected': 'fill:#b3201c;text-decoration:line-through',
  'correction': 'fill:#1d4fb8;font-weight:bold',
  'bonus': 'fill:#1d4fb8',
  'plain': 'fill:#1d4fb8',
}


def render(records: Sequence[Record], title: str) -> str:
  """One row's iterations: accepted tokens green, the rejected one red and
  struck, the target's own blue. What was drafted beyond is left out.

  Args:
    records: iteration records of one row, see `evaluation.trace`.
    title: said to those who cannot see it.
  """
  lines = [_tokens(record) for record in records]
  width = max((sum(len(text) for _, text in line) for line in lines), default=0)
  size = (
    round(2 * _MARGIN + (width + 4) * _ADVANCE),
    2 * _MARGIN + _LINE * max(len(lines), 1),
  )
  rules = ''.join(f'.{name}{{{style}}}' for name, style in _STYLES.items())
  body = ''.join(
    f'<text y="{_MARGIN + _LINE * number - 6}">'
    f'<tspan class="number" x="{_MARGIN}">{number:3d} </tspan>'
    + ''.join(
      f'<tspan class="{verdict}">{html.escape(text)}</tspan>'
      for verdict, text in line
    )
    + '</text>\n'
    for number, line in enumerate(lines, start=1)
  )
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" '
    f'height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}" role="img">\n'
    f'<title>{html.escape(trace_text.visible(title))}</title>\n'
    f'<style>text{{font:{_FONT}px ui-monospace,Menlo,Consolas,monospace;'
    f'white-space:pre}}.number{{fill:#586273}}{rules}</style>\n'
    f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}</svg>\n'
  )


def _tokens(record: Record) -> list[tuple[str, str]]:
  """Verdict and text of what an iteration tested and added."""
  shown = [
    token
    for token in record['drafted']
    if token['verdict'] in ('accepted', 'rejected')
  ]
  if record['next']:
    shown.append(record['next'])
  return [
    (token['verdict'], trace_text.visible(token['text']) or trace_text.EMPTY)
    for token in shown
  ]
