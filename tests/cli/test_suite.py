"""`specdec bench --suite`: one table, which an interrupted run completes."""

import json
import sys

import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface
from specdec_jax.decoding import statistics
from specdec_jax.measure import suite, suite_report
from specdec_jax.text import suite_prompts
from tests import toy_eagle
from tests.cli import tiny
from tests.cli.tiny import assert_refused

pytest.importorskip('matplotlib')

USUAL = (
  *('--gammas', '2', '--suite_prompts', '2', '--suite_tokens', '6'),
  *('--suite_repeats', '1', '--plain_dtypes', 'float32', '--color', 'never'),
)


@pytest.mark.slow
def test_a_suite_goes_on_where_it_stopped(run, make_model, tmp_path):
  model = make_model('suite', max_positions=512)
  sizes = toy_eagle.config(tiny.make_config(max_positions=512))
  head = tmp_path / 'eagle'
  huggingface.save(head, sizes, toy_eagle.params(sizes, seed=1))
  argv = (
    *('bench', '--suite', model, '--out', tmp_path, *USUAL),
    '--drafters',
    f'model={model},ngram,none,eagle={head},eagle+lookup={head}',
    *('--categories', 'maths,random tokens,long input'),
  )
  result = run(*argv)
  assert result.status == 0, result
  figures = json.loads((tmp_path / 'suite.json').read_text())
  assert 'do not fit: long input' in figures['notes'][0]
  rows = {(row['category'], row['drafter']): row for row in figures['rows']}
  assert len(rows) == len(figures['rows']) == 2 * 5
  own = rows['maths', model]
  # Two drafted tokens and the bonus token; the third position has none.
  assert (own['tokens_per_target_run'], own['alpha_2']) == (3.0, 1.0)
  assert (own['alpha_3'], own['identical_rows'], own['rows']) == (None, 2, 2)
  assert rows['random tokens', 'none']['tokens_per_target_run'] == 1.0
  # The target keeps features for both, and what it says stays the same.
  for name in (str(head), f'{head}+lookup'):
    row = rows['maths', name]
    assert (row['identical_rows'], row['rows']) == (2, 2)
    assert row['tokens_per_target_run'] >= 1
    assert row['c'] >= 0
    assert row['predicted_speedup'] > 0
  page = (tmp_path / 'suite.md').read_text()
  for part in ('bfloat16 in hardware', 'commit', '(with bonus)', 'suite.svg'):
    assert part in page
  # What is missing is measured, and the rest is kept.
  cells = sorted((tmp_path / 'cells').iterdir())
  kept, missing = cells[0].read_bytes(), cells[1]
  missing.unlink()
  assert run(*argv).status == 0
  assert (cells[0].read_bytes(), missing.exists()) == (kept, True)
  other = run(*argv, '--seed', '1')
  assert_refused(other, 'seed None, not 1', '--out')
  settings = tmp_path / 'settings.json'
  for commit, advice in (
    ('abc123', 'do not mix: check out abc123 to go on, or give another --out'),
    ('abc123 with changes', 'do not mix: give another --out'),
  ):
    begun = json.loads(settings.read_text()) | {'commit': commit}
    settings.write_text(json.dumps(begun))
    assert_refused(run(*argv), f'begun with commit {commit}, not ', advice)


def test_drafters_of_an_encoder_decoder_have_their_own_states(
  run, tmp_path, monkeypatch
):
  """What comes first leaves prompt lookup the source text, from which names are
  copied; and without matplotlib no plot is promised."""
  monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
  text = 'The package libxml-simple-perl needs python3-zope.interface.'
  own = {suite_prompts.TRANSLATION: [{'text': text, 'prompt': text}]}
  monkeypatch.setattr(suite_prompts, 'own', lambda: own)
  monkeypatch.setattr(suite_prompts, 'CATEGORIES', (*own, 'random tokens'))
  result = run(
    *('bench', '--suite', 'ende-mini', '--out', tmp_path, *USUAL),
    *('--drafters', 'uniform,prompt_lookup', '--suite_tokens', '12'),
    *('--categories', suite_prompts.TRANSLATION),
  )
  assert result.status == 0, result
  rows = json.loads((tmp_path / 'suite.json').read_text())['rows']
  [alpha] = [r['alpha'] for r in rows if r['drafter'] == 'prompt_lookup']
  assert alpha is not None
  assert alpha > 0.5
  shown = ' '.join(result.out.split())
  assert 'the plot: none, since a plot needs matplotlib' in shown
  assert not (tmp_path / 'suite.svg').exists()


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      ('--suite', '--gamma', '4'),
      '--gamma does',
    ),
    (('--suite', '--prompt', 'a'), '--prompt does'),
    (('--prompt', 'a', '--gammas', '4'), '--gammas'),
    ((), '--prompt, --prompts or --suite'),
    (('--suite', '--drafters', 'model'), 'KIND=MODEL'),
    (('--suite', '--drafters', 'medusa'), "'medusa' is none"),
    (('--suite', '--drafters', 'eagle+tree=x'), "no 'tree'"),
    (('--suite', '--batch_sizes', '8'), 'raise --suite_prompts'),
    (
      ('--suite', '--top_k', '5'),
      'top_k 5',
    ),
    (('--suite', '--categories', 'poems'), "'poems' is none"),
    (
      ('--suite', '--drafters', 'none', '--max_ngram', '2'),
      '--max_ngram is for',
    ),
  ],
)
def test_flags_that_do_not_fit_are_refused(run, options, message):
  assert_refused(run('bench', *options), message)


def test_few_shapes_are_compiled():
  lengths = {'chat': 40, 'qa': 65, 'long': 700, 'endless': 5000}
  expected = {'chat': 256, 'qa': 256, 'long': 1024, 'endless': 5000}
  assert suite.widths(lengths) == expected
  assert suite.widths({'chat': 64}) == {'chat': 64}


def test_a_row_is_what_was_timed():
  """Two prompts of 12 tokens; the second ends with half of the speed."""

  def timed(seconds, gamma, iterations, margins=None):
    counters = statistics.init(1, gamma)
    reached = np.arange(gamma)[None]
    one = counters.replace(
      num_tokens=np.array([12]),
      num_target_runs=np.array([iterations]),
      num_drafted=np.array([iterations * gamma]),
      num_tested=8 >> reached,
      num_accepted=4 >> reached,
    )
    return suite.Timed([np.array([s]) for s in seconds], [one, one], margins)

  plain = timed([1.0, 1.0], 0, 12)
  drafted = timed([0.5, 1.0], 2, 4, margins=[1e-4])
  costs = {'c': 0.1, 'verify_cost_ratio': 1.3, 'without_draft_cost_ratio': None}
  row = suite.figures(
    drafted, plain=plain, baseline=plain, costs=costs, dtype='float32'
  )
  assert row['tokens_per_target_run'] == 3
  assert [row[f'alpha_{i}'] for i in (1, 2, 3)] == [0.5, 0.5, None]
  assert row['speedup'] == pytest.approx(2 / 1.5)
  assert row['speedup_interval'][0] < 1 < row['speedup_interval'][1]
  assert row['predicted_speedup'] == pytest.approx(3 / (1.3 + 0.2))
  assert (row['identical_rows'], row['near_ties'], row['rows']) == (1, 1, 2)
  rows = [{'gamma': 2, **row}]
  assert 'within 50.0% of' in suite_report.prediction(rows)


def test_own_prompts_are_twenty_and_differ():
  for name, examples in suite_prompts.own().items():
    shown = {suite_prompts.shown(each, False) for each in examples}
    assert len(shown) == len(examples) == 20, name
  [example, *_] = suite_prompts.own()[suite_prompts.TRANSLATION]
  assert suite_prompts.shown(example, True) == example['text']
  first = suite_prompts.random_tokens([3, 5, 7], 2)
  assert first == suite_prompts.random_tokens([3, 5, 7], 3)[:2]


def test_public_sets_are_read_in_their_layouts(tmp_path):
  def write(path, **record):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + '\n')

  questions = tmp_path / 'data' / 'spec_bench' / 'question.jsonl'
  for category, name in (('rag', 'rag'), ('writing', 'multi-turn')):
    write(questions, question_id=1, category=category, turns=['One?', 'Two?'])
    expected = {f'Spec-Bench {name}': [{'prompt': 'One?'}]}
    assert suite_prompts.public('Spec-Bench', tmp_path) == expected
  path = tmp_path / 'qualitative.jsonl'
  write(path, category='qa', messages=[{'role': 'user', 'content': 'One?'}])
  expected = {'SPEED-Bench qa': [{'prompt': 'One?'}]}
  assert suite_prompts.public('SPEED-Bench', tmp_path) == expected
  text = 'FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE'
  write(path, category='qa', turns=[text])
  with pytest.raises(ValueError, match=r'line 1.*placeholder'):
    suite_prompts.public('SPEED-Bench', tmp_path)
  for name in suite_prompts.PUBLIC:
    with pytest.raises(ValueError, match=f'none is no {name}: it has no '):
      suite_prompts.public(name, 'none')
