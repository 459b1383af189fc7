"""Traces in the terminal, coloured as Figure 1 of Leviathan et al.

Accepted tokens are green, rejected ones red and struck, the target's own tokens
blue: corrections plain, bonus tokens underlined. Without colour, rejected
tokens are bracketed `[-so-]` and corrections `{+so+}`. Needs rich.
"""

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Literal

from specdec_jax.assembly import recording
from specdec_jax.assembly.recording import Record
from specdec_jax.assembly.trace_files import Trace
from specdec_jax.cli import wording
from specdec_jax.launch.visible_text import (
  for_stream,
  visible,
  visible_lines,
)

if TYPE_CHECKING:
  from rich.console import Console
  from rich.table import Table
  from rich.text import Text

Style = Literal['lines', 'flow']

_STYLES = {
  'accepted': 'green',
  'rejected': 'red strike',
  'correction': 'bold blue',
  'bonus': 'blue underline',
  'plain': 'blue',
  'discarded': 'dim strike',
  'truncated': 'dim',
}
_MARKS = {
  **dict.fromkeys(('rejected', 'discarded', 'truncated'), ('[-', '-]')),
  'correction': ('{+', '+}'),
}


def show(
  traced: Trace,
  console: 'Console',
  *,
  style: Style = 'lines',
  row: int | None = None,
) -> None:
  """Prints a trace: a legend, and the rows, or one `row`, counted from 0.

  Style 'lines' prints a line per iteration with all drafted tokens, 'flow'
  running text with the first rejected token of each iteration. ImportError
  without rich.
  """
  has_marks = _needs_marks(console)
  # Text is printed verbatim: no markup, highlighted numbers or emoji codes.
  say = functools.partial(
    console.print, markup=False, highlight=False, emoji=False
  )
  models = wording.models_line(traced.header)
  say(f'{models}, {wording.settings_line(traced.header)}', style='dim')
  console.print(legend(traced, style=style, has_marks=has_marks))
  for index in traced.rows if row is None else [row]:
    console.print()
    if len(traced.rows) > 1:
      say(f'row {wording.ordinal(index)}', style='bold')
    if index in traced.prompts:
      text = visible(traced.prompts[index]['text'])
      console.print(_text(f'prompt: {text}', style='dim'))
    shown = _lines if style == 'lines' else _flow
    console.print(shown(traced.iterations.get(index, []), has_marks))
    say(wording.summary_line(traced.summarize(index)), style='bold')
  if row is None and len(traced.rows) > 1:
    line = wording.summary_line(traced.summarize())
    say(f'\nall rows: {line}', style='bold')
  if traced.is_interrupted:
    say('the run was interrupted', style='yellow')


def streamer(
  console: 'Console', *, hidden_ids: Collection[int] = ()
) -> Callable[[Record], None]:
  """Makes a function that prints iteration records of one row as they come,
  without `hidden_ids`, such as EOS: on a terminal as `show` does with style
  'flow', elsewhere only the committed text."""
  has_marks = _needs_marks(console)

  def show_record(record: Record) -> None:
    if not console.is_terminal:
      text = ''.join(
        token['text']
        for token in recording.committed(record)
        if token['token'] not in hidden_ids
      )
      console.file.write(for_stream(text, console.file))
    else:
      shown = _flow([record], has_marks, hidden_ids)
      # Rich does not know the column where the text began, and would wrap late.
      console.print(shown, end='', soft_wrap=True)
    console.file.flush()

  return show_record


def legend(
  traced: Trace, *, style: Style = 'lines', has_marks: bool = False
) -> 'Text':
  """Makes a legend of the verdicts in a trace, in their styles."""
  text = _text()
  for verdict in _STYLES:
    is_shown = style == 'lines' or not recording.is_after_end(verdict)
    if is_shown and verdict in traced.verdicts:
      text.append('  ' if text else '')
      _append(text, verdict, verdict, has_marks)
  return text


def _text(text: str = '', style: str = '') -> 'Text':
  from rich.text import Text

  return Text(text, style=style)


def _needs_marks(console: 'Console') -> bool:
  # Without colour an accepted token and a rejected one would look the same.
  return console.color_system is None or console.no_color


def _lines(records: list[Record], has_marks: bool) -> 'Table':
  """Makes one line per iteration: number, tokens committed, all tokens."""
  from rich.table import Table

  table = Table.grid(padding=(0, 1))
  table.add_column(justify='right', style='dim', no_wrap=True)
  table.add_column(justify='right', no_wrap=True)
  table.add_column(overflow='fold')
  for record in records:
    line = _text()
    for token in recording.as_read(record):
      _append(line, wording.shown(token['text']), token['verdict'], has_marks)
    number = wording.ordinal(record['iteration'])
    table.add_row(str(number), f'+{record["committed"]}', line)
  return table


def _flow(
  records: list[Record], has_marks: bool, hidden_ids: Collection[int] = ()
) -> 'Text':
  text = _text()
  for record in records:
    for token in recording.tokens(record):
      verdict = token['verdict']
      if recording.is_after_end(verdict) or token['token'] in hidden_ids:
        continue
      # Its line break would break the line of what was committed.
      if verdict == 'rejected':
        shown = wording.shown(token['text'])
      else:
        shown = visible_lines(token['text'])
      _append(text, shown, verdict, has_marks)
  return text


def _append(text: 'Text', shown: str, verdict: str, has_marks: bool) -> None:
  before, after = _MARKS.get(verdict, ('', '')) if has_marks else ('', '')
  text.append(f'{before}{shown}{after}', style=_STYLES[verdict])
