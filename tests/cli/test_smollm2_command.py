"""The command with SmolLM2-135M."""

import json
import os
import pathlib

import pytest

from specdec_jax.checkpoints import loading
from specdec_jax.evaluation import trace_file

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

QUESTION = 'Repeat after me: the cat sat on the mat, the cat sat on the mat.'


@pytest.fixture(scope='module', autouse=True)
def _weights():
  pytest.importorskip('gguf')
  try:
    loading.packaged_file('smollm2-135m')
  except ValueError as error:
    pytest.skip(str(error))


@pytest.fixture
def answer(run):
  def call(*options):
    usual = ('--chat', '--prompt', QUESTION, '--max_new_tokens', '24')
    result = run('generate', *usual, *options)
    assert (result.status, result.err) == (0, '')
    return result

  return call


def test_drafts_change_nothing_and_save_runs(answer, tmp_path):
  path = tmp_path / 'trace.jsonl'
  plain = json.loads(answer('--drafter', 'none', '--json', '-').out)
  drafted = json.loads(answer('--json', '-', '--trace', path).out)
  assert drafted['tokens'] == plain['tokens']
  assert 'cat' in drafted['text']
  runs = drafted['statistics']['target_runs']
  assert runs < plain['statistics']['target_runs']
  assert trace_file.read(path).summarize().num_target_runs == runs


def test_a_second_run_compiles_nothing(answer, cache_home):
  def entries():
    folder = pathlib.Path(cache_home) / 'specdec_jax' / 'compiled'
    return {name for name in os.listdir(folder) if name.endswith('-cache')}

  first = answer()
  before = entries()
  assert before
  assert answer() == first
  assert entries() == before


def test_a_draft_model_of_another_vocabulary(run, model):
  result = run('generate', '--prompt', 'a', '--draft_model', model)
  assert result.status == 2
  assert 'id 3 is ' in result.err
