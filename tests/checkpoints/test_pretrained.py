"""What comes with the package: it loads, it is whole, and it is small."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')

from specdec_jax.checkpoints import loading, pretrained
from specdec_jax.models import families

MAX_BYTES = 65_000_000
NAMES = pretrained.names()


def test_all_of_it_is_small_and_in_the_wheel():
  files = [path for path in pretrained.FOLDER.rglob('*') if path.is_file()]
  assert sum(path.stat().st_size for path in files) <= MAX_BYTES
  folders = {path.parent for path in files} - {pretrained.FOLDER}
  # What is deeper than setup.py's package_data would be left behind.
  assert folders == {pretrained.FOLDER / name for name in NAMES}


@pytest.mark.parametrize('name', NAMES)
def test_weights_and_cards_agree(name, monkeypatch):
  """Neither Orbax nor tensorstore is needed to read a model."""
  import safetensors

  for module in ('orbax', 'orbax.checkpoint', 'tensorstore'):
    monkeypatch.setitem(sys.modules, module, None)
  folder = loading.locate(name)
  config, params = loading.read(folder)
  if not families.only_drafts(config):
    text = 'Ein kleiner Texteditor: 100 %.'
    vocabulary = loading.load(name).vocabulary
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.vocab_size == config.vocab_size == 8192
  card = json.loads((folder / 'card.json').read_text())
  leaves = jax.tree.leaves(params)
  assert sum(leaf.size for leaf in leaves) == card['parameters']
  weights = folder / 'model.safetensors'
  assert weights.stat().st_size == card['bytes']
  with safetensors.safe_open(weights, framework='np') as file:
    dtypes = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
  # Which tokens an EAGLE-3 or a block drafter can draft.
  assert dtypes - {'I64', 'I32', 'BOOL'} == {'BF16'}
  # As they were rounded: nothing is lost when they are read into float32.
  for leaf in leaves:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      rounded = leaf.astype(jnp.bfloat16).astype(jnp.float32)
      np.testing.assert_array_equal(leaf, rounded)
  assert {'training', 'device'} <= set(card)
  sections = [card.get(name, {}) for name in ('test', 'drafting', 'suite')]
  measured = [found for tasks in sections for found in tasks.values()]
  assert measured
  assert all('sha256' in figures for figures in measured)
  assert f'\n# {name}\n' in (folder / 'README.md').read_text()
