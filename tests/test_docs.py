"""The how-tos keep working: their Python is run, block after block."""

import re
from pathlib import Path

import pytest

from specdec_jax.checkpoints import model_file

_DOCS = Path(__file__).parent.parent / 'docs'
_BLOCK = re.compile(r'^```python\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
  'name', ['notation.md', 'new_drafter.md', 'new_verifier.md']
)
def test_code_in_docs_runs(name):
  text = (_DOCS / name).read_text(encoding='utf-8')
  blocks = list(_BLOCK.finditer(text))
  assert blocks, f'{name} has no Python to run'
  namespace: dict = {'__name__': name}
  for block in blocks:
    # Blank lines in front make tracebacks name the document's own lines.
    start = text.count('\n', 0, block.start(1))
    source = '\n' * start + block.group(1)
    exec(compile(source, str(_DOCS / name), 'exec'), namespace)


def test_the_sizes_in_docs_can_be_read(tmp_path):
  text = (_DOCS / 'checkpoints.md').read_text(encoding='utf-8')
  (block,) = re.findall(r'^```json\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
  (tmp_path / 'model.json').write_text(block)
  assert model_file.read(tmp_path).embed_dim == 384
