"""The tables of Leviathan et al. and of Sun et al., on a pair whose drafter is
its target, so that everything is known."""

import json
import pathlib
import types
import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest

from experiments import plots, report, results
from experiments.leviathan2023 import __main__ as leviathan2023
from experiments.leviathan2023 import (
  adaptive,
  figures,
  measured,
  pairs,
  paper,
  predictions,
  tables,
)
from experiments.leviathan2023.measured import Settings
from experiments.leviathan2023.timed import Sweep, Timed
from experiments.sun2024 import tables as sun2024
from specdec_jax.assembly import rules
from specdec_jax.launch import compilation_cache
from specdec_jax.models import presets
from specdec_jax.theory.costs import Costs
from tests.experiments.tiny import TINY

pytest.importorskip('tokenizers')
SETTINGS = Settings(
  num_alpha=3, num_timed=2, repeats=1, max_gamma=4, batch_size=3
)


@pytest.fixture(scope='module')
def task(tmp_path_factory):
  """A test file, and beside it the text that n-grams are counted in."""
  folder = tmp_path_factory.mktemp('corpus')
  lines = [
    json.dumps({'inputs': f'number {i}', 'targets': f'Nummer {i}'})
    for i in range(4)
  ]
  for name in ('test', 'train'):
    (folder / f'{name}.jsonl').write_text('\n'.join(lines) + '\n')
  return folder / 'test.jsonl'


@pytest.fixture
def argv(task, tmp_path, monkeypatch):
  """Arguments for a pair of one model twice."""
  monkeypatch.setitem(presets.PRESETS, 'tiny', TINY)
  monkeypatch.setattr(compilation_cache, 'enable', lambda: None)
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  yield [
    f'--pair=ende:random:tiny:random:tiny:{task}',
    f'--output={tmp_path}',
    '--batch_size=3',
    # Random weights are others in another dtype.
    *('--dtype=float32', '--plain_dtypes=float32'),
  ]
  jax.config.update('jax_disable_most_optimizations', before)


def test_the_papers_tables_follow_from_theory():
  rows = tables.table_1([], SETTINGS, None).rows
  assert len(rows) == 6
  for row in rows:
    for column in ('operations', 'speed'):
      assert f'{row[column]:.2f} (P)' == row[f'paper: {column}']
  rows = tables.table_4([], SETTINGS, None).rows
  assert len(rows) == 12
  for row, theirs in zip(rows, paper.TABLE_4, strict=True):
    assert abs(row['expected'] - theirs.expected) < 0.07
    assert row['empirical'] == ''


@pytest.mark.slow
def test_alpha_of_one_model_twice(argv, tmp_path, capsys, monkeypatch):
  # A program to compile for each of them.
  monkeypatch.setattr(pairs, 'DRAFTERS', (pairs.BIGRAM, pairs.TRAINED))
  options = ('--num_alpha=3', '--num_timed=2', '--tables=3')
  status = leviathan2023.main([*argv, *options])
  assert status == 0, capsys.readouterr().err
  written = json.loads((tmp_path / 'table_3.json').read_text())
  bigram, trained = written['rows']
  assert trained['drafter'] == 'random:tiny'
  assert [trained['T = 0'], trained['T = 1']] == pytest.approx([1, 1])
  assert trained['paper: T = 0'].startswith('T5-small 0.75')
  assert trained['paper: T = 0'].endswith('(P)')
  assert bigram['T = 1'] < 0.9
  assert written['command'].startswith('python -m experiments.leviathan2023 ')
  assert str(tmp_path.parent) not in json.dumps(written)
  assert '| T = 0, 95% |' in (tmp_path / 'table_3.md').read_text()


@pytest.mark.slow
def test_a_sweep_of_one_model_twice(argv, task):
  pair = pairs.load(f'ende:random:tiny:random:tiny:{task}', task.parent, 0)
  found = measured.sweep(pair, 0.0, SETTINGS, (2,))
  # 64 tokens a text, and all drafts pass.
  assert found.plain.lengths == found.fixed[2].lengths == (64, 64)
  assert found.plain.tokens_per_run == 1
  assert found.fixed[2].num_runs == 2 * 22
  assert found.fixed[2].speedups(found.plain).shape == (1,)
  assert found.fixed[2].whole_speedup(found.plain) > 0


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_drafts_are_of_the_draft_vocabulary(task, temperature):
  """Which ende-nano has: its weights are cut to it first."""
  pair = pairs.load(f'ende:::{task}', task.parent, 0)
  [[found]] = measured._overlaps(pair, [pairs.TRAINED], temperature, SETTINGS)
  assert found.values[found.is_text].mean() > 0.2


def test_block_verification_is_compared_on_the_same_examples(monkeypatch):
  toy = sun2024.toy().rows
  assert [row['accepted'] for row in toy] == ['1.1111', '1.2222']
  counts = {
    rules.SpeculativeSampling(): ([30.0, 30.0], [10.0, 14.0]),
    rules.Block(): ([33.0, 33.0], [10.0, 12.0]),
  }

  def decode(pair, gamma, rule, num_examples, batch_size):
    return tuple(map(np.array, counts[rule]))

  monkeypatch.setattr(sun2024, '_decode', decode)
  kind = types.SimpleNamespace(corpus='c', paper='EnDe')
  pair = types.SimpleNamespace(name='ende', kind=kind, names='a with b')
  made = sun2024.tokens_per_run(
    [pair], gammas=[4], num_examples=2, batch_size=2
  )
  [row] = made.rows
  assert (row['token'], row['block']) == (2.5, 3.0)
  assert row['gain'] == '+20.0%'
  # Both intervals are in it: of 2.5, by hand, half is 1.96 sqrt(2 * 50) / 24.
  token = 1.96 * 10 / 24 / 2.5
  block = 1.96 * np.sqrt(2 * 18) / 22 / 3
  end = 1.2 * np.exp(np.hypot(token, block)) - 1
  assert row['gain, 95%'].endswith(f'to {end:+.1%}')
  assert row['token, 95%'] == f'{2.5 - 19.6 / 24:.3f} to {2.5 + 19.6 / 24:.3f}'


@pytest.fixture
def by_hand(monkeypatch):
  """Costs, acceptance and counters that can be followed by hand."""
  parts = Costs(
    widths=[1, 3, 5],
    target_seconds=[1.0, 1.2, 1.4],
    first_draft_seconds=0.1,
    draft_seconds=0.1,
    launch_seconds=2.0,
    plain_launch_seconds=1.0,
  )

  def timed(num_runs, num_drafted, seconds, launch=2.0, held_up=9):
    """In the middle turn; in the others one of both texts is held up."""
    each = seconds / 2 + launch
    late = held_up * each
    return Timed(
      turns=np.array([[each, late], [each, each], [late, each]]),
      launch_seconds=launch,
      prefill_seconds=0.0,
      lengths=(60, 60),
      num_runs=num_runs,
      num_drafted=num_drafted,
    )

  found = Sweep(
    plain=timed(120, 0, 120.0, launch=1.0, held_up=5),
    fixed={
      2: timed(60, 120, 84.0),
      3: timed(48, 144, 78.0),
      4: timed(40, 160, 80.0),
    },
    adaptive={('threshold 0.3', 4): timed(40, 100, 66.0)},
  )
  monkeypatch.setattr(measured, 'costs', lambda *_: parts)
  monkeypatch.setattr(measured, 'acceptance', lambda *_: {'alpha': 0.75})
  texts = [np.full(60, 0.75)] * 2
  monkeypatch.setattr(measured, 'texts', lambda *_: texts)
  monkeypatch.setattr(measured, 'whole_sweep', lambda *_: found)
  return found


def test_thresholds_are_compared_by_tokens_per_cost(by_hand):
  pair = types.SimpleNamespace(name='ende')
  rows, note = adaptive.compare(pair, SETTINGS, by_hand)
  assert [row['gamma'] for row in rows] == [
    *('fixed 4', 'threshold 0.3, at most 4', 'oracle')
  ]
  fixed, varying, oracle = (row["tokens per cost, paper's"] for row in rows)
  assert fixed == pytest.approx(120 / (40 + 16))
  assert varying == pytest.approx(120 / (40 + 10))
  assert oracle == pytest.approx(1 / (0.25 + 0.075))
  assert rows[1]['tokens per cost, measured'] == pytest.approx(120 / (56 + 10))
  assert "at the paper's costs the best threshold" in note
  assert '+12.0%' in note


def test_predictions_stand_beside_what_was_measured(
  by_hand, tmp_path, monkeypatch
):
  pytest.importorskip('matplotlib')
  drawn, save = [], plots.save
  monkeypatch.setattr(
    plots,
    'save',
    lambda figure, path: drawn.append(figure) or save(figure, path),
  )
  kind = types.SimpleNamespace(corpus='c', paper='EnDe')
  pair = types.SimpleNamespace(name='ende', kind=kind, names='a with b')
  made = predictions.table([pair], SETTINGS, tmp_path)
  two, _, four = made.rows
  assert (two['gamma'], two['ms per run'], two['its parts']) == (
    *(2, pytest.approx(1400), pytest.approx(1400)),
  )
  assert four['run / parts'] == pytest.approx(2.0 / 1.8)
  assert two['measured'] == pytest.approx(122 / 88)
  # 1 + .75 + .75^2 tokens per run for 1.4 plain steps, but for the last blocks
  # and for two units a text instead of one.
  runs = 2 * 60 / 2.3125
  assert 0.95 < two['predicted'] / (122 / (1.4 * runs + 4)) < 1
  assert 'the planned gamma is 3, with speed 1.49' in made.notes[0]
  assert made.figures == ['speedup_by_gamma.svg']
  ElementTree.parse(tmp_path / made.figures[0])
  # The figure has the points and the ranges of the table.
  [[axes]] = [figure.axes for figure in drawn]
  points = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
  [bars] = axes.collections
  for row, point, bar in zip(
    made.rows, points['ende, measured'], bars.get_segments(), strict=True
  ):
    assert point.tolist() == [row['gamma'], pytest.approx(row['measured'])]
    low, high = bar[:, 1]
    assert row['range'] == f'{low:.2f} to {high:.2f}'


def test_figures_without_a_pair_are_those_of_theory(tmp_path):
  pytest.importorskip('matplotlib')
  drawn = figures.draw([], None, tmp_path)
  assert drawn['figures'] == ['figure_2.svg', 'figure_3.svg', 'figure_4.svg']
  for name in drawn['figures']:
    ElementTree.parse(tmp_path / name)


@pytest.mark.parametrize(
  ('pair', 'words'),
  [
    ('nobody', 'KIND one of'),
    ('ende:a:b:c:d', 'KIND:TARGET'),
    ('lm:random:tiny:random:tiny:{task}', 'decoder-only'),
    ('ende:random:tiny:random:tiny:none.jsonl', 'no file none.jsonl'),
    ('ende:random:nobody::{task}', "unknown preset 'nobody'"),
  ],
)
def test_a_wrong_pair_gets_one_sentence(argv, task, capsys, pair, words):
  pair = pair.format(task=task)
  assert leviathan2023.main([*argv[1:], f'--pair={pair}', '--tables=3']) == 2
  error = capsys.readouterr().err
  assert error.startswith('leviathan2023: error: ')
  assert words in error
  assert error.count('\n') == 1


def test_the_page_has_every_table_with_its_command(tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '')
  assert 'XLA_FLAGS' not in report.header('experiments.sun2024', [], 0.0)
  monkeypatch.setenv('XLA_FLAGS', ' --xla_flag=1')
  header = report.header('experiments.sun2024', ['--task=/a/b/c.jsonl'], 0.0)
  assert header['command'].endswith('--task=.../b/c.jsonl')
  folder = tmp_path / 'leviathan2023' / 'results'
  for number, place in ((2, folder), (1, folder), (3, folder / 'float32')):
    report.write(
      place,
      f'table_{number}',
      title=f'Table {number}',
      header=header,
      table=report.Table(
        rows=[{'a': 1.234, 'b': None}], figures=['f.svg'], notes=['So.']
      ),
    )
  page = results.page(tmp_path)
  assert page.index('### Table 1') < page.index('### Table 2')
  apart = page.index('speculative decoding, float32\n')
  assert page.index('### Table 2') < apart < page.index('### Table 3')
  assert page.count('- command: `python -m experiments.sun2024') == 3
  assert '| 1.23 |  |' in page
  assert '](leviathan2023/results/f.svg)' in page
  assert '](leviathan2023/results/float32/f.svg)' in page
  assert '- date: 1970-01-01' in page
  assert '- XLA_FLAGS: --xla_flag=1\n' in page
  assert 'Xia' not in page.split('\n## ')[1]


def test_figure_1_is_a_readable_text_of_few_iterations():
  folder = pathlib.Path(figures.__file__).parent / 'results'
  written = json.loads((folder / 'figures.json').read_text())
  root = ElementTree.parse(folder / written['figures'][0]).getroot()
  name = root.tag.removesuffix('svg')
  # The table says of the figure what the figure says of itself.
  total = root.find(f'{name}title').text.partition(': ')[2]
  assert written['rows'][0]['what'] == f'a trace: {total}'
  groups = [group.get('class') for group in root.iter(f'{name}g')]
  assert 8 <= groups.count('line') <= 14
  words = root.find(f'{name}desc').text.removesuffix('</s>').split()
  assert len(words) > 12
  # It repeats no three words.
  threes = list(zip(words, words[1:], words[2:], strict=False))
  assert len(set(threes)) == len(threes)


@pytest.mark.slow
def test_the_trace_of_figure_1_decodes_its_text(argv, task):
  pair = pairs.load(f'ende:random:tiny:random:tiny:{task}', task.parent, 0)
  traced = figures.trace_of(pair)
  assert traced.header['gamma'] == figures.GAMMA
  assert traced.header['drafter'] == 'random:tiny'
  assert traced.prompts[0]['text'].startswith('Select the printer ')
  # The drafter is the target: all drafts pass.
  assert traced.summarize().alpha == 1
  assert traced.summary['num_tokens'] == 64


def test_a_timeline_lays_segments_end_to_end():
  pytest.importorskip('matplotlib')
  lanes = {
    'plain': [figures.Segment('target', 0.002)] * 2,
    'gamma 1': [
      figures.Segment('encoder', 0.001),
      figures.Segment('draft', 0.0005),
    ],
  }
  [axes] = figures.timeline(lanes).axes
  boxes = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
  np.testing.assert_allclose(boxes, [(0, 2), (2, 2), (0, 1), (1, 0.5)])
