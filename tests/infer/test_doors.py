"""The door of gin files, beside what tests/contracts/test_doors.py decodes."""

import jax
import pytest

pytest.importorskip('gin')
pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from specdec_jax.checkpoints import formats
from specdec_jax.models import families
from tests.cli import tiny
from tests.contracts.doors import COMMANDS, Doors, target_of, write_models
from tests.infer import infer_runs


@pytest.fixture(scope='module')
def doors(tmp_path_factory) -> Doors:
  folder = tmp_path_factory.mktemp('doors')
  write_models(folder)
  return Doors(folder)


def test_gin_files_are_one_of_the_doors():
  assert 'gin' in COMMANDS


@pytest.mark.parametrize(
  'name', ['model', 'eagle', 'assistant', 'spec_drafter']
)
def test_a_dry_run_counts_a_drafter(name, doors, capfd, monkeypatch):
  """Its weights, and the state that it has in the loop."""
  folder = doors.folder
  monkeypatch.setenv('COLUMNS', '200')
  result = tiny.run(
    capfd,
    *infer_runs.argv(
      folder / target_of(name),
      folder / 'task.jsonl',
      folder / f'dry_{name}',
      infer_runs.gin_file(f'drafters/{name}.gin'),
      '--dry_run',
      DRAFTER_CHECKPOINT_PATH=repr(str(folder / name)),
    ),
  )
  assert result.status == 0, result
  [row] = [x for x in result.out.splitlines() if 'drafter parameters' in x]
  num_values = int(row.split('│')[2].strip().replace(',', ''))
  path = folder / name
  config = formats.read_config(path)
  shapes = jax.tree.leaves(families.param_shapes(config))
  assert num_values == sum(leaf.size for leaf in shapes)
  assert not (folder / f'dry_{name}').exists()
