"""`specdec calibrate` and `specdec plan`: from a measurement to a gamma."""

import importlib.util
import json
import re

import pytest

from specdec_jax.theory import doubts
from specdec_jax.theory.costs import KIND
from tests.cli.tiny import assert_refused

CHECKED = ('alpha', 'c', 'verify_cost_ratio', 'loop_seconds', 'extend_seconds')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('costs')


def written(folder, **changes) -> str:
  """A file as calibrate writes it, a plain step being one second."""
  figures = {
    'kind': KIND,
    'source': 'measured',
    'alpha': 0.8,
    'alpha_interval': [0.78, 0.82],
    'profile': [0.8] * 6,
    'widths': [1, 4, 7],
    'target_seconds': [1.0, 1.0, 1.0],
    'first_draft_seconds': 0.05,
    'draft_seconds': 0.05,
    'loop_seconds': 0.0,
    'c_hat': 0.05,
    'model': 'target',
    'drafter': 'drafter',
    'dtype': 'float32',
    'device': 'none',
    'batch_size': 1,
  }
  path = folder / 'costs.json'
  path.write_text(json.dumps(figures | changes))
  return str(path)


def test_a_calibration_is_planned_with(
  run, model, prompts_file, tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  for name in ('of_costs', 'of_turns', 'of_load'):
    monkeypatch.setattr(doubts, name, lambda *args, **options: [])
  path, plan_path = tmp_path / 'costs.json', tmp_path / 'plan.json'
  result = run(
    'calibrate',
    *('--model', model, '--draft_model', model, '--prompts', prompts_file),
    *('--batch_size', '4', '--max_new_tokens', '6', '--gamma', '2'),
    *('--repeats', '1', '--plain_dtypes', 'float32', '--json', path),
  )
  assert result.status == 0
  assert re.search(r'calibrate chose [012] on 20', result.err)
  [entry] = json.loads((tmp_path / 'cache/specdec_jax/gammas.json').read_text())
  assert entry['choice']['source'] == 'calibrate'
  for part in ('alpha', 'T(3) / T(1)', 'further drafted token'):
    assert part in result.out
  figures = json.loads(path.read_text())
  assert set(figures) >= set(CHECKED)
  # The draft model is the target: every greedy guess is right.
  assert figures['alpha'] == 1
  assert figures['alpha_interval'] == [1, 1]
  assert (figures['num_rows'], figures['abstained']) == (8, 0)
  assert figures['profile'] == [1, 1]
  assert figures['widths'] == [1, 2, 3]
  assert min(figures['target_seconds']) > 0

  result = run('plan', '--costs', path, '--json', plan_path)
  assert (result.status, result.err) == (0, '')
  (plan,) = json.loads(plan_path.read_text())['plans']
  assert [choice['gamma'] for choice in plan['choices']] == [0, 1, 2]
  assert plan['choices'][2]['expected_tokens'] == 3
  assert plan['sentences'][0] in ' '.join(result.out.split())


@pytest.mark.slow
def test_a_calibration_is_of_the_rule_that_was_given(run, model, prompts_file):
  """Guesses of every kind pass a rule that takes all, and no tree can use it;
  block verification accepts no token by itself."""
  usual = (
    *('calibrate', '--model', model, '--draft_model', model, '--json', '-'),
    *('--prompts', prompts_file, '--max_new_tokens', '6', '--gamma', '1'),
    *('--batch_size', '8', '--repeats', '1', '--plain_dtypes', 'float32'),
  )
  result = run(
    *usual, '--verification', 'top_beta', '--beta', '1000', '--tau', '99'
  )
  assert (result.status, result.err) == (0, '')
  figures = json.loads(result.out)
  assert (figures['verification'], figures['beta']) == ('top_beta', 1000)
  assert (figures['alpha'], figures['rank_rates']) == (1, None)
  assert_refused(run(*usual, '--verification', 'block'), 'judges whole drafts')


def test_a_perfect_drafter_at_no_measured_cost_has_no_bound(run, folder):
  path = written(
    folder, alpha=1, alpha_interval=[1, 1], profile=[1] * 8, draft_seconds=0
  )
  result = run('plan', '--costs', path)
  assert (result.status, result.err) == (0, '')
  assert 'oracle' not in result.out
  result = run('plan', '--costs', path, '--json', '-')
  assert json.loads(result.out)['oracle_speedups'] == [None]


@pytest.mark.parametrize(
  ('changes', 'told'),
  [
    ({'doubts': ['the load is 9.0 on 2 cores']}, 'the load is 9.0 on 2 cores'),
    # As files of earlier versions have them.
    ({'extend_seconds': 1.3}, 'the target call alone is timed at 1300 ms'),
    ({'first_draft_seconds': 1e-4}, 'a drafted token is timed at 0.1 ms, and'),
  ],
)
def test_a_plan_of_doubtful_times_says_so(run, folder, changes, told):
  result = run('plan', '--costs', written(folder))
  assert 'in doubt' not in result.out
  path = written(folder, **changes)
  result = run('plan', '--costs', path)
  assert result.status == 0
  shown = ' '.join(result.out.split())
  assert f'These times are in doubt: {told}' in shown
  record = json.loads(run('plan', '--costs', path, '--json', '-').out)
  assert told in record['doubts'][0]


def test_the_plan_is_the_planner_s(run, folder):
  result = run('plan', '--costs', written(folder), '--json', '-')
  (plan,) = json.loads(result.out)['plans']
  assert plan['best']['gamma'] == 6
  assert plan['best']['speedup'] == pytest.approx(
    (1 - 0.8**7) / 0.2 / (1 + 6 * 0.05)
  )
  assert 'between 0.780 and 0.820' in plan['sentences'][-1]
  oracle = 1 / (0.2 + 0.8 * 0.05)
  assert json.loads(result.out)['oracle_speedups'] == pytest.approx([oracle])
  shown = run('plan', '--costs', written(folder), '--color', 'never').out
  assert f'gains more than {oracle:.2f} times' in ' '.join(shown.split())
  result = run(
    'plan', '--costs', written(folder), '--alpha', '0.02', '--json', '-'
  )
  (plan,) = json.loads(result.out)['plans']
  assert plan['best']['gamma'] == 0
  assert 'Speculation loses here' in plan['sentences'][0]


def test_a_drafter_that_often_has_no_guess(run, folder):
  """Runs without a draft score one position; alpha is of the guesses alone."""
  guesses = {'alpha': 0.8, 'alpha_interval': [0.75, 0.85]}
  guesses |= {'profile': [0.4, *[0.8] * 5], 'target_seconds': [1.0, 2.5, 4.0]}

  def plan(abstained, *options, **more):
    path = written(folder, abstained=abstained, **guesses, **more)
    result = run('plan', '--costs', path, *options, '--json', '-')
    return json.loads(result.out)['plans'][0]

  half, always = plan(0.5), plan(0)
  # With T(2) = 1.5, half of the runs score for that, half for a plain step's 1.
  # Of two rows, none has a guess in a quarter of them.
  of_two = plan(0.5, '--output_length', '1', batch_size=2)
  for found, seconds in ((always, 1.55), (half, 1.3), (of_two, 1.425)):
    assert found['choices'][1]['speedup'] == pytest.approx(1.4 / seconds)
  assert half['best']['speedup'] > always['best']['speedup']
  said = half['sentences'][-1]
  low, high = map(float, re.findall(r'\d\.\d\d\b', said)[-2:])
  assert low < half['best']['speedup'] < high < 1.2 * low
  assert plan(0.5, '--alpha', '0.8') == plan(0, '--alpha', '0.8')


def test_no_schedule_s_bound_is_below_a_gamma_s_own_speed(run, folder):
  path = written(folder, profile=[0.55, *[0.93] * 7], widths=[1, 5, 9])
  record = json.loads(run('plan', '--costs', path, '--json', '-').out)
  [bound], [plan] = record['oracle_speedups'], record['plans']
  accepted = 0.55 / (1 - 0.93)
  assert bound == pytest.approx((accepted + 1) / (accepted * 0.05 + 1))
  assert bound > plan['best']['speedup'] > 2.5


def test_a_plan_says_whether_a_tree_beats_a_chain(run, folder):
  ranks = {'rank_rates': [0.6, 0.15, 0.05, 0.02], 'alpha_interval': None}
  cheap = written(folder, profile=[0.6] * 6, **ranks)
  record = json.loads(run('plan', '--costs', cheap, '--json', '-').out)
  tree = record['plans'][0]['tree']
  assert tree['is_faster']
  assert tree['choice']['speedup'] > record['plans'][0]['best']['speedup'] > 1
  shown = ' '.join(
    run('plan', '--costs', cheap, '--color', 'never').out.split()
  )
  assert f'{tree["choice"]["gamma"]} nodes, {tree["depth"]} deep' in shown
  assert f'A tree is faster: {tree["choice"]["gamma"]} nodes in ' in shown
  assert 'That is an upper bound' in shown
  several = run('plan', '--costs', cheap, '--alpha', '0.6').out
  assert 'A tree is faster' in ' '.join(several.split())
  dear = written(folder, target_seconds=[1.0, 2.5, 4.0], **ranks)
  shown = ' '.join(run('plan', '--costs', dear).out.split())
  assert 'No tree is faster: ' in shown
  # Where trees themselves were compiled, their own prices count.
  prices = {'tree_nodes': [3, 6], 'level_seconds': [0.05, 0.05]}
  for seconds, words in ((1.0, 'A tree is faster: '), (2.0, 'No tree is')):
    path = written(
      folder, profile=[0.6] * 6, tree_seconds=[seconds] * 2, **ranks, **prices
    )
    shown = ' '.join(run('plan', '--costs', path).out.split())
    assert words in shown
    assert 'That is an upper bound' not in shown
  # Of drafters that draft chains alone there are neither ranks nor trees.
  for source in ('measured', 'compiled'):
    path = written(folder, source=source)
    result = run('plan', '--costs', path, '--json', '-')
    assert json.loads(result.out)['plans'][0]['tree'] is None


def test_many_tokens_are_so_many_chip_hours(run, folder):
  path = written(folder, batch_size=2, num_devices=4)
  options = ('--costs', path, '--alpha', '0.8', '--tokens', '1e9')
  record = json.loads(run('plan', *options, '--json', '-').out)
  speedup = record['plans'][0]['best']['speedup']
  assert speedup > 2
  plain, drafted = record['fleet']
  # Two rows take a second per token on four chips.
  assert plain == {
    'gamma': 0,
    'tokens_per_second_per_chip': pytest.approx(0.5),
    'chip_hours': pytest.approx(2e9 / 3600),
    'cost_per_million_tokens': None,
  }
  assert drafted['gamma'] == record['plans'][0]['best']['gamma']
  assert drafted['chip_hours'] == pytest.approx(2e9 / 3600 / speedup)
  priced = run('plan', *options, '--price', '1.8').out
  assert '1e+09 output tokens, predicted' in priced
  # A chip's 2,000 seconds cost a dollar, and a million tokens take 2 million.
  [line] = [line for line in priced.splitlines() if '│ plain │' in line]
  assert line.split()[1::2] == ['plain', '0', '0.5', '555,555.6', '1,000.000']


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ((), 'give --costs FILE'),
    (('--costs', 'x', '--price', '2'), '--price 2 needs'),
    (('--tokens', '0'), 'from 1 on, got 0'),
    (('--costs', 'none.json'), 'none.json'),
    (('--target', 't5_1_1_xxl', '--draft', 't5_1_1_small'), '--topology'),
    (
      ('--target', 'nobody', '--draft', 'gpt_6m', '--topology', 'v4:1x1x1'),
      "called 'nobody'",
    ),
    (
      ('--target', 't5_1_1_xx', '--draft', 't5_mini', '--topology', 'v4:1x1x1'),
      'mean t5_1_1_xxl?',
    ),
    (
      ('--target', 't5_mini', '--draft', 't5_nan', '--topology', 'v4:1x1x1'),
      'mean t5_nano?',
    ),
    (
      ('--target', 't5_mini', '--draft', 'lm_nano', '--topology', 'v4:1x1x1'),
      'lm_nano decoder-only',
    ),
    (
      ('--target', 't5_mini', '--draft', 't5_nano', '--topology', 'v9:1x1'),
      "'v9:1x1'",
    ),
    *(
      (
        ('--target', name, '--drafter', 'prompt_lookup', '--topology', 'v9'),
        f'{name} only drafts',
      )
      for name in ('gemma4_31b_assistant', 'eagle3_8k')
    ),
    # Logits of one vocabulary may be padded differently, by a little.
    (
      ('--target', 'qwen2_5_7b', '--draft', 'qwen2_5_0_5b', '--topology', 'v9'),
      "topology is called 'v9'",
    ),
    (
      ('--target', 'qwen3_8b', '--draft', 'llama_3_2_1b', '--topology', 'v9'),
      '151936',
    ),
    (('--costs', 'x', '--target', 't5_mini'), '--target is for'),
    (('--costs', 'x', '--batch_size', '2'), 'not for --costs'),
    (('--costs', 'x', '--dtype', 'float32'), '--dtype is for'),
    (('--costs', 'x', '--no_trees'), '--no_trees is for'),
    (('--alpha', '2'), 'in [0, 1]'),
    (('--drafter', 'none'), "choice: 'none'"),
  ],
)
def test_bad_input_is_one_sentence(run, options, words):
  assert_refused(run('plan', *options), words)


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason='needs libtpu: pip install -e ".[tpu]"',
)
def test_trees_need_not_be_compiled(run):
  def planned(*options):
    result = run(
      *('plan', '--target', 't5_mini', '--draft', 't5_nano', '--json', '-'),
      *('--topology', 'v4:1x1x1', '--max_gamma', '2', '--alpha', '.6'),
      *options,
    )
    assert result.status == 0
    return json.loads(result.out)

  record = planned('--no_trees')
  assert [*record['programs']] == [
    *(f'target, {width} positions' for width in (1, 2, 3)),
    *('drafter, first token', 'drafter, further token'),
  ]
  [plan] = record['plans']
  assert plan['tree'] is None
  [plan_of_both] = planned()['plans']
  assert plan_of_both['tree']['choice']['gamma'] == 2
  assert plan_of_both['best'] == plan['best']


def test_a_gamma_beyond_those_measured_is_refused(run, folder):
  path = written(folder)
  assert_refused(
    run('plan', '--costs', path, '--max_gamma', '7'),
    'exceeds gamma 6',
    '--gamma 7',
  )


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'batch_size': 0}, '[1, inf], got 0'),
    ({'batch_size': None}, 'batch_size: expected a number'),
    ({'widths': [1], 'target_seconds': [1.0]}, 'T(2)'),
    ({'widths': ['1', 4]}, "widths is ['1', 4]"),
    ({'target_seconds': True}, 'target_seconds is True'),
    ({'model': 3}, 'model is 3, expected a string'),
    ({'profile': 0.5}, 'profile is 0.5'),
    ({'num_devices': '4'}, "num_devices is '4', expected a number"),
    ({'alpha_interval': [0.5]}, 'expected two numbers'),
    ({'draft_seconds': float('inf')}, 'draft_seconds is inf'),
    ({'c_hat': 10**400}, 'c_hat is 1000'),
    ({'kind': 'something'}, 'is not what'),
    ({'rank_rates': 'many'}, 'rank_rates'),
    ({'rank_rates': [0.9, 0.8]}, 'sum to at most 1'),
    (
      {'tree_seconds': [1.0], 'tree_nodes': [3, 6], 'level_seconds': [0, 0]},
      'tree_seconds needs 2 times, got 1',
    ),
  ],
)
def test_a_file_with_a_wrong_figure_is_one_sentence(
  run, folder, changes, words
):
  assert_refused(run('plan', '--costs', written(folder, **changes)), words)


def test_a_file_that_lacks_a_figure_is_one_sentence(run, folder):
  path = folder / 'short.json'
  path.write_text(json.dumps({'kind': KIND}))
  assert_refused(run('plan', '--costs', path), 'expected a string')


@pytest.mark.parametrize('width', ['50', '80'])
def test_no_figure_is_cut_on_a_narrow_terminal(run, folder, monkeypatch, width):
  monkeypatch.setenv('COLUMNS', width)
  options = ('--tokens', '1e12', '--price', '3')
  shown = run('plan', '--costs', written(folder), *options).out
  for word in ('operations', 'break-even', 'chip-hours', '277,777,777.8'):
    assert word in shown
  assert '\u2026' not in shown
