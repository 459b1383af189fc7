"""The command with SmolLM2-135M."""

import json
import os

import pytest

from specdec_jax.checkpoints import pretrained

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

QUESTION = 'Repeat after me: the cat sat on the mat, the cat sat on the mat.'


@pytest.fixture(scope='module', autouse=True)
def _weights():
  pytest.importorskip('gguf')
  try:
    pretrained.packaged_file('smollm2-135m')
  except ValueError as error:
    pytest.skip(str(error))


def test_drafts_save_runs_and_a_second_run_compiles_nothing(
  run, tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))

  def answer():
    usual = ('--chat', '--prompt', QUESTION, '--max_new_tokens', '24')
    result = run('generate', *usual, '--json', '-')
    assert (result.status, result.err) == (0, '')
    return json.loads(result.out)

  def compiled():
    folder = tmp_path / 'specdec_jax' / 'compiled'
    return {name for name in os.listdir(folder) if name.endswith('-cache')}

  drafted = answer()
  assert 'cat' in drafted['text']
  assert drafted['statistics']['target_runs'] < len(drafted['tokens'])
  before = compiled()
  assert before
  assert answer() == drafted
  assert compiled() == before


def test_a_draft_model_of_another_vocabulary(run, model):
  result = run('generate', '--prompt', 'a', '--draft_model', model)
  assert result.status == 2
  assert 'id 3 is ' in result.err
