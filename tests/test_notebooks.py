"""The notebooks run from a clean kernel, without an error in any cell."""

import os
import pathlib

import pytest

pytest.importorskip('nbclient')
pytest.importorskip('ipykernel')
pytest.importorskip('ipywidgets')
pytest.importorskip('matplotlib')
pytest.importorskip('sacrebleu')
pytest.importorskip('sentencepiece')

import nbclient
import nbformat

from specdec_jax.checkpoints import pretrained

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / 'notebooks'
NAMES = ('one_iteration', 'theory_and_measurement', 't5_end_to_end')
MODELS = {'ende-mini', 'ende-nano'}
HAS_SLIDER = 'theory_and_measurement'
# Without a front end, moving the slider is all that shows that it works.
SLIDE = """
before, slider.value = picture.value, 9
assert picture.value != before
"""


def read(name):
  return nbformat.read(FOLDER / f'{name}.ipynb', as_version=4)


def code_cells(book):
  return [cell for cell in book.cells if cell.cell_type == 'code']


def execute(book, folder):
  """Runs all cells in place, as a user's kernel would; raises at an error."""
  # The tests' eight devices are not the user's.
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  env |= {'PYTHONPATH': str(ROOT), 'IPYTHONDIR': str(folder / 'ipython')}
  client = nbclient.NotebookClient(
    book,
    timeout=600,
    kernel_name='python3',
    resources={'metadata': {'path': str(folder)}},
  )
  client.execute(env=env)


def pictures(cells):
  """Outputs that anybody can see, slider or not."""
  kinds = ('image/svg+xml', 'image/png', 'text/html')
  return [
    output.data
    for cell in cells
    for output in cell.outputs
    if any(kind in output.get('data', ()) for kind in kinds)
  ]


@pytest.mark.notebooks
@pytest.mark.parametrize('name', NAMES)
def test_runs_from_a_clean_kernel(name, tmp_path):
  if missing := MODELS - {*pretrained.names()}:
    pytest.skip(f'{" and ".join(sorted(missing))} do not come along yet')
  book = read(name)
  if name == HAS_SLIDER:
    book.cells.append(nbformat.v4.new_code_cell(SLIDE))
  execute(book, tmp_path)
  cells = code_cells(book)
  shown = pictures(cells)
  assert shown
  if name == HAS_SLIDER:
    widget = 'application/vnd.jupyter.widget-view+json'
    assert ['image/png' in data for data in shown if widget in data] == [True]
  errors = [
    output.text
    for cell in cells
    for output in cell.outputs
    if output.get('name') == 'stderr'
  ]
  assert 'Warning:' not in ''.join(errors)


@pytest.mark.parametrize('name', NAMES)
def test_is_kept_without_outputs(name):
  for cell in code_cells(read(name)):
    assert not cell.outputs
    assert cell.execution_count is None


def test_all_open_in_colab_and_install_alike():
  assert sorted(path.stem for path in FOLDER.glob('*.ipynb')) == sorted(NAMES)
  books = [read(name) for name in NAMES]
  installs = {code_cells(book)[0].source for book in books}
  assert len(installs) == 1
  repository = 'OWNER/specdec_jax'
  assert f"REPOSITORY = 'https://github.com/{repository}'" in installs.pop()
  for name, book in zip(NAMES, books, strict=True):
    place = f'github/{repository}/blob/main/notebooks/{name}.ipynb'
    assert f'https://colab.research.google.com/{place}' in book.cells[0].source
