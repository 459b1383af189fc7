"""The drawing of a trace: what it says of each token, and that it needs nothing
but itself."""

import re
import unicodedata
from xml.etree import ElementTree

import pytest

from specdec_jax.trace import svg
from tests.assembly.written_traces import (
  ITERATIONS,
  drafted,
  following,
  iteration,
  written_trace,
)

_SVG = '{http://www.w3.org/2000/svg}'
_VERDICTS = ('accepted', 'rejected', 'correction', 'bonus', 'plain')


def _text(element):
  return ''.join(element.itertext())


def _drawn(traced, **options):
  return ElementTree.fromstring(svg.render(traced, **options))


def _tokens(root):
  """Verdict and text of the tokens of each line, legend apart."""
  lines = [
    [(token.get('class'), _text(token)) for token in line.iter(f'{_SVG}g')]
    for line in root.iter(f'{_SVG}g')
    if line.get('class') == 'line'
  ]
  return [line[1:] for line in lines]


def _words(root, verdict):
  """The words of a verdict that are decorated."""
  return [
    _text(span)
    for group in root.iter(f'{_SVG}g')
    if group.get('class') == verdict
    for span in group.iter(f'{_SVG}tspan')
  ]


def _colors(picture, verdict):
  """Red, green and blue of a verdict's text, in the light and the dark."""
  found = re.findall(rf'\.{verdict} text{{fill:#(\w{{6}})', picture)
  assert len(found) == 2
  return [[int(color[i : i + 2], 16) for i in (0, 2, 4)] for color in found]


def test_a_line_is_an_iteration_and_a_class_a_verdict():
  assert _tokens(_drawn(written_trace())) == [
    [('accepted', 'The'), ('rejected', ' dog'), ('correction', ' cat')],
    [
      ('accepted', ' sat'),
      ('accepted', '.⏎'),
      ('accepted', '⇥'),
      ('bonus', 'It'),
    ],
    [('plain', ' [b]purred[/b]')],
    [('accepted', '</s>')],
  ]


def test_accepted_is_green_rejected_red_and_the_targets_own_blue():
  picture = svg.render(written_trace())
  strongest = {'accepted': 1, 'rejected': 0}
  for verdict in _VERDICTS:
    for color in _colors(picture, verdict):
      assert color.index(max(color)) == strongest.get(verdict, 2), verdict
  assert '.rejected tspan{text-decoration:line-through}' in picture
  assert picture.count('@media(prefers-color-scheme:dark)') == 1


def test_what_is_struck_is_the_rejected_word_without_its_space():
  root = _drawn(written_trace())
  assert _words(root, 'rejected') == ['dog', 'rejected']  # And the legend.


def test_bonus_tokens_are_underlined_as_on_a_terminal():
  root = _drawn(written_trace())
  assert _words(root, 'bonus') == ['It', 'bonus']
  assert _words(root, 'plain') == []
  picture = svg.render(written_trace())
  assert '.bonus tspan{text-decoration:underline}' in picture


def test_spaces_keep_their_width():
  root = _drawn(written_trace())
  assert root.get('{http://www.w3.org/XML/1998/namespace}space') == 'preserve'
  advances = set()
  ends = []
  for line in root.iter(f'{_SVG}g'):
    if line.get('class') != 'line':
      continue
    end = None
    for text in line.iterfind(f'{_SVG}g/{_SVG}text'):
      start, size = float(text.get('x')), float(text.get('textLength'))
      advances.add(round(size / len(_text(text)), 2))
      assert end is None or start == pytest.approx(end, abs=0.02)
      end = start + size
    ends.append(end)
  assert len(advances) == 1
  assert max(ends) < float(root.get('width'))


def test_text_is_escaped_and_nothing_is_fetched_or_run():
  texts = (
    '</text><script>alert(1)</script>',
    '<image href="http://evil.example/"/>',
    ' &amp;',
    '\x1b[31m',
    '\ud800',
    '\ufffe',
    '\u202e',
  )
  records = [
    iteration(0, [drafted(text, 'accepted')], following(text, 'bonus'))
    for text in texts
  ]
  picture = svg.render(written_trace(records, text=''.join(texts)))
  root = ElementTree.fromstring(picture.encode())
  tags = 'svg', 'title', 'desc', 'style', 'rect', 'g', 'text', 'tspan'
  assert {element.tag for element in root.iter()} == {_SVG + x for x in tags}
  for element in root.iter():
    assert not any(re.search('href|src|^on', name) for name in element.attrib)
  assert not re.search(r'url\(|@import', picture)
  shown = [line[0][1] for line in _tokens(root)]
  assert shown[2:] == [' &amp;', '␛[31m', '<U+D800>', '<U+FFFE>', '<U+202E>']
  assert not any(unicodedata.category(c) == 'Cf' for c in picture)


def test_the_head_says_who_drafted_for_whom_and_what_it_brought():
  root = _drawn(written_trace())
  texts = [_text(text) for text in root.iter(f'{_SVG}text')]
  assert texts[:4] == [
    'Small drafts for Big',
    '2.00 tokens per target run',
    'speculative_sampling, gamma 3, temperature 1',
    '8 tokens in 4 target runs, alpha 0.83',
  ]
  assert 'Who?⏎Tell.' in texts
  assert root.find(f'{_SVG}title').text == (
    'Small drafts for Big: 8 tokens in 4 target runs (2.00 per run, alpha 0.83)'
  )
  legend = texts[-len(_VERDICTS) :]
  assert legend == list(_VERDICTS)
  stopped = _drawn(written_trace(is_complete=False))
  assert 'interrupted' in ''.join(stopped.itertext())


def test_long_texts_are_cut_where_asked_and_say_so():
  records = [*ITERATIONS, *(r | {'row': 1} for r in ITERATIONS[:1])]
  root = _drawn(written_trace(records), max_iterations=1)
  assert [len(line) for line in _tokens(root)] == [3, 3]
  shown = [_text(text) for text in root.iter(f'{_SVG}text')]
  assert '… 3 more iterations' in shown
  assert sum('more iteration' in text for text in shown) == 1
  # What was decoded is counted, not what is shown.
  assert any(text.startswith('10 tokens in 5 target runs') for text in shown)
  assert [t for t in shown if t.startswith('row ')] == ['row 1', 'row 2']


@pytest.mark.parametrize('text', [' word', '漢字', 'w' * 300, ''])
def test_lines_stay_within_the_column_of_a_page(text):
  tokens = [drafted(text, 'accepted')] * 90
  records = [iteration(0, tokens, following('.', 'bonus'))]
  traced = written_trace(records, text='long ' * 200)
  root = _drawn(traced)
  width, height = (float(root.get(name)) for name in ('width', 'height'))
  assert width <= 830
  for rect in root.iter(f'{_SVG}rect'):
    end = float(rect.get('x')) + float(rect.get('width'))
    assert end <= width
  lines = _tokens(root)
  assert len(lines) > 1
  joined = ''.join(shown for line in lines for _, shown in line)
  assert joined == (text or '▯') * 90 + '.'
  assert height > 24 * len(lines)
