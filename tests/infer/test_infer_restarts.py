"""`specdec infer` goes on where it was, and repeats nothing that is done."""

import dataclasses
import json
import shutil

import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from sentencepiece import sentencepiece_model_pb2

from specdec_jax.assembly import gamma_memory
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.checkpoints import t5x
from specdec_jax.infer import output
from specdec_jax.infer import records as infer_records
from specdec_jax.measure import gamma_trials
from specdec_jax.text import vocabulary_files
from tests.checkpoints.tiny_t5 import T5X_CONFIG, make_params
from tests.cli.tiny import assert_refused
from tests.infer import infer_runs
from tests.infer.infer_runs import argv, gin_file, predictions, records, result


def test_a_finished_run_is_not_repeated(once, run, t5, task):
  before = result(once[0]).stat().st_mtime_ns
  again = run(*argv(t5, task, once[0]))
  assert again.status == 0
  assert 'is complete already' in again.err
  assert result(once[0]).stat().st_mtime_ns == before
  lines = task.read_text()
  try:
    task.write_text(lines + lines.splitlines(keepends=True)[0])
    refused = run(*argv(t5, task, once[0]))
    assert_refused(refused, str(result(once[0])), 'other examples')
  finally:
    task.write_text(lines)
  # So are what is stated beside the weights, and the sizes.
  stated = t5 / 'generation_config.json'
  try:
    stated.write_text('{"min_new_tokens": 5}')
    refused = run(*argv(t5, task, once[0]))
    assert_refused(refused, 'digest of sizes and sampling')
  finally:
    stated.unlink()
  # And the vocabulary, also in a piece that no example has.
  words = t5 / vocabulary_files.SENTENCEPIECE
  before = words.read_bytes()
  model = sentencepiece_model_pb2.ModelProto.FromString(before)
  model.pieces[-1].piece += '_'
  try:
    words.write_bytes(model.SerializeToString())
    refused = run(*argv(t5, task, once[0]))
    assert_refused(refused, 'digest of the vocabulary')
  finally:
    words.write_bytes(before)


@pytest.mark.slow
def test_a_run_that_failed_before_its_first_result(run, t5, task, tmp_path):
  bindings = {'device_mesh__num_devices': 8, 'Decoding__batch_size': 9}
  assert_refused(run(*argv(t5, task, tmp_path, **bindings)), 'batch of 9')
  task = tmp_path / 'task.jsonl'
  infer_runs.write_task(task, 1)
  assert run(*argv(t5, task, tmp_path)).status == 0


def test_an_interrupted_run_goes_on_where_it_was(
  once, run, t5, task, tmp_path, monkeypatch
):
  written = []
  write_chunk = output.write_chunk

  def write(shard, index, *rest):
    if len(written) == 2:
      written.clear()
      raise KeyboardInterrupt
    written.append(index)
    return write_chunk(shard, index, *rest)

  monkeypatch.setattr(output, 'write_chunk', write)
  assert run(*argv(t5, task, tmp_path)).status == 130
  assert not result(tmp_path).exists()
  refused = run(*argv(t5, task, tmp_path, Decoding__seed=3))
  assert_refused(refused, 'Decoding.seed was 0, now 3')

  lines = task.read_text().splitlines(keepends=True)
  try:
    task.write_text(''.join(lines[::-1]))
    refused = run(*argv(t5, task, tmp_path))
    assert_refused(refused, 'chunk00000', 'other examples')
  finally:
    task.write_text(''.join(lines))

  weights, before = t5 / 'checkpoint_7', tmp_path / 'before'
  weights.rename(before)
  t5x.write_target(t5, make_params(T5X_CONFIG), step=7)
  try:
    refused = run(*argv(t5, task, tmp_path))
    assert_refused(refused, "target's weights was")
  finally:
    shutil.rmtree(weights)
    before.rename(weights)

  # The folder may be another one by now.
  moved = tmp_path.rename(tmp_path.with_name('moved'))
  monkeypatch.setattr(
    output,
    'write_chunk',
    lambda shard, index, *rest: (
      written.append(index) or write_chunk(shard, index, *rest)
    ),
  )
  assert run(*argv(t5, task, moved)).status == 0
  assert written == [2, 3, 4, 5]
  assert result(moved).read_bytes() == result(once[0]).read_bytes()


def test_results_without_settings_are_left_alone(run, t5, task, tmp_path):
  folder = tmp_path / 'tmp-task-predict-00000-of-00001'
  folder.mkdir()
  chunk = folder / 'task-predict.jsonl-00000-of-00001-chunk00000'
  chunk.write_text('{}\n')
  mark = {'examples': 1, 'examples_digest': '0'}
  chunk.with_name(f'{chunk.name}.COMPLETED').write_text(json.dumps(mark))
  assert_refused(run(*argv(t5, task, tmp_path)), 'settings.json')
  assert chunk.read_text() == '{}\n'


@pytest.mark.slow
@pytest.mark.parametrize('forgets', [False, True])
def test_what_a_run_copies_does_not_depend_on_restarts(
  forgets, run, t5, task, tmp_path, monkeypatch
):
  """At temperature 1, where tokens do depend on what is drafted. The control
  forgets the two chunks that came before it was interrupted."""
  lines = task.read_text().splitlines(keepends=True)[:8]
  copied = tmp_path / 'task.jsonl'
  copied.write_text(''.join(lines * 4))
  flags = lambda out: argv(
    t5,
    copied,
    tmp_path / out,
    gin_file('drafters/suffix.gin'),
    Decoding__temperature=1.0,
    drafters__Suffix__gamma=8,
    drafters__Suffix__pool_size=300,
  )
  assert run(*flags('whole')).status == 0
  write_chunk = output.write_chunk

  def write(shard, index, *rest):
    if index == 2:
      raise KeyboardInterrupt
    return write_chunk(shard, index, *rest)

  with monkeypatch.context() as patch:
    patch.setattr(output, 'write_chunk', write)
    assert run(*flags('resumed')).status == 130
  if forgets:
    texts = infer_records.texts
    forget = lambda rows, *rest: (
      texts(rows, *rest) if rows[0].index > 15 else []
    )
    monkeypatch.setattr(infer_records, 'texts', forget)
  assert run(*flags('resumed')).status == 0
  whole, resumed = (result(tmp_path / out) for out in ('whole', 'resumed'))
  assert (resumed.read_bytes() != whole.read_bytes()) == forgets
  # Later chunks copy what the first, of the same inputs, had to find out.
  drafted = [line['aux']['drafted'] for line in records(whole)]
  assert sum(drafted[8:]) / 3 > 1.5 * sum(drafted[:8])


@pytest.mark.slow
def test_a_gamma_that_nobody_gives(run, t5, task, tmp_path, monkeypatch):
  """Plain where nothing is remembered; measured before the job if that is asked
  for, and remembered by later ones. Tokens are sampled, and differ between
  gammas."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))

  def lines(out, *flags, drafter='uniform', **more):
    usual = {'Decoding__temperature': 1.0, 'Decoding__batch_size': 4}
    drafter = gin_file(f'drafters/{drafter}.gin')
    done = run(*argv(t5, task, tmp_path / out, drafter, **usual | more), *flags)
    assert done.status == 0, done
    return predictions(result(tmp_path / out)), done.err

  programs = lambda: {*(tmp_path / 'specdec_jax' / 'compiled').iterdir()}
  plain, _ = lines('none', drafter='none')
  compiled = programs()
  found, told = lines('unknown')
  assert found == plain
  # It runs the very programs of a plain job, and no other.
  assert compiled
  assert programs() == compiled
  assert 'specdec: plain decoding: no gamma was measured' in told

  given, _ = lines('given', drafters__Uniform__gamma=3)
  assert given != plain
  real = gamma_trials.choose
  monkeypatch.setattr(
    gamma_trials,
    'choose',
    lambda *args: dataclasses.replace(real(*args), gamma=3),
  )
  found, told = lines('measured', '--measure_gamma')
  assert found == given
  assert 'specdec: gamma 3: measure_gamma chose 3 on 20' in told
  found, told = lines('later')
  assert found == given
  assert 'specdec: gamma 3: measure_gamma chose 3 on 20' in told


@pytest.mark.slow
def test_a_restart_goes_on_with_the_gamma_of_the_chunks_before(
  run, t5, task, tmp_path, monkeypatch
):
  """Whatever was measured since."""
  choices = [RememberedGamma(gamma=gamma, source='bench') for gamma in (3, 0)]
  monkeypatch.setattr(gamma_memory, 'recall', lambda where: choices[0])
  usual = {'Decoding__temperature': 1.0, 'infer__checkpoint_period': 1}
  drafter = gin_file('drafters/uniform.gin')
  whole = argv(t5, task, tmp_path / 'whole', drafter, **usual)
  assert run(*whole).status == 0
  write_chunk = output.write_chunk

  def write(shard, index, *args):
    if index:
      raise KeyboardInterrupt
    return write_chunk(shard, index, *args)

  flags = argv(t5, task, tmp_path / 'again', drafter, **usual)
  with monkeypatch.context() as context:
    context.setattr(output, 'write_chunk', write)
    assert run(*flags).status == 130
  monkeypatch.setattr(gamma_memory, 'recall', lambda where: choices[1])
  done = run(*flags)
  assert 'specdec: gamma 3, as in the chunks before' in done.err
  texts = [predictions(result(tmp_path / out)) for out in ('whole', 'again')]
  assert texts[0] == texts[1]
