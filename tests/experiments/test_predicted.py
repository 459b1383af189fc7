"""Predictions of the shipped models: acceptance is measured here, and costs are
those of the TPU compiler."""

import importlib.util
import json

import pytest

from experiments.predicted import __main__ as predicted

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
