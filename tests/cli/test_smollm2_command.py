"""The command with SmolLM2-135M."""

import json
import pathlib

import pytest

from specdec_jax.checkpoints import pretrained

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden/smollm2_greedy.json'


@pytest.fixture(scope='module', autouse=True)
def _weights():
  pytest.importorskip('gguf')
  try:
    pretrained.packaged_file('smollm2-135m')
  except ValueError as error:
    pytest.skip(str(error))


def test_the_answer_is_that_of_hugging_face_in_fewer_runs(run):
  """With the program of the first lines of docs/python.md."""
  records = json.loads(GOLDEN.read_text(encoding='utf-8'))['records']
  (golden,) = (r for r in records if r['text'].startswith('Repeat this'))
  result = run(
    *('generate', '--chat', '--prompt', golden['text'], '--gamma', '8'),
    *('--max_new_tokens', '64', '--json', '-'),
  )
  assert (result.status, result.err) == (0, '')
  drafted = json.loads(result.out)
  assert drafted['tokens'] == golden['output_ids']
  assert drafted['statistics']['target_runs'] < len(drafted['tokens'])


def test_a_draft_model_of_another_vocabulary(run, model):
  result = run('generate', '--prompt', 'a', '--draft_model', model)
  assert result.status == 2
  assert 'id 3 is ' in result.err
