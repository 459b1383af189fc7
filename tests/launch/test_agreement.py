"""What is compared of runs and of processes."""

import shutil

import pytest

from specdec_jax.launch import agreement

MEBIBYTE = 2**20


@pytest.mark.parametrize('size', [MEBIBYTE, 65 * MEBIBYTE + 3])
def test_any_byte_of_the_weights_changes_their_digest(tmp_path, size):
  """In the first, a middle and the last block; a copy has the same digest."""
  model = tmp_path / 'model'
  (model / 'params').mkdir(parents=True)
  weights = model / 'params' / 'weights'
  (model / 'config.json').write_text('{}')
  with weights.open('wb') as file:
    file.truncate(size)
  digest = agreement.of_files([model])
  copy = shutil.copytree(model, tmp_path / 'elsewhere' / 'model')
  assert agreement.of_files([copy]) == digest
  for position in (0, size // 3 + 1, size - 1):
    with weights.open('r+b') as file:
      file.seek(position)
      file.write(b'\1')
    changed = agreement.of_files([model])
    assert changed != digest
    digest = changed
  weights.rename(weights.with_name('others'))
  assert agreement.of_files([model]) != digest
