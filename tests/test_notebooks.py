"""The notebooks run from a clean kernel, and are kept with what they show."""

import ast
import importlib
import json
import re
import sys

import pytest

pytest.importorskip('nbclient')
pytest.importorskip('ipykernel')
pytest.importorskip('ipywidgets')
pytest.importorskip('matplotlib')
pytest.importorskip('sacrebleu')
pytest.importorskip('sentencepiece')

import nbformat

from notebooks import execute
from specdec_jax.checkpoints import pretrained

NAMES = (
  *('eagle', 'gemma4', 'one_iteration', 'rollouts'),
  *('theory_and_measurement', 't5_end_to_end'),
)
MODELS = {'ende-mini', 'ende-nano'}
PICTURES = {'image/svg+xml', 'image/png'}


def pictures(book):
  """Outputs that everybody sees, also where no kernel runs."""
  return [
    output.data
    for cell in execute.code_cells(book)
    for output in cell.outputs
    if PICTURES & {*output.get('data', ())}
  ]


def test_all_are_tested():
  assert execute.names() == sorted(NAMES)


@pytest.mark.notebooks
@pytest.mark.parametrize('name', NAMES)
def test_runs_from_a_clean_kernel(name, tmp_path):
  missing = MODELS - {*pretrained.names()}
  if not execute.can_run(name):
    pytest.skip(f'needs {execute.NEEDED[name]}')
  if name == 'eagle':
    try:
      pretrained.packaged_file('smollm2-135m')
    except ValueError as error:
      pytest.skip(str(error))
  elif missing and name != 'gemma4':
    pytest.skip(f'{" and ".join(sorted(missing))} do not come along yet')
  # Raises if a cell fails or warns, or if the slider does not move its picture.
  book = execute.run(name, tmp_path)
  assert len(pictures(book)) == len(pictures(execute.read(name)))


@pytest.mark.parametrize('option', [[], ['--keep']])
def test_a_run_changes_no_notebook_unless_asked(option, tmp_path, monkeypatch):
  monkeypatch.setattr(execute, 'FOLDER', tmp_path / 'notebooks')
  monkeypatch.setattr(execute, '_ROOT', tmp_path)
  monkeypatch.setattr(sys, 'argv', ['execute', *option])
  cell = nbformat.v4.new_code_cell('print(6 * 7)')
  tracked = tmp_path / 'notebooks' / 'short.ipynb'
  tracked.parent.mkdir()
  nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tracked)
  before = tracked.read_text()
  execute.main()
  written = tracked if option else tmp_path / 'out/notebooks/short.ipynb'
  assert nbformat.read(written, as_version=4).cells[0].outputs[0].text == '42\n'
  assert (tracked.read_text() == before) == (not option)


@pytest.mark.parametrize('name', NAMES)
def test_names_what_the_package_has(name):
  # Within a second; the notebooks themselves take minutes.
  if not execute.can_run(name):
    pytest.skip(f'needs {execute.NEEDED[name]}')
  cells = execute.code_cells(execute.read(name))
  source = '\n'.join(
    re.sub(r'^[%!].*$', '', cell.source, flags=re.MULTILINE) for cell in cells
  )
  nodes, known = [*ast.walk(ast.parse(source))], {}
  for node in nodes:
    if isinstance(node, ast.ImportFrom) and node.module.startswith('specdec_'):
      module = importlib.import_module(node.module)
      for each in node.names:
        if not hasattr(module, each.name):
          importlib.import_module(f'{node.module}.{each.name}')
        known[each.asname or each.name] = getattr(module, each.name)
  used = [
    (known[node.value.id], node.attr)
    for node in nodes
    if isinstance(node, ast.Attribute)
    and isinstance(node.value, ast.Name)
    and node.value.id in known
  ]
  assert len(used) >= 5
  assert [found for found in used if not hasattr(*found)] == []


@pytest.mark.parametrize('name', NAMES)
def test_is_kept_with_its_outputs(name):
  path = execute.FOLDER / f'{name}.ipynb'
  text = path.read_text(encoding='utf-8')
  assert len(text) < 1_000_000
  book = execute.read(name)
  counts = [cell.execution_count for cell in execute.code_cells(book)]
  assert counts == [*range(1, len(counts) + 1)]
  assert len(pictures(book)) >= 1
  assert sum(bool(cell.outputs) for cell in execute.code_cells(book)) >= 8


@pytest.mark.parametrize('name', NAMES)
def test_nothing_is_kept_of_the_machine_or_of_its_clock(name):
  book = execute.read(name)
  assert 'widgets' not in book.metadata
  for cell in execute.code_cells(book):
    assert 'execution' not in cell.metadata
    for output in cell.outputs:
      assert output.get('name') != 'stderr'
      shown = json.dumps(output)
      assert 'Warning' not in shown
      assert not re.search(r'(?<![\w.])/(root|home|tmp|work|Users)/', shown)
      assert 'widget-view' not in shown


def test_all_install_alike():
  books = [execute.read(name) for name in NAMES]
  assert len({execute.code_cells(book)[0].source for book in books}) == 1


@pytest.mark.parametrize('name', NAMES)
def test_opens_in_colab(name):
  # Of which repository, tests/test_docs.py compares.
  badge = execute.read(name).cells[0].source
  assert 'https://colab.research.google.com/github/' in badge
  assert f'/blob/main/notebooks/{name}.ipynb)' in badge


def test_paths_warnings_and_widgets_are_not_kept():
  stream = lambda name, text: nbformat.v4.new_output(
    'stream', name=name, text=text
  )
  widget = {'image/png': 'A', execute._WIDGET: {'model_id': '1'}}
  shown = nbformat.v4.new_output('display_data', data=widget)
  outputs = [
    *(
      stream('stdout', 'a'),
      stream('stderr', '12 of 20'),
      stream('stdout', 'b'),
    ),
    *(shown, stream('stdout', 'c')),
  ]
  kept = execute._kept(outputs, ('/tmp/x',))
  assert [each.get('text') for each in kept] == ['ab', None, 'c']
  assert kept[1].data == {'image/png': 'A'}
  with pytest.raises(ValueError, match='shows /tmp/x'):
    execute._kept([stream('stdout', 'in /tmp/x/y')], ('/tmp/x',))
  with pytest.raises(ValueError, match='a cell warns'):
    execute._kept([stream('stderr', 'UserWarning: so')], ())
