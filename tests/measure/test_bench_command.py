"""`specdec bench`: figures under their names."""

import json
import re

import pytest

from specdec_jax.launch import progress
from specdec_jax.measure import bench_command
from specdec_jax.measure.comparison import Timing
from tests.cli import tiny
from tests.cli.tiny import assert_refused
from tests.measure.some_rows import some_row, some_timed

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
      *('--model', model, '--batch_size', '3', '--max_new_tokens', '6'),
      *(() if '--prompt' in options else ('--prompts', prompts_file)),
      *('--repeats', '1', '--gamma', '2', *options),
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
  for part in ('measured speedup', 'predicted speedup'):
    assert part in result.out
  assert 'yes, 48 tokens' in line_of(result.out, 'identical to plain float32')


def line_of(table, name):
  """The one line of a table that begins so."""
  [line] = [line for line in table.splitlines() if name in line]
  return line


def test_the_table_names_what_was_compared():
  """The fastest plain decoding, of another dtype, can give another text."""
  plain = some_timed([1.0], 163, 163)
  row = some_row(
    some_timed([0.9, 1.1], 162, 162),
    some_timed([1.0, 1.0], 162, 54),
    plain=Timing(prefill=0.0, loop=plain, per_iteration=plain.per_iteration),
  )
  result = bench_command._Result(
    row=row,
    plain_speeds={'float32': 162.0},
    plain_dtype='float32',
    plain_compile_seconds=1.0,
    compile_seconds=2.0,
  )
  settings = dict.fromkeys(('model', 'drafter', 'device', 'min_prob')) | {
    **{'dtype': 'bfloat16', 'draft_dtype': 'float32', 'weights': 'int8'},
    **{'is_simulated': False, 'temperature': 0.0},
  }
  console = progress.console(color='never')
  with console.capture() as shown:
    console.print(bench_command._table(result, settings))
  table = shown.get()
  assert '162' in line_of(table, '│ tokens ')
  assert '0.90 to 1.10' in table
  compared = line_of(table, 'identical to plain bfloat16')
  assert '162' not in compared
  assert 'yes, 163 tokens' in compared


@pytest.mark.slow
def test_nothing_drafted_is_nothing_lost(bench, tmp_path):
  """No token of a prompt of one can stand in it before."""
  path = tmp_path / 'figures.json'
  result = bench(
    *('--prompt', 'a', '--max_new_tokens', '1', '--batch_size', '1'),
    *('--drafter', 'prompt_lookup', '--plain_dtypes', 'float32'),
    *('--json', path, '--weights', 'int8'),
  )
  assert (result.status, result.err) == (0, '')
  figures = json.loads(path.read_text())
  assert figures['weights'] == 'int8'
  assert 'int8, float32' in result.out
  assert figures['drafter_options'] == {
    **{'max_ngram': 3, 'min_ngram': None, 'num_continuations': 1}
  }
  assert figures['target_runs'] == figures['short_target_runs'] == 1
  assert figures['without_draft_cost_ratio'] > 0
  for name in (
    *('alpha', 'acceptance_per_drafted', 'alpha_from_block_efficiency'),
    'theory_speedup',
  ):
    assert figures[name] is None, name
  assert (
    line_of(result.out, 'alpha (accepted / tested)').rstrip(' │').endswith('-')
  )


@pytest.mark.slow
def test_sampled_figures_on_standard_output(bench):
  bias = '{(3, 4): -1.0}'
  result = bench(*SAMPLED, '--sequence_bias', bias)
  assert (result.status, result.err) == (0, '')
  figures = json.loads(result.out)
  assert (figures['sequence_bias'], figures['typical_p']) == (bias, None)
  assert set(figures) >= KEYS
  assert figures['identical'] is None
  assert 0 <= figures['alpha'] < 0.9
  assert figures['speculative_tokens_per_second'] > 0
  assert (figures['drafter'], figures['temperature']) == ('uniform', 0.9)


@pytest.mark.slow
def test_drafts_that_end_early_are_timed_by_what_was_drafted(bench, model):
  options = ('--json', '-', '--draft_model', model, '--min_prob', '0.1')
  options += ('--gamma', '4', '--batch_size', '1')
  result = bench(*options, '--plain_dtypes', 'float32')
  assert (result.status, result.err) == (0, '')
  figures = json.loads(result.out)
  assert (figures['min_prob'], figures['identical']) == (0.1, True)
  assert figures['theory_speedup'] is None
  assert figures['predicted_speedup'] > 0


@pytest.mark.slow
def test_logits_that_are_no_numbers_are_reported(bench, make_model):
  model = make_model('burst', change=tiny.burst)
  assert_refused(bench(*SAMPLED, '--model', model), '(NaN)')


def test_the_figures_go_nowhere_else(run, tmp_path):
  path = tmp_path / 'none' / 'figures.json'
  result = run('bench', '--prompt', 'a', '--json', path)
  assert_refused(result, f'cannot write --json {path}')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('drafter', 'gammas'),
  [('prompt_lookup', '0 3 11 23'), ('uniform', '0 1 3 7')],
)
def test_auto_gamma_is_measured_first(
  bench, tmp_path, drafter, gammas, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setenv('SPECDEC_PROGRESS', '0.01')
  path = tmp_path / 'figures.json'
  result = bench(
    *('--gamma', 'auto', '--plain_dtypes', 'float32', '--json', path),
    *('--drafter', drafter),
  )
  assert result.status == 0, result
  figures = json.loads(path.read_text())
  choice = figures['auto']
  assert f'specdec: {choice["sentence"]}\n' in result.err
  # Four gammas, there and back again.
  assert re.search(r'measuring gamma: [1-8] of 8, \S+ left\n', result.err)
  assert set(choice['tokens_per_second']) == {*gammas.split()}
  assert figures['gamma'] == choice['gamma'] <= int(gammas.split()[-1])
  if choice['gamma']:
    assert figures['identical'] is True
    assert f'gamma {choice["gamma"]}' in result.out
  else:
    assert 'speedup' not in figures
    for gamma, speed in choice['tokens_per_second'].items():
      assert f'{speed:.1f}' in line_of(result.out, f' {gamma} │')


@pytest.mark.slow
def test_simulated_figures_say_so_everywhere(run, model, tmp_path):
  path = tmp_path / 'figures.json'
  result = run(
    'bench',
    *('--model', model, '--draft_model', model, '--prompt', 'the in the'),
    *('--simulate_alpha', '0', '--max_new_tokens', '6', '--gamma', '2'),
    *('--repeats', '1', '--plain_dtypes', 'float32', '--json', path),
  )
  assert (result.status, result.err) == (0, '')
  figures = json.loads(path.read_text())
  assert figures['is_simulated']
  assert figures['verification'] == 'simulated'
  assert figures['simulate_alpha'] == 0
  assert figures['identical'] is None
  # The draft model is the target, and yet nothing passes.
  assert figures['alpha'] == 0
  assert figures['target_runs'] == 6
  assert 'SIMULATED acceptance of 0' in result.out
  assert 'not compared: simulated' in result.out
