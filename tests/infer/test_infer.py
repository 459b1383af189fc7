"""`specdec infer` and `merge`, on T5X's own tiny checkpoint."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from specdec_jax.base import Params
from specdec_jax.checkpoints import loading, orbax
from specdec_jax.decoding import autoregressive
from specdec_jax.decoding.method import Method
from specdec_jax.infer import examples, infer, strategies
from specdec_jax.infer.examples import Layout
from specdec_jax.models import families
from specdec_jax.sampling import logits
from specdec_jax.text import tasks
from tests.checkpoints.tiny_t5 import make_config, make_params
from tests.cli import tiny
from tests.cli.tiny import assert_refused
from tests.infer import infer_runs
from tests.infer.infer_runs import argv, gin_file, predictions, records, result


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
  assert f'{len(cuts)} of {infer_runs.NUM_EXAMPLES} inputs' in once[1].err
  assert f'{sum(cuts)} tokens' in once[1].err


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
  assert mark['examples'] == infer_runs.NUM_EXAMPLES
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
  infer_runs.write_task(path, infer_runs.NUM_EXAMPLES)
  path.write_text(''.join(path.read_text().splitlines(True)[:2]))
  places = {'refill_size': 'Decoding__', 'num_devices': 'device_mesh__'}
  bound = {f'{places[name]}{name}': size for name, size in sizes.items()}
  done = run(*argv(t5, path, tmp_path, Decoding__batch_size=32, **bound))
  assert predictions(result(tmp_path)) == predictions(result(once[0]))[:2]
  assert int(done.err.split('rows used ')[1].split('%')[0]) > 50


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
