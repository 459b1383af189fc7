"""The pages keep their word: Python runs, links agree, figures are measured."""

import importlib
import inspect
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec_jax.checkpoints import model_file, pretrained
from specdec_jax.launch import gin_files
from tests.test_layering import EXTRAS

_ROOT = Path(__file__).parent.parent
_DOCS = _ROOT / 'docs'
_BLOCK = re.compile(r'^```python\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_links = SimpleNamespace(**runpy.run_path(str(_DOCS / 'site' / 'links.py')))


def run(name):
  """Runs the Python of a page, block after block."""
  text = (_DOCS / name).read_text(encoding='utf-8')
  blocks = list(_BLOCK.finditer(text))
  assert blocks, f'{name} has no Python to run'
  namespace: dict = {'__name__': name}
  for block in blocks:
    # Blank lines in front make tracebacks name the document's own lines.
    start = text.count('\n', 0, block.start(1))
    source = '\n' * start + block.group(1)
    exec(compile(source, str(_DOCS / name), 'exec'), namespace)


@pytest.mark.parametrize('name', ['notation.md', 'extending.md'])
def test_code_in_docs_runs(name):
  run(name)


def test_the_python_of_every_page_is_python():
  pages = [*_ROOT.glob('*.md'), *_DOCS.glob('**/*.md')]
  blocks = [(p, x) for p in pages for x in _BLOCK.findall(p.read_text('utf-8'))]
  assert len(blocks) > 20
  for page, block in blocks:
    compile(block, str(page), 'exec')


@pytest.mark.smollm2
@pytest.mark.slow
def test_python_at_both_levels(capsys):
  pytest.importorskip('gguf')
  try:
    pretrained.packaged_file('smollm2-135m')
  except ValueError as error:
    pytest.skip(str(error))
  run('python.md')
  shown = capsys.readouterr().out
  # The first example of the README, and what it says that this prints.
  assert '\n15 tokens, 5 target runs\n' in shown
  assert "{'tokens': 6, 'target_runs': 2," in shown
  assert 'Eine Bibliothek zum Lesen von komprimierten Archiven.' in shown
  assert 'A library for' in shown


def test_the_sizes_in_docs_can_be_read(tmp_path):
  text = (_DOCS / 'checkpoints.md').read_text(encoding='utf-8')
  (block,) = re.findall(r'^```json\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
  (tmp_path / 'model.json').write_text(block)
  assert model_file.read(tmp_path).embed_dim == 384


def bound_in_docs():
  """Names with a dot that pages and notebooks bind, `[module.]function.name`;
  docs/t5x.md binds those of T5X."""
  pages = [
    path
    for pattern in ('*.md', 'docs/**/*.md', 'experiments/**/*.md')
    for path in _ROOT.glob(pattern)
    if path.name != 't5x.md'
  ]
  pages += (_ROOT / 'notebooks').glob('*.ipynb')
  return {
    name
    for page in pages
    for name in re.findall(r'--gin\.([\w.]+\.\w+)=', page.read_text('utf-8'))
  }


def configurables():
  """`{module: what gin files take from it}`, of the files of this package."""
  texts = map(gin_files.shipped_text, gin_files.shipped_names())
  imported = re.findall(
    r'^from (specdec_jax[\w.]*) import (\w+)', ''.join(texts), re.MULTILINE
  )
  return {
    name: importlib.import_module(f'{package}.{name}')
    for package, name in imported
  }


def test_what_pages_bind_is_there():
  names, modules = bound_in_docs(), configurables()
  assert len(names) > 8
  for name in names:
    *module, function, argument = name.split('.')
    places = [modules[each] for each in module] or modules.values()
    takers = [
      getattr(place, function) for place in places if hasattr(place, function)
    ]
    assert takers, name
    assert all(
      argument in inspect.signature(each).parameters for each in takers
    ), name


def test_links_to_the_repository_agree():
  name = _links.repository()
  assert re.fullmatch(r'[\w.-]+/[\w.-]+', name)
  linking = set()
  for path in _links.pages():
    text = path.read_text(encoding='utf-8')
    assert {*_links.names(text)} <= {name}, path
    # No link is of a kind that links.py does not rewrite.
    assert len(_links.names(text)) == text.count(name), path
    assert '<this repository>' not in text
    assert '<the repository' not in text
    if name in text:
      linking.add(path.name)
      moved = _links.relinked(text, 'someone/a-fork')
      assert name not in moved
      assert {*_links.names(moved)} == {'someone/a-fork'}
  assert linking >= {'README.md', 'launching.md', 'one_iteration.ipynb'}


def test_the_front_page_is_short_and_begins_with_a_few_lines():
  text = (_ROOT / 'README.md').read_text(encoding='utf-8')
  assert len(text.splitlines()) <= 130
  first = _BLOCK.search(text)[1]
  assert len(first.splitlines()) <= 8
  compile(first, 'README.md', 'exec')
  assert first in (_DOCS / 'python.md').read_text(encoding='utf-8')


def test_the_design_states_what_each_extra_costs():
  """In lines, within a tenth; an extra that was deleted costs none."""
  text = (_DOCS / 'design.md').read_text(encoding='utf-8')
  rows = dict(re.findall(r'^\| `([\w/]+)` \| .* \| ([\d,]+) \|$', text, re.M))
  assert {*rows} == EXTRAS
  for extra, stated in rows.items():
    paths = (_ROOT / 'specdec_jax' / extra).rglob('*.py')
    lines = sum(len(path.read_text('utf-8').splitlines()) for path in paths)
    expected = int(stated.replace(',', ''))
    assert lines == 0 or lines == pytest.approx(expected, rel=0.1), extra
