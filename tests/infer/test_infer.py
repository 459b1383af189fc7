"""`specdec infer` and `merge`, on T5X's own tiny checkpoint."""

import dataclasses
import functools
import json
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from sentencepiece import sentencepiece_model_pb2

from specdec_jax.assembly import gamma_memory
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.base import Params
from specdec_jax.checkpoints import loading, orbax, t5x
from specdec_jax.decoding import autoregressive
from specdec_jax.decoding.method import Method
from specdec_jax.infer import examples, infer, output, strategies
from specdec_jax.infer import records as infer_records
from specdec_jax.infer.decoding import Decoding
from specdec_jax.infer.examples import Layout
from specdec_jax.launch import gin_launch
from specdec_jax.measure import gamma_trials
from specdec_jax.models import families, presets
from specdec_jax.sampling import logits
from specdec_jax.text import tasks, vocabulary_files
from tests.checkpoints import tiny_t5
from tests.checkpoints.tiny_t5 import T5X_CONFIG, make_config, make_params
from tests.cli import tiny
from tests.cli.tiny import assert_refused
from tests.infer import infer_runs
from tests.infer.infer_runs import argv, gin_file, predictions, records, result

NUM_EXAMPLES = 44


@pytest.fixture(scope='session')
def t5(tmp_path_factory):
  return tiny_t5.write_model(tmp_path_factory.mktemp('t5'))


@pytest.fixture(scope='session')
def task(tmp_path_factory):
  path = tmp_path_factory.mktemp('task') / 'task.jsonl'
  infer_runs.write_task(path, NUM_EXAMPLES)
  return path


@pytest.fixture(scope='session')
def finished(tmp_path_factory):
  """The output folder of an uninterrupted run, and what it said; see `once`."""
  return tmp_path_factory.mktemp('finished') / 'out', {}


@pytest.fixture
def once(run, t5, task, finished):
  """Runs it once for all tests; the output folder and the result."""
  out, results = finished
  if not results:
    results['result'] = run(*argv(t5, task, out))
  return out, results['result']


def test_lines_are_those_of_t5x(once, task):
  out, outcome = once
  assert outcome.status == 0, outcome
  lines = records(result(out))
  examples = records(task)
  assert [line['inputs'] for line in lines] == [
    {
      'inputs_pretokenized': example['inputs'],
      'targets_pretokenized': example['targets'],
    }
    for example in examples
  ]
  assert set(lines[0]) == {'inputs', 'prediction', 'aux'}
  assert lines[0]['aux']['target_runs'] == lines[0]['aux']['tokens'] > 0
  assert {line['aux']['end'] for line in lines} == {'eos', 'length'}
  assert not list(out.glob('tmp-*'))
  assert (out / 'config.gin').read_text().count('\ninfer.infer.')


def test_predictions_are_those_of_plain_decoding(once, t5, task):
  model = loading.load(str(t5))
  layout = Layout(
    config=model.config,
    vocabulary=model.vocabulary,
    inputs_length=12,
    targets_length=16,
  )
  source = tasks.find(str(task))
  rows = list(examples.encode(source, layout, 0, 1))
  prompt = jax.tree.map(jnp.asarray, examples.packer(layout)(rows))
  decode = functools.partial(
    autoregressive.generate,
    method=Method(
      target=families.language_model(model.config),
      logits_to_probs=logits.standardize(temperature=0, vocab_size=85),
      eos_id=1,
    ),
    max_len=17,
  )
  output = jax.jit(decode)(
    Params(target=model.params), jax.random.key(0), prompt
  )
  expected = [
    model.vocabulary.decode([int(token) for token in row if token > 1])
    for row in output.tokens
  ]
  assert predictions(result(once[0])) == expected


def test_inputs_that_were_trimmed_are_counted(once, t5, task):
  vocabulary = loading.load(str(t5)).vocabulary
  lengths = [len(vocabulary.encode(each['inputs'])) for each in records(task)]
  cuts = [length - 12 for length in lengths if length > 12]
  assert cuts
  assert f'{len(cuts)} of {NUM_EXAMPLES} inputs' in once[1].err
  assert f'{sum(cuts)} tokens' in once[1].err


def test_inputs_of_their_own_tokens_are_trimmed_as_t5x_does(t5):
  """A text keeps its EOS; tokens of a SeqIO task are cut where they are."""
  model = loading.load(str(t5))
  layout = Layout(
    config=model.config,
    vocabulary=model.vocabulary,
    inputs_length=4,
    targets_length=4,
  )
  (text,) = records_of('two dogs and five cats', None, layout)
  assert len(text.ids) == 4
  assert text.ids[-1] == 1
  (tokens,) = records_of('', (5, 6, 7, 8, 9, 1), layout)
  assert tokens.ids == (5, 6, 7, 8)
  assert tokens.num_cut == 2


@pytest.mark.parametrize('end', [(), (1,), (3,)])
def test_a_prompt_of_tokens_loses_whichever_eos_it_ends_with(end):
  layout = decoder_only_layout(eos_ids=(1, 3))
  (row,) = records_of('', (5, 3, 6, *end), layout)
  assert row.ids == (5, 3, 6)


@pytest.mark.parametrize('unknown', [-2, 8192])
def test_a_token_that_the_model_has_not_is_named(unknown):
  layout = decoder_only_layout(eos_ids=(1,))
  with pytest.raises(ValueError, match=f'token {unknown}, .* 0 to 8191'):
    list(records_of('', (5, unknown, 7), layout))


def decoder_only_layout(eos_ids):
  return Layout(
    config=presets.preset('lm_nano'),
    vocabulary=types.SimpleNamespace(eos_ids=eos_ids),
    inputs_length=8,
    targets_length=4,
  )


def records_of(inputs, input_ids, layout):
  example = tasks.Example(inputs=inputs, input_ids=input_ids)
  task = tasks.Task(name='task', read=lambda: iter([example]))
  return examples.encode(task, layout, 0, 1)


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


def test_two_shards_merged_are_one_run(once, run, t5, task, tmp_path):
  for shard_id in (1, 0):
    done = run(
      *argv(t5, task, tmp_path, f'--shard_id={shard_id}', infer__num_shards=2)
    )
    assert done.status == 0, done
    if shard_id:
      assert_refused(run('merge', tmp_path), 'not complete: 0')
  merged = run('merge', tmp_path)
  assert merged.status == 0, merged
  assert result(tmp_path).read_bytes() == result(once[0]).read_bytes()
  mark = json.loads((tmp_path / f'{result("").name}.COMPLETED').read_text())
  assert mark['examples'] == NUM_EXAMPLES
  assert run('merge', tmp_path).out == merged.out
  result(tmp_path).write_text('{}\n')
  assert_refused(run('merge', tmp_path), 'already exists')


@pytest.mark.slow
def test_refilled_rows_decode_what_fixed_batches_do(
  once, run, t5, task, tmp_path
):
  fixed = run(
    *argv(
      t5,
      task,
      tmp_path,
      Decoding__refill_size=8,
      infer__checkpoint_period=100,
    )
  )
  refilled = run(
    *argv(t5, task, tmp_path / 'refilled', infer__checkpoint_period=100)
  )
  assert predictions(result(tmp_path)) == predictions(result(once[0]))
  assert predictions(result(tmp_path / 'refilled')) == predictions(
    result(once[0])
  )
  share = lambda done: int(done.err.split('rows used ')[1].split('%')[0])
  assert share(refilled) > 1.3 * share(fixed)


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [{}, {'refill_size': 32}, {'num_devices': 2}])
def test_a_batch_has_no_more_rows_than_there_are(
  once, run, t5, tmp_path, sizes
):
  path = tmp_path / 'task.jsonl'
  infer_runs.write_task(path, NUM_EXAMPLES)
  path.write_text(''.join(path.read_text().splitlines(True)[:2]))
  places = {'refill_size': 'Decoding__', 'num_devices': 'device_mesh__'}
  bound = {f'{places[name]}{name}': size for name, size in sizes.items()}
  done = run(*argv(t5, path, tmp_path, Decoding__batch_size=32, **bound))
  assert predictions(result(tmp_path)) == predictions(result(once[0]))[:2]
  assert int(done.err.split('rows used ')[1].split('%')[0]) > 50


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
def test_a_drafter_changes_the_target_runs_alone(once, run, t5, task, tmp_path):
  done = run(
    *argv(
      t5,
      task,
      tmp_path,
      gin_file('drafters/model.gin'),
      gin_file('verification/greedy.gin'),
      DRAFTER_CHECKPOINT_PATH=repr(str(t5)),
      drafters__DraftModel__gamma=4,
      infer__checkpoint_period=100,
    )
  )
  assert done.status == 0, done
  assert predictions(result(tmp_path)) == predictions(result(once[0]))
  aux = [line['aux'] for line in records(result(tmp_path))]
  assert {each['alpha'] for each in aux if each['tested']} == {1.0}
  assert all(each['target_runs'] == -(-each['tokens'] // 5) for each in aux)


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


@pytest.mark.slow
def test_drafts_end_early_row_by_row(once, run, t5, task, tmp_path):
  """No token is as likely as the threshold asks: each draft has one."""
  done = run(
    *argv(
      t5,
      task,
      tmp_path,
      gin_file('drafters/model.gin'),
      gin_file('verification/greedy.gin'),
      DRAFTER_CHECKPOINT_PATH=repr(str(t5)),
      drafters__DraftModel__gamma=12,
      drafters__DraftModel__min_prob=1.0,
      infer__checkpoint_period=100,
    )
  )
  assert done.status == 0, done
  assert predictions(result(tmp_path)) == predictions(result(once[0]))
  aux = [line['aux'] for line in records(result(tmp_path))]
  # All pass: two tokens in each target run.
  runs = [(row['tokens'] + 1) // 2 for row in aux]
  assert [row['target_runs'] for row in aux] == runs


@pytest.mark.slow
def test_a_drafter_that_the_mesh_does_not_divide(once, run, t5, task, tmp_path):
  """Four chips share the target's four heads; three of the drafter's are on
  every chip."""
  config = make_config(
    vocab_size=128, num_heads=3, embed_dim=12, mlp_dim=10, head_dim=4
  )
  small = tmp_path / 'small'
  orbax.save(small, config, make_params(config))
  done = run(
    *argv(
      t5,
      task,
      tmp_path,
      gin_file('drafters/model.gin'),
      DRAFTER_CHECKPOINT_PATH=repr(str(small)),
      drafters__DraftModel__gamma=4,
      VOCABULARY=repr(str(t5)),
      infer__checkpoint_period=100,
      device_mesh__num_devices=4,
      device_mesh__num_partitions=4,
    )
  )
  assert done.status == 0, done
  assert predictions(result(tmp_path)) == predictions(result(once[0]))
  assert sum(each['aux']['drafted'] for each in records(result(tmp_path))) > 0


def test_a_decoder_only_model_continues_as_generate_does(
  run, model, prompts_file, tmp_path
):
  done = run(
    *argv(
      model,
      prompts_file,
      tmp_path,
      gin_file('drafters/prompt_lookup.gin'),
      drafters__PromptLookup__gamma=8,
      TASK_FEATURE_LENGTHS="{'inputs': 64, 'targets': 12}",
    )
  )
  assert done.status == 0, done
  generated = run(
    'generate',
    '--model',
    model,
    '--prompts',
    prompts_file,
    '--max_new_tokens=12',
    '--drafter=none',
    '--json=-',
  )
  # The model has a chat template, which is for messages.
  assert 'find.chat=True' in done.err
  lines = records(result(tmp_path, prompts_file.stem))
  found = [(line['prediction'], line['aux']['tokens']) for line in lines]
  expected = [
    (each['text'], len(each['tokens'])) for each in generated.records()
  ]
  assert found == expected
  assert sum(line['aux']['accepted'] for line in lines) > 0


def test_messages_and_texts_of_chat_are_those_of_generate(run, model, tmp_path):
  path = tmp_path / 'dialogues.jsonl'
  user = {'role': 'user', 'content': 'a b'}
  answer = {'role': 'assistant', 'content': 'c'}
  lines = [{'prompt': 'a b'}, {'messages': [user, answer, user]}]
  path.write_text('\n'.join(map(json.dumps, lines)))
  chat = {
    'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 12}",
    'Decoding.batch_size': 2,
    'find.inputs_field': "'prompt'",
    'find.chat': True,
    'find.system': "'d'",
  }
  done = run(*argv(model, path, tmp_path, **chat))
  assert done.status == 0, done
  assert 'chat template' not in done.err
  generated = run(
    *('generate', '--model', model, '--prompts', path, '--max_new_tokens=12'),
    *('--chat', '--system=d', '--drafter=none', '--batch_size=2', '--json=-'),
  )
  found = records(result(tmp_path, 'dialogues'))
  texts = [each['text'] for each in generated.records()]
  assert [line['prediction'] for line in found] == texts
  assert texts[0] != texts[1]
  assert found[1]['inputs']['inputs_pretokenized'] == 'a b'
  short = chat | {'TASK_FEATURE_LENGTHS': "{'inputs': 4, 'targets': 12}"}
  refused = run(*argv(model, path, tmp_path / 'short', **short))
  assert_refused(refused, 'example 1 has messages of', 'room for 4')


def test_predictions_match_a_grammar_that_gin_binds(run, t5, task, tmp_path):
  pytest.importorskip('llguidance')
  regex = r'[a-d]{1,3}( (the|fox) (live|big)){2}\.'
  infer = functools.partial(
    argv,
    t5,
    task,
    Decoding__regex=repr(regex),
    # Room for a letter a token.
    TASK_FEATURE_LENGTHS="{'inputs': 12, 'targets': 32}",
  )
  beams = run(*infer(tmp_path / 'beams', Decoding__num_decodes=2))
  assert_refused(
    beams, 'a beam search takes no grammar (regex, json_schema, grammar)'
  )
  found = []
  for name, kind in (
    ('prompt_lookup', 'PromptLookup'),
    ('grammar', 'GrammarDrafter'),
  ):
    # Without a gamma so few examples are decoded plainly.
    gamma = {f'drafters__{kind}__gamma': 4}
    drafter = gin_file(f'drafters/{name}.gin')
    done = run(*infer(tmp_path / name, drafter, **gamma))
    assert done.status == 0, done
    found.append(predictions(result(tmp_path / name)))
    assert sum(x['aux']['accepted'] for x in records(result(tmp_path / name)))
  assert found[0] == found[1]
  assert len(found[0]) == NUM_EXAMPLES
  assert all(re.fullmatch(regex, text) for text in found[0])


def test_examples_have_settings_of_their_own(once, run, t5, task, tmp_path):
  path, fields = tmp_path / 'own.jsonl', "['min_new_tokens', 'bad_words_ids']"
  usual = predictions(result(once[0]))
  own = {'min_new_tokens': 14, 'bad_words_ids': [[5], [9, 3]]}
  lines = records(task)
  for line in lines[::2]:
    line |= own
  path.write_text('\n'.join(map(json.dumps, lines)))
  mixed, same = tmp_path / 'mixed', tmp_path / 'same'
  infer = functools.partial(run, *argv(t5, path, mixed))
  assert infer(f'--gin.find.settings_fields={fields}').status == 0
  bindings = {f'Decoding__{name}': value for name, value in own.items()}
  assert run(*argv(t5, task, same, **bindings)).status == 0
  found = predictions(result(mixed, 'own'))
  assert found[1::2] == usual[1::2]
  assert found[::2] == predictions(result(same))[::2] != usual[::2]
  for fields, words in (
    ("['inputs']", "'inputs' is no setting of how texts are sampled"),
    ("['temprature']", 'did you mean temperature?'),
    ("['min_new_tokens']", 'example 3: min_new_tokens should be'),
  ):
    lines[2]['min_new_tokens'] = -1
    path.write_text('\n'.join(map(json.dumps, lines)))
    assert_refused(infer(f'--gin.find.settings_fields={fields}'), words)
  long = argv(t5, task, tmp_path / 'no', Decoding__min_new_tokens=999)
  assert_refused(run(*long), "min_new_tokens 999 exceeds TASK_FEATURE_LENGTHS'")


@pytest.mark.slow
def test_examples_have_temperatures_of_their_own(once, run, t5, task, tmp_path):
  path, lines = tmp_path / 'own.jsonl', records(task)
  for line in lines[::2]:
    line['temperature'] = 0
  path.write_text('\n'.join(map(json.dumps, lines)))
  drawn = {'Decoding__temperature': 1.0, 'Decoding__top_k': 20}
  mixed, same = tmp_path / 'mixed', tmp_path / 'same'
  infer = functools.partial(argv, t5, path, mixed)
  fields = "--gin.find.settings_fields=['temperature']"
  assert run(*infer(fields, **drawn)).status == 0
  assert run(*argv(t5, task, same, **drawn)).status == 0
  found = predictions(result(mixed, 'own'))
  assert found[::2] == predictions(result(once[0]))[::2]
  assert found[1::2] == predictions(result(same))[1::2]
  lines[0]['temperature'] = 0.5
  path.write_text('\n'.join(map(json.dumps, lines)))
  assert_refused(
    run(*infer(fields, Decoding__num_decodes=2)), 'num_decodes 2 draws nothing'
  )


@pytest.mark.seqio
def test_features_of_a_seqio_task_are_settings(once, run, t5, task, tmp_path):
  """As the keys of a .jsonl; where a text is empty, nothing is said."""
  seqio = pytest.importorskip('seqio')
  pytest.importorskip('llguidance')
  import tensorflow as tf

  lines, path = records(task), tmp_path / 'lines.jsonl'
  own = {'temperature': 1.0, 'repetition_penalty': 3.0, 'suppress_tokens': [5]}
  nothing = {'temperature': 0.0, 'repetition_penalty': 1.0}
  regexes = ['', '', '[a-d]{2}( the){0,2}', '']
  told = [
    {**line, **(own if i % 2 else nothing), 'regex': regexes[i % 4]}
    for i, line in enumerate(lines)
  ]
  fields = [*own, 'regex']
  features = {
    name: [x.get(name, []) for x in told] for name in ('inputs', *fields)
  }
  features['suppress_tokens'] = tf.ragged.constant(features['suppress_tokens'])
  text = seqio.Feature(
    seqio.PassThroughVocabulary(size=1),
    add_eos=False,
    dtype=tf.string,
    rank=0,
  )
  seqio.TaskRegistry.add(
    'own_settings',
    source=seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: (
        tf.data.Dataset.from_tensor_slices(features)
      ),
      splits=['test'],
    ),
    preprocessors=[],
    output_features={'inputs': text},
  )
  is_said = lambda name, x: x != '' or name != 'regex'
  path.write_text(
    '\n'.join(
      json.dumps({name: x for name, x in line.items() if is_said(name, x)})
      for line in told
    )
  )
  found = []
  for name, source in (('own_settings', 'own_settings'), ('lines', path)):
    out, flag = tmp_path / name, f'--gin.find.settings_fields={fields}'
    done = run(*argv(t5, source, out, flag))
    assert done.status == 0, done
    found.append(predictions(result(out, name)))
  assert found[0] == found[1]
  usual = predictions(result(once[0]))
  assert found[0][::4] == usual[::4]
  assert found[0][1::2] != usual[1::2]
  assert all(re.fullmatch(regexes[2], x) for x in found[0][2::4])


@pytest.mark.slow
def test_logits_that_are_not_numbers_are_counted(
  run, make_model, prompts_file, tmp_path
):
  broken = make_model('nan', change=tiny.burst)
  job = argv(
    broken,
    prompts_file,
    tmp_path,
    TASK_FEATURE_LENGTHS="{'inputs': 64, 'targets': 12}",
  )
  done = run(*job)
  assert done.status == 2, done
  assert 'logits of 8 examples' in done.err
  lines = records(result(tmp_path, prompts_file.stem))
  assert {line['aux']['end'] for line in lines} == {'nan'}
  # A job that is started again is no better for being complete.
  again = run(*job)
  assert (again.status, 'complete already' in again.err) == (2, True)


@pytest.mark.slow
def test_samples_do_not_depend_on_the_batch(once, run, t5, task, tmp_path):
  sampled = {
    'Decoding__temperature': 1.0,
    'infer__checkpoint_period': 100,
  }
  runs = {
    'wide': {},
    'narrow': {'Decoding__batch_size': 3, 'Decoding__refill_size': 1},
  }
  found = {}
  for name, more in runs.items():
    out = tmp_path / name
    assert run(*argv(t5, task, out, **sampled, **more)).status == 0
    found[name] = predictions(result(out))
  assert found['wide'] == found['narrow']
  assert found['wide'] != predictions(result(once[0]))


def test_dry_run_needs_no_checkpoint(run, tmp_path, monkeypatch):
  monkeypatch.setenv('COLUMNS', '200')
  done = run(
    'infer',
    gin_file('models/t5_1_1_xxl.gin'),
    gin_file('runs/infer.gin'),
    gin_file('tasks/wmt_t2t_ende.gin'),
    gin_file('drafters/model.gin'),
    '--gin.CHECKPOINT_PATH="nowhere"',
    '--gin.DRAFTER_CHECKPOINT_PATH="nowhere"',
    '--gin.DRAFTER_MODEL="t5_1_1_large"',
    '--gin.drafters.DraftModel.gamma=4',
    f'--gin.INFER_OUTPUT_DIR="{tmp_path}"',
    '--gin.device_mesh.num_partitions=4',
    '--dry_run',
  )
  assert done.status == 0, done
  assert 'data 2 x model 4, batch 32' in done.out
  rows = infer_runs.dry_run_rows(done.out)
  values, size, per_chip = rows['target parameters']
  # T5 1.1 XXL has 11,135,332,352 parameters; norms are on every chip.
  assert (values, size) == (11_135_332_352, 2 * 11_135_332_352)
  num_norms = 4096 * (2 * 24 + 3 * 24 + 2)
  assert per_chip == 2 * ((values - num_norms) // 4 + num_norms)
  assert rows['drafter parameters'][0] == 783_150_080
  # Keys and values of 24 layers: 257 + 4 + 1 + 1 of the decoder itself, at most
  # a few more, and 256 of the encoder; of XXL and of Large.
  position = 2 * 24 * 64 * 2 * (64 + 16)
  caches = position * (256 + 257 + 4 + 1) * 32
  assert caches < rows['caches and state'][1] < 1.01 * caches
  assert not list(tmp_path.iterdir())


def test_a_split_without_examples_is_no_news(capsys):
  job = types.SimpleNamespace(
    decoder=types.SimpleNamespace(
      recipe=types.SimpleNamespace(drafter=None), stop=()
    ),
    decoding=types.SimpleNamespace(make_drafter=lambda: None),
    layout=types.SimpleNamespace(
      vocabulary=types.SimpleNamespace(chat_template='{{ messages }}')
    ),
  )
  none = tasks.Task(name='none', read=lambda: iter(()))
  infer._advise(job, none)
  assert not capsys.readouterr().err
  job.decoder.stop = ('END',)
  infer._advise(job, none)
  assert "stop_strings ['END']" in capsys.readouterr().err


def test_memory_is_that_of_a_device_of_this_process():
  def refuse():
    raise RuntimeError('MemoryStats is only supported for addressable devices')

  away, own = (
    types.SimpleNamespace(platform='tpu', memory_stats=stats)
    for stats in (refuse, lambda: {'bytes_limit': 7})
  )
  mesh = types.SimpleNamespace(devices=np.array([away]), local_devices=[own])
  assert strategies._chip_bytes(mesh) == 7


@pytest.mark.parametrize(
  ('more', 'bindings', 'parts'),
  [
    ((), {'MIXTURE_OR_TASK_NAME': '%gin.REQUIRED'}, ['MIXTURE_OR_TASK_NAME']),
    ((), {'MIXTURE_OR_TASK_NAME': "'no.jsonl'"}, ['no.jsonl']),
    ((), {'MIXTURE_OR_TASK_NAME': "'wmt_ende'"}, ['wmt_t2t_ende_v003']),
    ((), {'TASK_FEATURE_LENGTHS': "{'inputs': 4}"}, ["'targets': M"]),
    ((), {'TASK_FEATURE_LENGTHS': "{'inputs': 4, 'targets': 0}"}, ['got 0']),
    ((), {'Decoding.batch_sise': 4}, ['batch_sise']),
    ((), {'Decoding.batch_size': 0}, ['batch_size', '0']),
    (
      (),
      {'TASK_FEATURE_LENGTHS': "{'inputs': 12, 'targets': 1000000000}"},
      [
        'out of memory',
        'Decoding.batch_size',
        'TASK_FEATURE_LENGTHS',
        '--dry_run',
      ],
    ),
    ((), {'Decoding.top_p': 0.9}, ['top_p 0.9']),
    ((), {'Decoding.top_k': 4}, ['top_k 4']),
    ((), {'TEMPERATURE': 1.0}, ['uses TEMPERATURE', 'Decoding.temperature']),
    ((), {'Decoding.refill_size': 9}, ['9 rows', 'batch of 8']),
    (['--shard_id=2'], {'infer.num_shards': 2}, ['shard_id 2', '2 shards']),
    ((), {'infer.num_shards': 10**5}, ['num_shards is 100000', '99999']),
    ((), {'CHECKPOINT_PATH': "'nowhere'"}, ["'nowhere'"]),
    ((), {'MODEL': "'t5_1_1_small'"}, ['85', '32128']),
    ((), {'device_mesh.num_devices': 9}, ['9', 'there are 8']),
    (
      (),
      {'device_mesh.num_devices': 8, 'device_mesh.num_partitions': 8},
      ['8 devices', 'heads of 4'],
    ),
    (
      (),
      {'device_mesh.num_devices': 8, 'Decoding.batch_size': 9},
      ['batch of 9', '8'],
    ),
    (
      [gin_file('verification/greedy.gin')],
      {'Decoding.temperature': 0.5},
      ['temperature 0', '0.5'],
    ),
    ((), {'Decoding.temperature': 1e-38}, ['at least 1e-06', '1e-38']),
    (
      [gin_file('verification/speculative_sampling.gin')],
      {'rules.SpeculativeSampling.lenience': 0.5},
      ['lenience 0.5', 'verification greedy'],
    ),
    (['--gin_file=nowhere.gin'], {}, ['nowhere.gin']),
    ([f'--profile={__file__}'], {}, [__file__, 'name a folder']),
    (['--gin.DTYPE'], {}, ['--gin.DTYPE=VALUE']),
    ((), {'INFER_OUTPUT_DIR': "''"}, ['INFER_OUTPUT_DIR is empty']),
    (['--process_count=2'], {}, ['--process_index']),
    (['--coordinator_address=here'], {}, ['HOST:PORT']),
  ],
)
def test_bad_input_is_one_sentence(
  run, t5, task, tmp_path, more, bindings, parts
):
  command = argv(t5, task, tmp_path / 'out', *more)
  command += [f'--gin.{name}={value}' for name, value in bindings.items()]
  assert_refused(run(*command), *parts)
  assert not list((tmp_path / 'out').glob('*.jsonl*'))


@pytest.mark.parametrize('seed', [-1, 2**32, 1.5, True])
def test_a_seed_is_an_integer_of_32_bits(seed):
  with pytest.raises(ValueError, match=f'seed should be .* got {seed}'):
    Decoding(seed=seed)


@pytest.mark.parametrize('rule', ['lenient_greedy', 'top_beta'])
def test_relaxed_rules_are_taken_as_shipped(run, t5, task, tmp_path, rule):
  rule_file = gin_file(f'verification/{rule}.gin')
  assert run(*argv(t5, task, tmp_path, rule_file, '--dry_run')).status == 0


def test_a_rule_may_be_bound_as_a_function(run, t5, task, tmp_path):
  own = tmp_path / 'own.gin'
  own.write_text(
    'from __gin__ import dynamic_registration\n'
    'from specdec_jax import verification\n'
    'from specdec_jax.assembly import rules\n'
    'from specdec_jax.infer import decoding\n'
    'decoding.Decoding.make_rule = @rules.Custom\n'
    'rules.Custom.function = @verification.greedy\n'
    'verification.greedy.lenience = %LENIENCE\n'
  )
  command = argv(t5, task, tmp_path, f'--gin_file={own}', '--dry_run')
  assert run(*command, '--gin.LENIENCE=1.0').status == 0
  relaxed = ('--gin.LENIENCE=0.5', '--gin.Custom.temperature=1.0')
  assert run(*command, *relaxed).status == 0


@pytest.mark.parametrize(
  'name',
  [
    str(path.relative_to(infer_runs.ROOT / 'gin_configs'))
    for folder in ('drafters', 'models', 'tasks', 'verification')
    for path in sorted((infer_runs.ROOT / 'gin_configs' / folder).glob('*.gin'))
  ],
)
def test_every_gin_file_can_be_read(name):
  text = (infer_runs.ROOT / 'gin_configs' / name).read_text()
  required = [
    f"{macro} = 'b'"
    for macro in ('DRAFTER_CHECKPOINT_PATH', 'DRAFTER_TEXT')
    if macro in text and not name.startswith('models/')
  ]
  given = gin_launch.Configuration(
    files=[
      str(infer_runs.ROOT / 'gin_configs' / each)
      for each in ('models/as_stored.gin', 'runs/infer.gin', name)
    ],
    bindings=[
      "MIXTURE_OR_TASK_NAME = 'task.jsonl'",
      "TASK_FEATURE_LENGTHS = {'inputs': 4, 'targets': 4}",
      "CHECKPOINT_PATH = 'a'",
      "INFER_OUTPUT_DIR = 'd'",
      *required,
    ],
  )
  gin_launch.parse(given)
  assert 'infer.infer.output_dir' in gin_launch.bindings()
  assert '# Device: ' in text
  assert name in text or 'as_stored' in name
