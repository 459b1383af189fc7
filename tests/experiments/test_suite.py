"""The suite: one table, which an interrupted run completes."""

import json
import sys
import types

import jax
import pytest

from experiments.suite import __main__ as suite
from experiments.suite import auto, examples, table, targets
from specdec_jax.checkpoints import huggingface
from specdec_jax.launch import compilation_cache
from tests import toy_eagle
from tests.cli import tiny

pytest.importorskip('matplotlib')

USUAL = (
  *('--gammas', '2', '--num_prompts', '2', '--max_new_tokens', '6'),
  *('--repeats', '1', '--plain_dtypes', 'float32'),
)


@pytest.fixture
def run(capsys, monkeypatch):
  """Runs the suite; its status, output and complaints."""
  monkeypatch.setattr(compilation_cache, 'enable', lambda: None)
  name = 'jax_disable_most_optimizations'
  before = jax.config.read(name)
  # Compiling takes longer than all that is decoded here.
  jax.config.update(name, True)

  def call(*argv):
    status = suite.main(list(map(str, argv)))
    told = capsys.readouterr()
    return status, told.out, told.err

  yield call
  jax.config.update(name, before)


@pytest.mark.slow
def test_a_suite_goes_on_where_it_stopped(run, tmp_path, monkeypatch):
  monkeypatch.setenv('SPECDEC_PROGRESS', '0.01')
  model = tiny.write_model(tmp_path / 'suite', max_positions=512)
  sizes = toy_eagle.config(tiny.make_config(max_positions=512))
  head = tmp_path / 'eagle'
  huggingface.save(head, sizes, toy_eagle.params(sizes, seed=1))
  argv = (
    *('--targets', model, '--out', tmp_path, *USUAL),
    '--drafters',
    f'model={model},ngram,none,eagle={head},eagle+lookup={head},'
    f'eagle+tree:3={head}',
    *('--categories', 'maths,random tokens,long input'),
    '--exact_bits',
  )
  status, out, err = run(*argv)
  assert status == 0, err
  assert 'predicted' in out
  assert 'maths (0 of 2 cells done): ' in err
  assert 'random tokens (1 of 2 cells done): ' in err
  figures = json.loads((tmp_path / 'suite.json').read_text())
  assert 'do not fit: long input' in figures['notes'][0]
  rows = {(row['category'], row['drafter']): row for row in figures['rows']}
  assert len(rows) == len(figures['rows']) == 2 * 6
  own = rows['maths', str(model)]
  # Two drafted tokens and the bonus token; the third position has none.
  assert (own['tokens_per_target_run'], own['alpha_2']) == (3.0, 1.0)
  assert (own['alpha_3'], own['identical_rows'], own['rows']) == (None, 2, 2)
  assert rows['random tokens', 'none']['tokens_per_target_run'] == 1.0
  # The target keeps features for both, and what it says stays the same.
  for name in (str(head), f'{head}+lookup', f'{head}+tree:3'):
    row = rows['maths', name]
    assert (row['identical_rows'], row['rows']) == (2, 2)
    assert row['exact_rows'] == 2
    assert (row['tokens_per_target_run'] > 1) == (row['alpha'] > 0)
    assert row['c'] >= 0
    assert row['predicted_speedup'] > 0
  page = (tmp_path / 'suite.md').read_text()
  for part in ('commit', '(with bonus)', 'suite.svg', 'within'):
    assert part in page
  # What is missing is measured, and the rest is kept.
  cells = sorted((tmp_path / 'cells').iterdir())
  kept, missing = cells[0].read_bytes(), cells[1]
  missing.unlink()
  status, _, err = run(*argv)
  assert status == 0, err
  assert (cells[0].read_bytes(), missing.exists()) == (kept, True)
  status, _, err = run(*argv, '--seed', '1')
  assert (status, 'begun with seed 0, not 1' in err) == (2, True)
  settings = tmp_path / 'settings.json'
  begun = json.loads(settings.read_text()) | {'commit': 'abc123'}
  settings.write_text(json.dumps(begun))
  status, _, err = run(*argv)
  assert (status, 'begun with commit abc123, not ' in err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(('price', 'chosen'), [(0.01, 3), (5.0, 0), (None, 2)])
def test_auto_is_chosen_on_half_of_the_prompts(
  run, tmp_path, monkeypatch, price, chosen
):
  """All drafts are accepted, and a drafted token costs so many plain steps; and
  a gamma that was not measured may be chosen."""

  def run_seconds(function, *args):
    state = function(*args)
    counts = state.statistics
    runs = int(counts.num_target_runs.max())
    return state, 1e-3 + runs * (1 + price * counts.num_tested.shape[1])

  if price is None:
    monkeypatch.setattr(auto, 'choose', lambda *args: 2)
  else:
    timing = types.SimpleNamespace(run_seconds=run_seconds)
    monkeypatch.setattr(auto, 'stopwatch', timing)
  model = tiny.write_model(tmp_path / 'suite', max_positions=512)
  status, out, err = run(
    *('--targets', model, '--out', tmp_path, *USUAL, '--gammas', '1,3,auto'),
    *('--drafters', f'model={model},none', '--categories', 'random tokens'),
    *('--num_prompts', '6', '--max_new_tokens', '12'),
  )
  assert status == 0, err
  assert 'none+auto' not in out
  rows = json.loads((tmp_path / 'suite.json').read_text())['rows']
  found = [(row['drafter'], row['gamma'], row['rows']) for row in rows]
  name = str(model)
  assert found == [
    *((name, 3, 6), (name, 1, 6), ('none', 0, 6)),
    (f'{name}+auto', chosen, 3),
  ]
  assert rows[-1]['tokens_per_target_run'] == chosen + 1
  assert rows[-1]['identical_rows'] == 3


@pytest.mark.slow
def test_drafters_of_an_encoder_decoder_have_their_own_states(
  run, tmp_path, monkeypatch
):
  """Prompt lookup has the source text, from which names are copied; and without
  matplotlib no plot is promised."""
  monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
  text = 'The package libxml-simple-perl needs python3-zope.interface.'
  own = {examples.TRANSLATION: [{'text': text, 'prompt': text}]}
  monkeypatch.setattr(examples, 'own', lambda: own)
  monkeypatch.setattr(examples, 'CATEGORIES', (*own, 'random tokens'))
  status, out, err = run(
    *('--targets', 'ende-mini', '--out', tmp_path, *USUAL),
    *('--drafters', 'uniform,prompt_lookup', '--max_new_tokens', '12'),
    *('--categories', examples.TRANSLATION),
  )
  assert status == 0, err
  contents = json.loads((tmp_path / 'suite.json').read_text())
  rows = contents['rows']
  assert contents['notes'][-1].startswith('Predicted speedups')
  [alpha] = [r['alpha'] for r in rows if r['drafter'] == 'prompt_lookup']
  assert alpha is not None
  assert alpha > 0.5
  assert 'There is no plot: a plot needs matplotlib' in out
  assert not (tmp_path / 'suite.svg').exists()


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (('--drafters', 'model'), 'KIND=MODEL'),
    (('--drafters', 'medusa'), "'medusa'"),
    (('--drafters', 'eagle+tree=x'), 'a number of nodes'),
    (('--drafters', 'uniform+max_ngram:2'), "'max_ngram'"),
    (('--verification', 'block+beta:2'), "'beta'"),
    (('--batch_sizes', '8'), '--num_prompts'),
    (('--gammas', 'auto'), 'among numbers'),
    (('--gammas', '4,auto', '--batch_sizes', '3'), '--num_prompts 6 or more'),
    (('--top_k', '5'), 'temperature 0'),
    (('--categories', 'poems'), "'poems'"),
  ],
)
def test_flags_that_do_not_fit_are_refused(run, options, message):
  status, _, err = run(*options)
  assert (status, message in err) == (2, True), err


def test_what_chooses_a_gamma_is_not_measured():
  assert auto.halves(range(5)) == (range(0, 5, 2), range(1, 5, 2))


def test_few_shapes_are_compiled():
  lengths = {'chat': 40, 'qa': 65, 'long': 700, 'endless': 5000}
  expected = {'chat': 256, 'qa': 256, 'long': 1024, 'endless': 5000}
  assert targets.widths(lengths) == expected
  assert targets.widths({'chat': 64}) == {'chat': 64}


def test_a_row_is_what_was_timed():
  """Of three rows one differs within the rounding, and one beyond it."""
  figures = dict.fromkeys(targets._SAME, 1.0) | {
    **{'block_efficiency': 3.0, 'autoregressive_tokens_per_second': 9.0},
    **{'alpha_by_position': [0.5, 0.25], 'rows': 3},
    **{'num_divergent_rows': 2, 'divergence_margins': [1e-4, 0.1]},
  }
  row = targets.row(figures, dtype='float32', is_greedy=True)
  assert [row[f'alpha_{i}'] for i in (1, 2, 3)] == [0.5, 0.25, None]
  assert (row['tokens_per_target_run'], row['plain_tokens_per_second']) == (
    3,
    9,
  )
  assert (row['identical_rows'], row['near_ties'], row['rows']) == (1, 1, 3)
  row = targets.row(figures, dtype='float32', is_greedy=False)
  assert row['identical_rows'] is row['near_ties'] is None
  rows = [{'gamma': 2, 'speedup': 1.0, 'predicted_speedup': 1.5}]
  assert 'within 50.0% of' in table.prediction(rows)


def test_own_prompts_are_twenty_and_differ():
  for name, own in examples.own().items():
    shown = {examples.shown(each, False) for each in own}
    assert len(shown) == len(own) == 20, name
  [example, *_] = examples.own()[examples.TRANSLATION]
  assert examples.shown(example, True) == example['text']
  first = examples.random_tokens([3, 5, 7], 2)
  assert first == examples.random_tokens([3, 5, 7], 3)[:2]


def test_public_sets_are_read_in_their_layouts(tmp_path):
  def write(path, **record):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + '\n')

  questions = tmp_path / 'data' / 'spec_bench' / 'question.jsonl'
  for category, name in (('rag', 'rag'), ('writing', 'multi-turn')):
    write(questions, question_id=1, category=category, turns=['One?', 'Two?'])
    expected = {f'Spec-Bench {name}': [{'prompt': 'One?'}]}
    assert examples.public('Spec-Bench', tmp_path) == expected
  path = tmp_path / 'qualitative.jsonl'
  write(path, category='qa', messages=[{'role': 'user', 'content': 'One?'}])
  expected = {'SPEED-Bench qa': [{'prompt': 'One?'}]}
  assert examples.public('SPEED-Bench', tmp_path) == expected
  text = 'FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE'
  write(path, category='qa', turns=[text])
  with pytest.raises(ValueError, match=r'line 1.*placeholder'):
    examples.public('SPEED-Bench', tmp_path)
  for name in examples.PUBLIC:
    with pytest.raises(ValueError, match=f'none is no {name}: it has no '):
      examples.public(name, 'none')
