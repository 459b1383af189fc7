"""`specdec bench`: figures under their names."""

import json

import pytest

from tests.cli import tiny
from tests.cli.tiny import assert_refused

KEYS = {
  *('autoregressive_tokens_per_second', 'speculative_tokens_per_second'),
  *('speedup', 'predicted_speedup', 'alpha', 'c', 'verify_cost_ratio'),
  *('gamma', 'block_efficiency', 'tokens', 'target_runs', 'identical'),
  *('first_divergence_margin', 'compile_seconds', 'dtype', 'device'),
}


SAMPLED = (
  *('--json', '-', '--drafter', 'uniform', '--temperature', '0.9'),
  *('--plain_dtypes', 'float32'),
)


@pytest.fixture
def bench(run, model, prompts_file):
  def call(*options):
    return run(
      'bench',
      *('--model', model, '--prompts', prompts_file, '--batch_size', '3'),
      *('--max_new_tokens', '6', '--repeats', '1', '--gamma', '2', *options),
    )

  return call


def test_greedy_figures_and_table(bench, tmp_path, model):
  path = tmp_path / 'figures.json'
  result = bench('--json', path, '--draft_model', model)
  assert (result.status, result.err) == (0, '')
  figures = json.loads(path.read_text())
  assert set(figures) >= KEYS
  assert figures['identical'] is True
  assert figures['first_divergence_margin'] is None
  assert figures['alpha'] == figures['acceptance_per_drafted'] == 1.0
  # 8 rows of 6 tokens; the row that fills the third batch counts nowhere.
  assert (figures['tokens'], figures['num_prompts']) == (48, 8)
  assert figures['target_runs'] == 3 * 2
  assert figures['autoregressive_target_runs'] == 3 * 6
  assert figures['block_efficiency'] == 3.0
  # What a draft of so small a model adds to a call is within the noise.
  assert figures['c'] >= 0
  assert figures['c'] == pytest.approx(
    figures['seconds_per_propose'] / 2 / figures['seconds_per_plain_iteration']
  )
  assert set(figures['baseline_candidates_tokens_per_second']) == {
    *('float32', 'bfloat16')
  }
  for part in ('measured speedup', 'predicted speedup', 'identical', 'yes'):
    assert part in result.out


def test_sampled_figures_on_standard_output(bench):
  result = bench(*SAMPLED)
  assert (result.status, result.err) == (0, '')
  figures = json.loads(result.out)
  assert set(figures) >= KEYS
  assert figures['identical'] is None
  assert 0 <= figures['alpha'] < 0.9
  assert figures['speculative_tokens_per_second'] > 0
  assert (figures['drafter'], figures['temperature']) == ('uniform', 0.9)


def test_a_gamma_that_varies_is_timed_by_what_it_drafted(bench, model):
  options = ('--json', '-', '--draft_model', model, '--adaptive', 'heuristic')
  result = bench(*options, '--batch_size', '1', '--plain_dtypes', 'float32')
  assert (result.status, result.err) == (0, '')
  figures = json.loads(result.out)
  assert (figures['adaptive'], figures['identical']) == ('heuristic', True)
  assert figures['theory_speedup'] is None
  assert figures['predicted_speedup'] > 0


def test_logits_that_are_no_numbers_are_reported(bench, make_model):
  model = make_model('burst', change=tiny.burst)
  assert_refused(bench(*SAMPLED, '--model', model), '(NaN)')


def test_the_figures_go_nowhere_else(run, tmp_path):
  path = tmp_path / 'none' / 'figures.json'
  result = run('bench', '--prompt', 'a', '--json', path)
  assert_refused(result, f'cannot write --json {path}')
