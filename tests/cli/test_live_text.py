"""What a trace looks like on a terminal, and off it."""

import io

from rich.console import Console

from specdec_jax.cli import live_text as terminal
from specdec_jax.cli import wording
from tests.assembly.written_traces import (
  ITERATIONS,
  drafted,
  iteration,
  written_trace,
)

_ESCAPE = '\x1b'


def _show(traced, *, width=72, **kwargs):
  file = io.StringIO()
  options = {
    key: kwargs.pop(key)
    for key in ('force_terminal', 'color_system', 'no_color')
    if key in kwargs
  }
  console = Console(file=file, width=width, **options)
  terminal.show(traced, console, **kwargs)
  lines = file.getvalue().split('\n')
  return '\n'.join(line.rstrip() for line in lines)


def _stream(records, hidden_ids=(), **options):
  file = io.StringIO()
  show = terminal.streamer(
    Console(file=file, width=8, **options), hidden_ids=hidden_ids
  )
  for record in records:
    show(record)
  return file.getvalue()


_TOP = 'Small drafts for Big, speculative_sampling, gamma 3, temperature 1\n'


def test_lines_without_colour():
  assert _show(written_trace()) == (
    _TOP + 'accepted  [-rejected-]  {+correction+}  bonus  plain  '
    '[-discarded-]\n'
    '[-truncated-]\n'
    '\n'
    'prompt: Who?⏎Tell.\n'
    '1 +2 The[- dog-]{+ cat+}[- ran-]\n'
    '2 +4  sat.⏎⇥It\n'
    '3 +1  [b]purred[/b]\n'
    '4 +1 </s>[-▯-]\n'
    '8 tokens in 4 target runs (2.00 per run, alpha 0.83)\n'
  )


def test_flow_without_colour():
  assert _show(written_trace(), style='flow') == (
    _TOP + 'accepted  [-rejected-]  {+correction+}  bonus  plain\n'
    '\n'
    'prompt: Who?⏎Tell.\n'
    'The[- dog-]{+ cat+} sat.\n'
    '        It [b]purred[/b]</s>\n'
    '8 tokens in 4 target runs (2.00 per run, alpha 0.83)\n'
  )


def test_colours_of_figure_1():
  text = _show(written_trace(), force_terminal=True, color_system='standard')
  for styled in (
    '\x1b[32mThe',  # green
    '\x1b[9;31m dog',  # red and struck
    '\x1b[1;34m cat',  # blue
    '\x1b[4;34mIt',  # blue and underlined
  ):
    assert styled in text
  assert '[-' not in text


def test_no_color_keeps_the_marks(monkeypatch):
  monkeypatch.setenv('NO_COLOR', '1')
  text = _show(written_trace(), force_terminal=True, color_system='standard')
  assert '[- dog-]' in text
  assert '34m' not in text


def test_rows():
  other = [{**record, 'row': 5} for record in ITERATIONS[:1]]
  traced = written_trace([*ITERATIONS, *other])
  both = _show(traced)
  assert 'row 1\n' in both
  assert 'row 6\n' in both
  assert 'all rows: 10 tokens in 5 target runs' in both
  one = _show(traced, row=5)
  assert 'row 1\n' not in one
  assert 'all rows' not in one


def test_interruptions_are_told():
  assert 'interrupted' in _show(written_trace(is_complete=False))
  assert 'interrupted' not in _show(written_trace())


def test_stream_to_a_file_is_the_text_alone():
  text = _stream(ITERATIONS, hidden_ids={2})
  assert text == 'The cat sat.\n\tIt [b]purred[/b]'


def test_stream_to_a_terminal():
  text = _stream(ITERATIONS, {2}, force_terminal=True, color_system='standard')
  assert '\x1b[9;31m dog\x1b[0m\x1b[1;34m cat' in text
  assert 'ran' not in text
  assert '</s>' not in text
  assert ' [b]purred[/b]' in text
  # The terminal wraps by itself: the only line break is the text's own.
  assert text.count('\n') == 1


def test_stream_keeps_spaces_at_the_ends():
  tokens = [drafted('a ', 'accepted'), drafted('  ', 'accepted')]
  text = _stream(
    [iteration(0, tokens, None)], force_terminal=True, color_system='standard'
  )
  assert text == '\x1b[32ma \x1b[0m\x1b[32m  \x1b[0m'


def test_tokens_cannot_command_the_terminal():
  token = drafted('\x1b[2J\x9b\x07\r\u202e', 'accepted')
  records = [iteration(0, [token], None)]
  shown = wording.visible(token['text'])
  assert _ESCAPE not in shown
  assert shown == '␛[2J<U+009B>␇␍<U+202E>'
  for style in ('lines', 'flow'):
    text = _show(written_trace(records, text='\x1b[2J'), style=style)
    assert _ESCAPE not in text
    assert shown in text
  assert '[2J' not in _stream(
    records, force_terminal=True, color_system='standard'
  ).replace('␛[2J', '')


def test_visible_leaves_text_alone():
  text = 'né €🙂 👩\u200d🔬 日本'
  assert wording.visible(text) == text
