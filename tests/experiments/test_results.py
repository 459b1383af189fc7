"""What the first pages quote is of the code as it is."""

import json

import pytest

from experiments import report, results, summary

ROW = {
  'target and drafter': 'a target, a drafter',
  'text': 'texts',
  'dtype': 'float32',
  'turns': '1.10 to 1.30',
  'predicted': 1.25,
  'command': 'specdec bench --gamma 4',
}
README = f'# Name\n\n{results._BEGIN}\nold\n{results._END}\n\nMore.\n'


@pytest.fixture
def root(tmp_path):
  """A folder of experiments, with what is quoted."""
  rows = [ROW | {'speed': speed} for speed in (0.8, 1.2, 1.01)]
  header = report.header('experiments.quoted', [], 0.0)
  path = tmp_path / summary.QUOTED
  report.write(
    path.parent,
    path.stem,
    title='Speeds',
    header=header,
    table=report.Table(rows=rows),
  )
  return tmp_path


def aged(path):
  """Makes results of earlier code."""
  contents = json.loads(path.read_text())
  assert contents['commit'].partition(' ')[0].isalnum()
  old = contents['code'].replace('drafters ', 'drafters 0')
  path.write_text(json.dumps(contents | {'code': old}))


def test_what_is_quoted_is_of_this_code(root):
  readme, page = results.front(root, README), results.page(root)
  assert results.check(root, readme, page) == []
  assert readme.startswith('# Name\n')
  assert readme.endswith('\n\nMore.\n')
  assert '**1.20** | gains | 1.10 to 1.30 | 1.25 | 1 |' in readme
  assert '**1.01** | neither |' in readme
  assert '**0.80** | loses |' in readme
  assert '3  specdec bench --gamma 4' in readme
  assert page.index('**Gains**') < page.index('**Loses**')
  assert page.index('**1.20**') < page.index('**1.01**')
  assert '- age' not in page
  assert '- code' not in page
  # A figure that was changed by hand, in either page.
  by_hand = readme.replace('1.20', '1.40'), page.replace('**1.20', '**1.40')
  assert len(results.check(root, by_hand[0], page)) == 1
  assert len(results.check(root, readme, by_hand[1])) == 1


def test_figures_of_earlier_code_are_quoted_nowhere(root):
  readme, page = results.front(root, README), results.page(root)
  aged(root / summary.QUOTED)
  told = results.check(root, readme, page)
  assert len(told) == 3
  assert 'before later changes of drafters' in told[0]
  page = results.page(root)
  assert '- age: measured at ' in page
  assert 'Gains' not in page
  assert 'No speed was measured' in results.front(root, README)
  # One line of earlier code less; and figures without a digest are old.
  (root / summary.QUOTED).unlink()
  assert 'is missing' in results.check(root, readme, page)[0]
  assert 'of an earlier version' in report.age({'title': 'Speeds'})


def test_every_line_has_its_figures_once_they_are_of_this_code(root):
  for _, names, _ in summary._PARTS:
    for name in names:
      contents = json.loads((results.ROOT / name).read_text('utf-8'))
      path = root / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(json.dumps(contents | report.of_code()))
  lines = summary.lines(root)
  starts = [line.split(':**')[0] for line in lines.splitlines()]
  for text, _, _ in summary._PARTS:
    assert text[: text.index('**', 5)].split(':')[0] in ' '.join(starts)
  assert '{' not in lines


def test_no_page_quotes_what_is_older_than_the_code():
  readme, page = (
    path.read_text(encoding='utf-8') for path in (results.FRONT, results.PAGE)
  )
  assert results.check(results.ROOT, readme, page) == []


def test_the_front_page_sums_up_its_own_table():
  """The best speeds of copies, translation and chat, to one decimal."""
  readme = results.FRONT.read_text('utf-8')
  said = next(x for x in readme.splitlines() if x.startswith('- **Speed.**'))
  rows = [x.split('|') for x in readme.splitlines() if '| **' in x]
  for text in 'a copy', 'German', 'chat':
    best = max(float(x[4].split('**')[1]) for x in rows if text in x[2])
    said = said.partition(f' {best:.1f} ')[2]
    assert said, f'{text}: {best:.2f}'


def test_the_page_has_what_the_tables_say():
  """Below the first lines, and but for ages, which change with the code."""

  def tables(page):
    below = page.partition(results._READING)[2]
    return [x for x in below.splitlines() if not x.startswith('- age: ')]

  assert tables(results.PAGE.read_text('utf-8')) == tables(
    results.page(results.ROOT)
  )


def test_an_unfinished_line_is_measured_again(tmp_path):
  path = tmp_path / 'progress.jsonl'
  assert report.lines(path) == []
  path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
  assert report.lines(path) == [{'a': 1}, {'a': 2}]
  with path.open('a') as file:
    file.write('{"a": 3}\n')
  assert report.lines(path) == [{'a': 1}, {'a': 2}, {'a': 3}]
