"""`specdec trace`: a recorded trace, shown again."""

from xml.etree import ElementTree

import pytest

from specdec_jax.assembly import trace_files as storage
from tests.cli.tiny import assert_refused, without_styles


@pytest.fixture(scope='module')
def traces(tmp_path_factory):
  return tmp_path_factory.mktemp('traces') / 'trace.jsonl'


@pytest.fixture
def recorded(run, model, traces, prompts_file):
  """A trace of three rows, recorded once."""
  if not traces.exists():
    prompts_file.write_text('the in the in\nab ab\n<b>in</b>\n')
    result = run(
      'generate',
      *('--model', model, '--prompts', prompts_file, '--batch_size', '3'),
      *('--max_new_tokens', '8', '--gamma', '8', '--trace', traces),
    )
    assert result.status == 0
  return traces


def test_the_terminal_shows_all_rows(run, recorded):
  result = run('trace', recorded, '--color', 'always')
  assert (result.status, result.err) == (0, '')
  text = without_styles(result.out)
  assert '\x1b[' in result.out
  for part in ('prompt_lookup drafts for', 'gamma 8', '<b>in</b>'):
    assert part in text
  for row in (1, 2, 3):
    assert f'row {row}\n' in text
  assert text.count('8 tokens in ') == 3
  assert 'interrupted' not in text


def test_one_row_and_running_text(run, recorded):
  result = run('trace', recorded, '--row', '2', '--style', 'flow')
  assert (result.status, result.err) == (0, '')
  assert 'prompt: ab ab' in result.out
  assert 'the in' not in result.out
  assert '\x1b[' not in result.out


def test_an_html_page(run, recorded, tmp_path):
  path = tmp_path / 'page.html'
  result = run('trace', recorded, '--html', path)
  assert result == (0, f'wrote {path}\n', '')
  page = path.read_text()
  assert page.lower().startswith('<!doctype html>')
  assert '&lt;b&gt;in&lt;/b&gt;' in page
  assert 'ab ab' in page
  result = run('trace', recorded, '--html', '-', '--row', '1')
  assert result.status == 0
  assert 'ab ab' not in result.out


def test_a_picture(run, recorded, tmp_path):
  path = tmp_path / 'picture.svg'
  result = run('trace', recorded, '--svg', path, '--row', '2')
  assert result == (0, f'wrote {path}\n', '')
  root = ElementTree.parse(path).getroot()
  texts = [
    ''.join(text.itertext()) for text in root.iter(f'{root.tag[:-3]}text')
  ]
  assert texts[0].startswith('prompt_lookup drafts for ')
  assert 'ab ab' in texts
  assert 'the in the in' not in texts
  result = run('trace', recorded, '--svg', '-', '--max_iterations', '1')
  assert result.status == 0
  drawn = ElementTree.fromstring(result.out)
  classes = [group.get('class') for group in drawn.iter(f'{drawn.tag[:-3]}g')]
  assert classes.count('line') == 3


def test_an_interrupted_run_says_so(run, recorded, tmp_path):
  path = tmp_path / 'part.jsonl'
  path.write_bytes(recorded.read_bytes()[:-700])
  assert storage.read(path).is_truncated
  result = run('trace', path)
  assert result.status == 0
  assert 'the run was interrupted' in result.out


@pytest.mark.parametrize(
  'content', [b'', b'{"prompt": "a"}\n', b'GGUF\xff\x00\n', b'[]\n']
)
def test_what_is_no_trace_is_refused(run, tmp_path, content):
  path = tmp_path / 'other.jsonl'
  path.write_bytes(content)
  assert_refused(run('trace', path), str(path))


@pytest.mark.parametrize(
  ('flags', 'parts'),
  [
    (['{folder}/none'], ['No such file']),
    (['{folder}'], ['directory']),
    (['{trace}', '--row', '0'], ['no row 0', '1, 2, 3']),
    (['{trace}', '--row', '7'], ['no row 7', '1, 2, 3']),
    (['{trace}', '--max_iterations', '5'], ['--max_iterations 5', '--svg']),
    (
      ['{trace}', '--style', 'flow', '--html', '{folder}/page.html'],
      ['--style flow'],
    ),
  ],
)
def test_what_cannot_be_shown_is_refused(run, recorded, tmp_path, flags, parts):
  flags = [flag.format(folder=tmp_path, trace=recorded) for flag in flags]
  assert_refused(run('trace', *flags), *parts)


def test_the_page_must_not_overwrite_the_trace(run, recorded, tmp_path):
  before = recorded.read_bytes()
  assert_refused(run('trace', recorded, '--html', recorded), 'both')
  assert_refused(run('trace', recorded, '--svg', recorded), 'both')
  assert recorded.read_bytes() == before
  missing = tmp_path / 'none' / 'page.html'
  assert_refused(run('trace', recorded, '--html', missing), 'no folder')


def test_the_help_says_how_to_call_it(run):
  assert 'usage: specdec trace' in run('trace', '--help').out
