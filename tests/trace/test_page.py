"""The page of a trace: complete, escaped, and in need of nothing else."""

import base64
import dataclasses
import hashlib
import html.parser
import re

import pytest

from specdec_jax.trace.page import render
from tests.assembly.written_traces import (
  ITERATIONS,
  drafted,
  following,
  iteration,
  written_trace,
)

_VOID = {'meta', 'input', 'br', 'rect'}


class _Page(html.parser.HTMLParser):
  """Checks nesting and collects the elements with their text."""

  def __init__(self, source):
    super().__init__(convert_charrefs=True)
    self.elements, self.open = [], []
    self.feed(source)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attributes):
    names = [name for name, _ in attributes]
    assert len(names) == len(set(names))
    element = {'tag': tag, 'text': '', **dict(attributes)}
    self.elements.append(element)
    if tag not in _VOID:
      self.open.append(element)

  def handle_startendtag(self, tag, attributes):
    self.elements.append({'tag': tag, 'text': '', **dict(attributes)})

  def handle_endtag(self, tag):
    assert self.open.pop()['tag'] == tag

  def handle_data(self, data):
    for element in self.open:
      element['text'] += data

  def find(self, **wanted):
    return [
      element
      for element in self.elements
      if all(element.get(key) == value for key, value in wanted.items())
    ]


def _tokens(page):
  return [e for e in page.elements if '\np = ' in e.get('title', '')]


def test_shows_every_token_in_order():
  page = _Page(render(written_trace()))
  shown = [(e['class'], e['text'], e['tag']) for e in _tokens(page)]
  assert shown == [
    ('accepted', 'The', 'span'),
    ('rejected', ' dog', 'del'),
    ('correction', ' cat', 'ins'),
    ('discarded', ' ran', 'del'),
    ('accepted', ' sat', 'span'),
    ('accepted', '.⏎', 'span'),
    ('accepted', '⇥\t', 'span'),
    ('bonus', 'It', 'span'),
    ('plain', ' [b]purred[/b]', 'span'),
    ('accepted', '</s>', 'span'),
    ('truncated', '▯', 'del'),
  ]


def test_titles_have_the_numbers():
  page = _Page(render(written_trace()))
  assert _tokens(page)[1]['title'] == (
    '“ dog” · id 9\n'
    'rejected: drafted, and refused by the target\n'
    'p = 0.5\nq = 0.25\nacceptance = 1\nu = 0.125'
  )
  assert _tokens(page)[2]['title'].endswith('rejected one\np = 0.75')


def test_missing_numbers():
  tokens = [drafted('x', 'accepted', p=None, u=None)]
  page = _Page(render(written_trace([iteration(0, tokens, None)])))
  assert _tokens(page)[0]['title'].endswith('p = –\nq = 0.25\nacceptance = 1')


def test_header_summary_and_charts():
  other = [{**record, 'row': 5} for record in ITERATIONS[:1]]
  page = _Page(render(written_trace([*ITERATIONS, *other])))
  [facts] = page.find(tag='dl', **{'class': 'facts'})
  assert 'gamma3' in facts['text']
  assert 'Small drafts for Big' in page.find(tag='header')[0]['text']
  [tiles] = page.find(**{'class': 'tiles'})
  assert 'Tokens10Target runs5Block efficiency2.00' in tiles['text']
  # Records count from 0, what is shown from 1.
  assert [len(page.find(id=f'r{row}')) for row in (1, 6)] == [1, 1]
  assert [e['text'] for e in page.find(tag='h2')] == ['Row 1', 'Row 6']
  assert [e['text'] for e in page.find(href='#r6')] == ['Row 6']
  assert len(page.find(tag='tr')) == 3
  labels = [e['aria-label'] for e in page.find(tag='svg', role='img')]
  assert 'Acceptance by draft position: 1 100%, 2 33%, 3 100%' in labels


def test_a_position_that_was_never_tested_is_no_share_of_nothing():
  rows = [
    iteration(0, [drafted('a', verdict)], following('b', 'bonus'), row=row)
    for row, verdict in enumerate(('accepted', 'rejected'))
  ]
  page = _Page(render(written_trace(rows)))
  charts = [e for e in page.find(tag='svg') if '2 –, 3 –' in e['aria-label']]
  assert [e['aria-label'].rpartition(': ')[2] for e in charts] == [
    *('1 50%, 2 –, 3 –', '1 100%, 2 –, 3 –', '1 0%, 2 –, 3 –')
  ]
  # One of three positions has a bar and its track, the others a dash.
  for kind, count in (('bar', 3), ('track', 3), ('untested', 6)):
    assert len(page.find(tag='rect', **{'class': kind})) == count, kind


def test_a_wide_table_scrolls_within_its_card():
  other = [{**record, 'row': 5} for record in ITERATIONS[:1]]
  source = render(written_trace([*ITERATIONS, *other]))
  assert re.search(r'<div class="wide"[^>]*>\s*<table>', source)
  assert re.search(r'\.wide \{[^}]*overflow-x: auto', source)


def test_the_prompt_of_an_encoder_has_the_encoder_s_tokens():
  traced = written_trace()
  [prompt] = traced.prompts.values()
  for sizes, shown in (
    ({'num_tokens': 4}, 'Prompt, 4 tokens'),
    ({'num_tokens': 1, 'num_encoder_tokens': 23}, 'Prompt, 23 tokens'),
  ):
    prompt.update(sizes)
    page = _Page(render(traced))
    assert shown in [e['text'] for e in page.find(tag='summary')]


def test_iterations_can_be_reached():
  page = _Page(render(written_trace()))
  ids = [e['id'] for e in page.elements if 'id' in e]
  assert len(ids) == len(set(ids))
  targets = [e['href'][1:] for e in page.elements if 'href' in e]
  assert {'r1-i1', 'r1-i2', 'r1-i3', 'r1-i4'} <= set(targets)
  numbers = page.find(**{'class': 'n'})
  assert [e['text'] for e in numbers] == ['1', '2', '3', '4']
  assert set(targets) <= set(ids)
  # One stop of the tab key a row; the arrow keys do the rest.
  assert [e['class'] for e in _tokens(page) if 'tabindex' in e] == ['accepted']


def test_needs_nothing_else():
  source = render(written_trace())
  page = _Page(source)
  for element in page.elements:
    assert element['tag'] not in ('link', 'img', 'iframe', 'base')
    assert 'src' not in element
    assert element.get('href', '#').startswith('#')
    assert 'style' not in element
    assert not any(name.startswith('on') for name in element)
  assert 'http:' not in source
  assert 'https:' not in source
  assert 'url(' not in source


def test_policy_admits_the_page_itself():
  source = render(written_trace())
  [policy] = _Page(source).find(tag='meta', **{'http-equiv': _POLICY})
  for tag in ('style', 'script'):
    [text] = re.findall(f'<{tag}>(.*?)</{tag}>', source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}'" in policy['content']
  assert policy['content'].startswith("default-src 'none'")


_POLICY = 'Content-Security-Policy'

_HOSTILE = [
  '</script><b>',
  '<script>alert(1)</script>',
  '"><img src=x onerror=alert(1)>',
  "' onmouseover='alert(1)",
  '&lt;b&gt;',
  '<!-- ]]> -->',
  '</title></style></pre>',
]


@pytest.mark.parametrize('text', _HOSTILE)
def test_text_stays_text(text):
  tokens = [drafted(text, 'accepted'), drafted(text, 'rejected')]
  traced = written_trace(
    [iteration(0, tokens, following(text, 'correction'))], text=text
  )
  header = {**traced.header, 'target': text, text: text}
  page = _Page(render(dataclasses.replace(traced, header=header)))
  assert [e['text'] for e in _tokens(page)] == [text] * 3
  assert all(f'“{text}”' in e['title'] for e in _tokens(page))
  assert page.find(tag='pre')[0]['text'] == text
  assert [len(page.find(tag=tag)) for tag in ('script', 'b', 'img')] == [
    1,
    2,
    0,
  ]


def test_lone_surrogates_and_nul_can_be_written(tmp_path):
  tokens = [drafted('\ud83d\x00', 'accepted')]
  source = render(written_trace([iteration(0, tokens, None)]))
  (tmp_path / 'page.html').write_text(source, encoding='utf-8')
  assert '<U+D83D>␀' in _tokens(_Page(source))[0]['text']


def test_interruptions_are_told():
  notes = [
    _Page(render(written_trace(is_complete=done))).find(role='note')
    for done in (True, False)
  ]
  assert [len(note) for note in notes] == [0, 1]


def test_a_trace_of_nothing():
  _Page(render(written_trace([])))


def test_hundreds_of_iterations_stay_small():
  records = [{**ITERATIONS[0], 'iteration': k} for k in range(500)]
  assert len(render(written_trace(records))) < 1_000_000
