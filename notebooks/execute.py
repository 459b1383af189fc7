"""Executes the notebooks in clean kernels.

    python -m notebooks.execute [--keep] [NAME ...]

They are written to out/notebooks, or, with --keep, over those of this folder.
Without names, those that need what is not installed are left out.

What differs from run to run without being measured is not kept: the times of
execution, the state of widgets, and what a cell writes to stderr.
"""

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent
_ROOT = FOLDER.parent
# What a notebook needs besides the extra `notebooks`.
NEEDED = {'rollouts': 'tunix'}
_WIDGET = 'application/vnd.jupyter.widget-view+json'
# Without a front end, moving the slider is all that shows that it works.
_SLIDE = """
before, slider.value = picture.value, 9
assert picture.value != before
"""


def names() -> list[str]:
  return sorted(path.stem for path in FOLDER.glob('*.ipynb'))


def can_run(name: str) -> bool:
  needed = NEEDED.get(name)
  return needed is None or importlib.util.find_spec(needed) is not None


def read(name: str) -> nbformat.NotebookNode:
  return nbformat.read(FOLDER / f'{name}.ipynb', as_version=4)


def code_cells(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
  return [cell for cell in book.cells if cell.cell_type == 'code']


def run(name: str, folder: Path) -> nbformat.NotebookNode:
  """The notebook with the outputs of a clean kernel.

  Args:
    name: of a notebook.
    folder: where the kernel works.

  Raises:
    nbclient.exceptions.CellExecutionError: from a cell.
    ValueError: if a cell warns, or shows a path of this machine.
  """
  book = read(name)
  has_slider = any('slider, picture =' in cell.source for cell in book.cells)
  if has_slider:
    book.cells.append(nbformat.v4.new_code_cell(_SLIDE))
  # Flags for tests are not the user's. Figures have no date, and the same
  # identifiers each time.
  (folder / 'matplotlibrc').write_text(f'svg.hashsalt: {name}\n')
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  env |= {'PYTHONPATH': str(_ROOT), 'IPYTHONDIR': str(folder / 'ipython')}
  env |= {'SOURCE_DATE_EPOCH': '0'}
  client = nbclient.NotebookClient(
    book,
    timeout=600,
    kernel_name='python3',
    record_timing=False,
    resources={'metadata': {'path': str(folder)}},
  )
  client.execute(env=env)
  if has_slider:
    book.cells.pop()
  for cell in code_cells(book):
    cell.outputs = _kept(cell.outputs, (str(folder), str(_ROOT)))
  book.metadata.pop('widgets', None)
  book.metadata.language_info = {'name': 'python'}
  return book


def _kept(
  outputs: list[nbformat.NotebookNode], paths: tuple[str, ...]
) -> list[nbformat.NotebookNode]:
  """What a reader is shown of a cell's outputs, printed text in one piece."""
  kept = []
  for output in outputs:
    if output.get('name') == 'stderr' and 'Warning:' in output.text:
      raise ValueError(f'a cell warns: {output.text}')
    output.get('data', {}).pop(_WIDGET, None)
    is_stdout = output.get('name') == 'stdout'
    if is_stdout and kept and kept[-1].get('name') == 'stdout':
      kept[-1].text += output.text
    elif output.get('name') != 'stderr':
      kept.append(output)
  for path in paths:
    if path in str(kept):
      raise ValueError(f'a cell shows {path}')
  return kept


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('names', nargs='*', metavar='NAME')
  parser.add_argument('--keep', action='store_true')
  args = parser.parse_args()
  written = FOLDER if args.keep else _ROOT / 'out' / 'notebooks'
  written.mkdir(parents=True, exist_ok=True)
  for name in args.names or filter(can_run, names()):
    with tempfile.TemporaryDirectory() as folder:
      book = run(name, Path(folder))
    nbformat.write(book, path := written / f'{name}.ipynb')
    print(f'executed {path}')


if __name__ == '__main__':
  main()
