"""`bench` and `calibrate` with every drafter that has weights."""

import json

import pytest

pytest.importorskip('gin')
pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from tests import extras
from tests.cli import tiny
from tests.contracts.doors import (
  TREE_OPTIONS,
  Doors,
  case_of_drafter,
  flags_of,
  write_models,
)


@pytest.fixture(scope='module')
def doors(tmp_path_factory) -> Doors:
  folder = tmp_path_factory.mktemp('doors')
  write_models(folder)
  return Doors(folder)


@pytest.mark.slow
@pytest.mark.parametrize('command', ['bench', 'calibrate'])
@pytest.mark.parametrize(
  'name',
  [
    'model',
    'spec_drafter',
    pytest.param('block_heads', marks=extras.needs('contrib/block_heads')),
    'eagle',
    'assistant',
  ],
)
def test_figures_of_drafters_with_weights(name, command, doors, capfd):
  case = case_of_drafter(name)
  more = ('--repeats', '1', '--plain_dtypes', 'float32')
  result = tiny.run(capfd, command, *flags_of(doors.folder, case), *more)
  assert result.status == 0, result.err
  figures = json.loads(result.out)
  assert figures['gamma'] == dict(case.options)['gamma']
  assert 0 <= figures['alpha'] <= 1
  if command == 'bench':
    assert figures['identical'] is True


@pytest.mark.slow
@pytest.mark.parametrize('name', ['model', 'eagle', 'assistant'])
def test_figures_of_a_tree(name, doors, capfd):
  case = case_of_drafter(name, TREE_OPTIONS)
  more = ('--repeats', '1', '--plain_dtypes', 'float32')
  result = tiny.run(capfd, 'bench', *flags_of(doors.folder, case), *more)
  assert result.status == 0, result.err
  figures = json.loads(result.out)
  assert figures['identical'] is True
  assert len(figures['tree']) == figures['gamma'] > 4
  assert figures['alpha_from_block_efficiency'] is None
  assert figures['theory_speedup'] is None
  assert figures['block_efficiency'] > 1
