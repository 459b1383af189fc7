"""What is compared of runs and of processes."""

import shutil

import pytest

from specdec_jax.launch import agreement

MEBIBYTE = 2**20


@pytest.mark.parametrize('size', [MEBIBYTE, 64 * MEBIBYTE])
def test_weights_that_changed_have_another_digest(tmp_path, size):
  """In any array of a megabyte; a copy has the same."""
  model = tmp_path / 'model'
  (model / 'params').mkdir(parents=True)
  weights = model / 'params' / 'weights'
  (model / 'config.json').write_text('{}')
  with weights.open('wb') as file:
    file.truncate(size)
  digest = agreement.of_files([model])
  copy = shutil.copytree(model, tmp_path / 'elsewhere' / 'model')
  assert agreement.of_files([copy]) == digest
  for start in range(0, size, 7 * MEBIBYTE):
    with weights.open('r+b') as file:
      file.seek(start)
      file.write(b'\1' * MEBIBYTE)
    changed = agreement.of_files([model])
    assert changed != digest
    digest = changed
  weights.rename(weights.with_name('others'))
  assert agreement.of_files([model]) != digest
