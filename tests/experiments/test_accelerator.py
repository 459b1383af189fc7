"""The run for accelerators, with small sizes on whatever device this is."""

import json

import pytest

from experiments import results
from experiments.accelerator import __main__ as accelerator

pytest.importorskip('tokenizers')


@pytest.mark.slow
def test_a_pair_becomes_a_chapter_named_after_the_device(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(accelerator, 'WIDTHS', (1, 2, 4))
  status = accelerator.main(
    [
      *('--pairs=random:lm_nano/random:lm_nano', '--batch_sizes=2'),
      *('--prompt_tokens=4', '--max_new_tokens=4', '--repeats=1'),
      *('--alpha=1', '--dtype=float32', '--tables=pairs'),
      f'--output={tmp_path / "accelerator" / "results"}',
    ]
  )
  assert status == 0, capsys.readouterr().err
  [path] = tmp_path.rglob('*.json')
  contents = json.loads(path.read_text())
  assert 'SIMULATED' in contents['notes'][0]
  [row] = contents['rows']
  assert row['batch'] == 2
  assert {'T(2)/T(1)', 'T(4)/T(1)'} < row.keys()
  assert 1 <= row['gamma'] <= 3
  # An iteration reads the weights of target and drafter at least once.
  assert float(row['bytes']) > 1
  assert path.parent.name in results.page(tmp_path)


def test_a_pair_that_is_not_there_is_named(capsys):
  assert accelerator.main(['--pairs=random:t5_1_1_tiny']) == 2
  assert 't5_1_1_tiny' in capsys.readouterr().err


def test_a_pair_that_does_not_fit_on_a_device_is_skipped(tmp_path, capsys):
  status = accelerator.main(
    [
      *('--pairs=random:qwen3_235b_a22b', '--tables=pairs'),
      f'--output={tmp_path}',
    ]
  )
  assert status == 0
  line = capsys.readouterr().err
  assert 'qwen3_235b_a22b is skipped: its weights take 438 GiB' in line
  assert not [*tmp_path.iterdir()]
