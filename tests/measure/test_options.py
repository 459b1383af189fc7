"""Options of `bench` and `calibrate`: every wrong one gets one sentence."""

import json

import pytest

from tests.cli.test_options import PROMPT, no_model  # noqa: F401
from tests.cli.tiny import assert_refused

pytestmark = pytest.mark.usefixtures('no_model')
TREE = ('--draft_model', 'x', '--tree', '4')
# A command, options that it refuses, and words of the sentence that says why.
COMPLAINTS = {
  'plain decoding beside itself': (('bench', '--drafter', 'none'), 'a drafter'),
  'a dtype of weights': (
    ('bench', '--plain_dtypes', 'float32', 'int8'),
    "'int8'",
  ),
  'drafts that end early': (
    ('calibrate', '--draft_model', 'x', '--min_prob', '0.4', '--gamma', '3'),
    'leave out --min_prob',
  ),
  'a tree to calibrate': (('calibrate', *TREE), 'calibrate', 'chain'),
  'a simulated tree': (
    ('bench', *TREE, '--simulate_alpha', '0.5'),
    '--simulate_alpha',
    'chains',
  ),
  'a gamma to be measured': (
    ('calibrate', '--gamma', 'auto'),
    '--gamma auto',
    'bench',
  ),
}


@pytest.mark.parametrize('case', COMPLAINTS)
def test_a_wrong_option_gets_one_sentence(run, case):
  (command, *flags), *parts = COMPLAINTS[case]
  assert_refused(run(command, *PROMPT, *flags), *parts)


@pytest.mark.parametrize('command', ['bench', 'calibrate'])
def test_lines_with_settings_of_their_own(run, command, tmp_path):
  path = tmp_path / 'lines.jsonl'
  path.write_text(json.dumps({'prompt': 'a', 'temperature': 0.5}))
  result = run(command, '--prompts', path, '--temperature', '1')
  assert_refused(result, 'line 1: only generate')


def test_help_shows_defaults_as_they_are_typed(run):
  result = run('bench', '--help')
  assert 'usage: specdec bench' in result.out
  shown = ' '.join(result.out.split())
  assert 'is the baseline (default: float32 bfloat16)' in shown
