"""`specdec infer` with samples, beams and scores of given targets."""

import json

import numpy as np
import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from specdec_jax.infer import output
from specdec_jax.text import vocabulary_files
from tests.checkpoints import tiny_t5
from tests.checkpoints.tiny_t5 import T5X
from tests.cli.tiny import assert_refused
from tests.infer.infer_runs import argv, gin_file, records

LENGTHS = {'TASK_FEATURE_LENGTHS': "{'inputs': 16, 'targets': 16}"}
SAMPLES = {'Decoding__temperature': 1.0, 'Decoding__num_samples': 3}
RULE = gin_file('verification/top_beta.gin')
BEAMS = {'Decoding__num_decodes': 4, 'Decoding__return_all_decodes': True}
SCORE = {'infer__mode': "'score'"}
WAYS = {'samples': SAMPLES, 'beams': BEAMS, 'score': SCORE}


@pytest.fixture(scope='session')
def t5(tmp_path_factory):
  return tiny_t5.write_model(tmp_path_factory.mktemp('scored_t5'))


@pytest.fixture(scope='session')
def golden():
  return np.load(T5X / 'golden_encdec.npz')


def text_of(row) -> str:
  vocabulary = vocabulary_files.read(T5X / 'tiny_sp.model')
  return vocabulary.decode([int(i) for i in row if i > 1])


@pytest.fixture(scope='session')
def task(tmp_path_factory, golden):
  """The golden batch as texts."""
  path = tmp_path_factory.mktemp('golden') / 'task.jsonl'
  inputs, targets = (
    [text_of(row) for row in golden[name]]
    for name in ('encoder_input_tokens', 'decoder_target_tokens')
  )
  with path.open('w') as file:
    for pair in zip(inputs, targets, strict=True):
      example = dict(zip(('inputs', 'targets'), pair, strict=True))
      file.write(json.dumps(example) + '\n')
  return path


@pytest.fixture
def infer(run, t5, task, tmp_path):
  """Runs it with bindings; the lines, by default of a new folder."""

  def call(*flags, folder=None, **bindings):
    out = tmp_path / (folder or f'out{len(list(tmp_path.iterdir()))}')
    done = run(*argv(t5, task, out, *flags, **LENGTHS | bindings))
    assert done.status == 0, done
    (found,) = out.glob('*.jsonl-00000-of-00001')
    return found

  return call


def test_beams_and_their_scores_are_those_of_t5x(infer, golden):
  path = infer(**BEAMS, infer__mode="'predict_with_aux'")
  assert path.name == 'task-predict_with_aux.jsonl-00000-of-00001'
  lines = records(path)
  expected = [[text_of(beam) for beam in row] for row in golden['beam4']]
  assert [line['prediction'] for line in lines] == expected
  np.testing.assert_allclose(
    [line['aux']['scores'] for line in lines],
    golden['beam4_scores'],
    rtol=0,
    atol=1e-4,
  )
  num_tokens = (golden['beam4'] > 0).sum(axis=2).tolist()
  assert [line['aux']['tokens'] for line in lines] == num_tokens
  assert {end for line in lines for end in line['aux']['end']} == {'eos'}
  best = records(infer(Decoding__num_decodes=4))
  assert [line['prediction'] for line in best] == [row[-1] for row in expected]
  assert [line['aux']['scores'] for line in best] == [
    line['aux']['scores'][-1] for line in lines
  ]


@pytest.mark.slow
def test_a_drafter_changes_no_beam_and_saves_target_runs(infer, t5):
  """The target drafts for itself, and what it reads is copied."""
  own = {'DRAFTER_CHECKPOINT_PATH': repr(str(t5))}
  plain = records(infer(**BEAMS))
  width = {
    'Decoding__draft_width': 4,
    'drafters__DraftModel__gamma': 4,
  }
  drafted = records(
    infer(gin_file('drafters/model.gin'), **BEAMS, **own, **width)
  )
  lookup = {'drafters__PromptLookup__gamma': 8}
  copied = records(
    infer(gin_file('drafters/prompt_lookup.gin'), **BEAMS, **lookup)
  )
  of_all = lambda name: [
    [line['aux'].pop(name) for line in lines]
    for lines in (plain, drafted, copied)
  ]
  scores, runs = of_all('scores'), of_all('target_runs')
  assert drafted == copied == plain
  np.testing.assert_allclose(scores, [scores[0]] * 3, rtol=0, atol=2e-4)
  assert runs[1] == [-(-count // 5) for count in runs[0]]
  assert all(a <= b for a, b in zip(runs[2], runs[0], strict=True))


def test_scores_of_targets_are_those_of_t5x(infer, golden):
  path = infer(**SCORE)
  assert path.name == 'task-score.jsonl-00000-of-00001'
  lines = records(path)
  np.testing.assert_allclose(
    [line['score'] for line in lines], golden['score'], rtol=0, atol=1e-4
  )
  num_tokens = golden['decoder_loss_weights'].sum(axis=1).tolist()
  assert [line['aux']['tokens'] for line in lines] == num_tokens
  assert set(lines[0]) == {'inputs', 'score', 'aux'}


@pytest.mark.slow
def test_samples_are_rows_of_their_own(infer):
  """Sample i of example j has the random stream of row 3 j + i."""
  lines = records(infer(**SAMPLES))
  scores = [line['aux']['scores'] for line in lines]
  assert scores == [sorted(each) for each in scores]
  assert scores == [line['aux']['log_prob'] for line in lines]
  assert {len(line['prediction']) for line in lines} == {3}
  assert any(len({*line['prediction']}) == 3 for line in lines)
  narrow = {'Decoding__batch_size': 2, 'Decoding__refill_size': 1}
  assert records(infer(**SAMPLES | narrow)) == lines
  alone = {'Decoding__temperature': 1.0, 'infer__mode': "'predict_with_aux'"}
  single = records(infer(**alone))
  # Row 0 is the first sample of example 0 in both.
  assert single[0]['prediction'] in lines[0]['prediction']
  assert single[0]['aux']['scores'] == single[0]['aux']['log_prob']


@pytest.mark.slow
@pytest.mark.parametrize('way', WAYS)
def test_a_restart_and_shards_give_the_same_bytes(
  way, infer, run, t5, task, tmp_path, monkeypatch
):
  bindings = WAYS[way]
  whole = infer(**bindings)
  write_chunk, written = output.write_chunk, []

  def write(shard, index, *rest):
    if written:
      raise KeyboardInterrupt
    written.append(index)
    return write_chunk(shard, index, *rest)

  with monkeypatch.context() as patch:
    patch.setattr(output, 'write_chunk', write)
    flags = argv(t5, task, tmp_path / 'killed', **LENGTHS | bindings)
    assert run(*flags).status == 130
  assert written == [0]
  again = infer(folder='killed', **bindings)
  assert again.read_bytes() == whole.read_bytes()
  for shard_id in (0, 1):
    infer_flags = argv(
      t5,
      task,
      tmp_path / 'shards',
      f'--shard_id={shard_id}',
      **LENGTHS | bindings,
      infer__num_shards=2,
    )
    assert run(*infer_flags).status == 0
  assert run('merge', tmp_path / 'shards').status == 0
  merged = tmp_path / 'shards' / whole.name
  assert merged.read_bytes() == whole.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize('way', ['beams', 'score'])
def test_a_mesh_changes_nothing(way, infer):
  mesh = {'device_mesh__num_devices': 'None', 'device_mesh__num_partitions': 2}
  split, alone = (records(infer(**WAYS[way], **more)) for more in (mesh, {}))
  scores = lambda line: line.pop('score', None) or line['aux'].pop('scores')
  np.testing.assert_allclose(
    [scores(line) for line in split],
    [scores(line) for line in alone],
    rtol=0,
    atol=2e-4,
  )
  assert split == alone


def test_decoded_targets_score_what_decoding_said(run, model, tmp_path):
  """Of a decoder-only model, behind prompts of different lengths."""
  lengths = {'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 12}"}
  prompts = tmp_path / 'prompts.jsonl'
  texts = ['the in ' * i + 'ab' for i in range(1, 5)]
  prompts.write_text(''.join(json.dumps({'inputs': t}) + '\n' for t in texts))
  assert run(*argv(model, prompts, tmp_path / 'a', **lengths)).status == 0
  decoded = records(tmp_path / 'a' / 'prompts-predict.jsonl-00000-of-00001')
  task = tmp_path / 'task.jsonl'
  with task.open('w') as file:
    for text, line in zip(texts, decoded, strict=True):
      pair = {'inputs': text, 'targets': line['prediction']}
      file.write(json.dumps(pair) + '\n')
  # The text lacks the EOS that its score counts.
  more = {'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 13}"}
  assert run(*argv(model, task, tmp_path / 'b', **more, **SCORE)).status == 0
  scored = records(tmp_path / 'b' / 'task-score.jsonl-00000-of-00001')
  assert [line['aux']['end'] for line in scored] == ['eos'] * 4
  assert all(
    line['score'] < before['aux']['log_prob']
    for line, before in zip(scored, decoded, strict=True)
  )


@pytest.mark.parametrize(
  ('flags', 'bindings', 'parts'),
  [
    ((), {'infer__mode': "'predict_all'"}, ['predict_all', 'score']),
    ((), {'Decoding__num_samples': 0}, ['num_samples', 'got 0']),
    ((), {'Decoding__num_samples': 2}, ['num_samples 2 at temperature 0']),
    ((), BEAMS | {'Decoding__temperature': 1.0}, ['temperature 1.0']),
    ((), BEAMS | {'Decoding__alpha': -1.0}, ['alpha', '-1.0']),
    ((), {'Decoding__return_all_decodes': True}, ['give num_decodes']),
    ((gin_file('drafters/uniform.gin'),), BEAMS, ['beam search', 'Uniform']),
    ((), {'Decoding__draft_width': 8}, ['draft_width 8', 'num_decodes']),
    ((), BEAMS | {'Decoding__draft_width': 8}, ['draft_width 8', 'NoDrafter']),
    ((), {'Decoding__alpha': 0.7}, ['alpha 0.7', 'num_decodes']),
    ((), BEAMS | {'Decoding__refill_size': 2}, ['refill_size 2', 'beam']),
    ((RULE,), BEAMS, ['make_rule TopBeta', 'beam']),
    ((RULE,), SCORE, ['make_rule TopBeta', 'score']),
    ((), SCORE | {'Decoding__temperature': 1.0}, ['temperature 1.0', 'score']),
    ((), SCORE | {'Decoding__min_new_tokens': 2}, ['new_tokens 2', 'score']),
    ((), SCORE | BEAMS, ['num_decodes 4', 'score']),
    (
      (gin_file('drafters/prompt_lookup.gin'),),
      BEAMS | {'drafters.PromptLookup__num_continuations': 2},
      ['gamma as a number', 'beams'],
    ),
    ((gin_file('drafters/uniform.gin'),), SCORE, ['score', 'Uniform']),
  ],
)
def test_what_does_not_go_together(
  run, t5, task, tmp_path, flags, bindings, parts
):
  command = argv(t5, task, tmp_path / 'out', *flags, **LENGTHS | bindings)
  assert_refused(run(*command), *parts)


def test_targets_have_to_be_there(run, t5, tmp_path):
  task = tmp_path / 'task.txt'
  task.write_text('two dogs\n')
  refused = run(*argv(t5, task, tmp_path / 'out', **LENGTHS | SCORE))
  assert_refused(refused, 'example 1 has no targets', "mode 'score'")


def test_a_dry_run_counts_the_caches_of_beams(run, t5, task, tmp_path):
  sizes = []
  # Caches have 128 entries, and 512: nothing is rounded up.
  lengths = {'TASK_FEATURE_LENGTHS': "{'inputs': 128, 'targets': 126}"}
  for bindings in ({}, BEAMS):
    flags = argv(t5, task, tmp_path, '--dry_run', **lengths | bindings)
    done = run(*flags)
    assert done.status == 0, done
    (line,) = [x for x in done.out.splitlines() if 'caches and state' in x]
    sizes.append(int(line.split('│')[2].replace(',', '')))
  # Four entries for each new token, and the encoder's keys once.
  assert 2.4 < sizes[1] / sizes[0] < 2.6
