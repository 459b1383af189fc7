"""Predictions by the TPU compiler: of the shipped models, whose acceptance is
measured here, and of iterations by context."""

import importlib.util
import json

import jax
import pytest

from experiments.predicted import __main__ as predicted
from experiments.predicted import contexts

pytest.importorskip('sentencepiece')


@pytest.mark.tpu
@pytest.mark.slow
def test_a_pair_has_a_row_with_two_chips(tmp_path, capsys):
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('needs libtpu: pip install -e ".[tpu]"')
  options = ['--tables=translation', '--gamma=2', '--max_new_tokens=8']
  status = predicted.main([*options, f'--output={tmp_path}'])
  assert status == 0, capsys.readouterr().err
  contents = json.loads((tmp_path / 'predicted.json').read_text())
  assert 'PREDICTIONS' in contents['notes'][0]
  [row] = contents['rows']
  assert 0.5 < float(row['alpha']) < 1
  for chip in ('v5e', 'v6e'):
    assert float(row[f'{chip}: T(1), ms']) > 0
    assert 'gamma' in row[f'{chip}: predicted']


@pytest.mark.tpu
@pytest.mark.slow
def test_what_blocks_save_follows_the_context(tmp_path, capsys):
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('needs libtpu: pip install -e ".[tpu]"')
  # Programs name their loops, as users' do; those of tests are shorter.
  name = 'jax_include_full_tracebacks_in_locations'
  jax.config.update(name, True)
  options = ['--target=gpt_97m', '--slices=v5e:1x1', '--batch_sizes=8,999999']
  options += ['--room=4096', '--contexts=512,4096', f'--output={tmp_path}']
  status = contexts.main(options)
  jax.config.update(name, False)
  assert status == 0, capsys.readouterr().err
  contents = json.loads((tmp_path / 'contexts.json').read_text())
  assert 'does not hold 999999 rows' in contents['notes'][-1]
  short, long = contents['rows']
  gigabytes = lambda row, way: float(row[f'plain, {way}: GB'])
  assert gigabytes(short, 'whole') == gigabytes(long, 'whole')
  assert gigabytes(short, 'blocks') < 0.5 * gigabytes(short, 'whole')
  for row in (short, long):
    assert gigabytes(row, 'blocks') >= 0.99 * float(row['least, GB'])
