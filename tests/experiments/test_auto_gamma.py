"""What a choice is worth, beside a search."""

import json

import pytest

from experiments.auto_gamma import __main__ as experiment

SPEEDS = {0: 100.0, 2: 150.0, 4: 200.0, 5: 190.0, 11: 50.0}


def test_choices_are_compared_with_the_best_and_with_plain_decoding():
  found = experiment.compared(SPEEDS, 4, [5, 4, 5, 5, 0])
  assert found['of_best'] == pytest.approx(190 / 200)
  assert found['of_plain'] == pytest.approx(1.9)
  # The last choice: a fiftieth of plain decoding's time, for nothing.
  assert found['of_plain_with_measuring'] == pytest.approx(1 / 1.02)


def test_a_setting_that_was_measured_is_not_measured_again(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(experiment, 'measure', None)
  speeds = {str(gamma): speed for gamma, speed in SPEEDS.items()}
  found = {'chosen': [5], 'best': 4, 'measured_again': speeds}
  found |= experiment.compared(SPEEDS, 4, [5])
  settings = {'lm-mini': found}
  results = {'device': 'a device', 'settings': settings}
  (tmp_path / 'results.json').write_text(json.dumps(results))
  argv = [f'--output={tmp_path}', '--settings=lm-mini']
  assert experiment.main(argv) == 0
  line = '| lm-mini | 5 | 4 (200.0 tokens/s) | 100.0 tokens/s | 0.950 | 1.900 |'
  assert line in capsys.readouterr().out
  # Figures of two devices do not mix.
  argv = [f'--output={tmp_path}', '--settings=SmolLM2, copy']
  assert experiment.main(argv) == 2
  assert 'is of device a device, not' in capsys.readouterr().err


def test_a_corpus_that_is_not_there_is_one_sentence(tmp_path, capsys):
  argv = [f'--output={tmp_path}', f'--corpus={tmp_path}', '--settings=lm-mini']
  assert experiment.main(argv) == 2
  assert 'auto_gamma: error: [Errno 2]' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['SmolLM2, copy', 'SmolLM2, chat'])
def test_prompts_are_spread_over_their_file(name, tmp_path):
  setting = experiment.SETTINGS[name]
  texts = experiment.texts_of(setting, tmp_path)
  assert len({*texts}) == setting.num_batches == 6
