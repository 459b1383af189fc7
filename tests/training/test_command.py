"""`specdec train` and `specdec data rewrite`, from token files to models."""

import argparse
import functools
import hashlib
import importlib
import itertools
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import loading
from specdec_jax.cli import main as cli
from specdec_jax.launch import progress
from specdec_jax.models import presets
from specdec_jax.sharding import mesh as meshes
from specdec_jax.training import metrics_log, recipes
from specdec_jax.training import train as train_lib
from specdec_jax.training.data import token_files
from tests.training import tiny_runs

GIN = """
from __gin__ import dynamic_registration
from specdec_jax.models import t5_layers
from specdec_jax.training import loop
from specdec_jax.training import optimizers
from specdec_jax.training import train

include 'gin_configs/runs/{base}.gin'

MODEL = None
BATCH_SIZE = 8
TASK_FEATURE_LENGTHS = {{'inputs': 16, 'targets': 16}}
CHECKPOINT_PERIOD = 2
EVAL_PERIOD = 4
OPTIMIZER = @optimizers.adamw()
train.train:
  config = @t5_layers.T5Config()
loop.Schedule:
  log_period = 2
  average_last = 2
t5_layers.T5Config:
  vocab_size = 20
  embed_dim = 32
  num_encoder_layers = 1
  num_decoder_layers = 1
  num_heads = 2
  head_dim = 16
  mlp_dim = 64
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Token files, and a run of four steps in `run/`."""
  folder = tmp_path_factory.mktemp('train')
  tiny_runs.write_tokens(folder / 'tokens', train=120, validation=12)
  (folder / 'train.gin').write_text(GIN.format(base='train'))
  assert train(folder, 'run', steps=4) == 0
  return folder


def train(folder, name, *, steps, gin='train', bindings=()):
  return cli.main(
    [
      'train',
      f'--gin_file={folder / gin}.gin',
      f'--gin.TOKENS="{folder / "tokens"}"',
      f'--gin.MODEL_DIR="{folder / name}"',
      f'--gin.TRAIN_STEPS={steps}',
      *bindings,
    ]
  )


def test_a_run_leaves_a_model_metrics_and_its_config(folder):
  """The vocabulary is the one that the token files bring."""
  run = folder / 'run'
  loaded = loading.load(str(run / 'model'))
  assert loaded.vocabulary.vocab_size == 16
  assert loaded.vocabulary.model == tiny_runs.vocabulary()
  config, params = loading.read(run / 'model')
  assert config.embed_dim == 32
  assert params['decoder']['logits_dense']['kernel'].shape == (32, 20)
  lines = metrics_log.read_log(run / metrics_log.NAME)
  assert [line['step'] for line in lines] == [2, 4, 4]
  assert lines[0]['nats'] == pytest.approx(3.0, abs=0.8)
  assert 0 <= lines[2]['validation_accuracy'] <= 1
  bindings = (run / 'config.gin').read_text()
  assert 'Schedule.train_steps = %TRAIN_STEPS' in bindings


@pytest.mark.slow
def test_it_says_what_it_does_before_the_first_step_and_at_the_end(
  folder, monkeypatch, capsys
):
  at_once = functools.partial(progress.waiting, notice_after=0.0)
  monkeypatch.setattr(train_lib, 'waiting', at_once)
  assert train(folder, 'told', steps=3) == 0
  out, err = capsys.readouterr()
  assert err.splitlines() == [
    'specdec: reading the training data ... 0 s',
    'specdec: preparing and compiling the first step ... 0 s',
  ]
  model = f'the model is in {folder / "told/model"}'
  assert out.splitlines()[-1] == model
  assert train(folder, 'told', steps=3) == 0
  said = capsys.readouterr().out.splitlines()
  assert 'so nothing is left to train' in said[0]
  assert said[1:] == [model]


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_settings_says_so(folder, capsys):
  name, tokens = 'changed', folder / 'tokens' / 'train.npz'
  assert train(folder, name, steps=4) == 0
  changed = [
    '--gin.LEARNING_RATE=0.5',
    '--gin.BATCH_SIZE=4',
  ]
  capsys.readouterr()
  assert train(folder, name, steps=4) == 0
  assert 'other settings' not in capsys.readouterr().out
  assert train(folder, name, steps=4, bindings=changed) == 0
  said = capsys.readouterr().out
  assert (
    f'{folder / name}: the run resumes with other settings, so that its next '
    'steps differ from those with the earlier ones: BATCH_SIZE was 8, now 4; '
    'LEARNING_RATE was 0.02, now 0.5'
  ) in said
  changed.append('--gin.SEED=7')
  assert train(folder, name, steps=4, bindings=changed) == 0
  assert 'taken: SEED was 0, now 7' in capsys.readouterr().out
  before = tokens.read_bytes()
  try:
    token_files.save(tokens, tiny_runs.examples(120, seed=1))
    assert train(folder, name, steps=4, bindings=changed) == 0
  finally:
    tokens.write_bytes(before)
  assert 'taken: digest of the data was ' in capsys.readouterr().out


def test_the_help_lists_the_macros(capsys):
  assert cli.main(['train', '--help']) == 0
  shown = ' '.join(capsys.readouterr().out.split())
  _, _, macros = shown.partition('macros of runs/train.gin')
  assert '--gin.DROPOUT_RATE VALUE Share of activations' in macros
  assert '--gin.TARGET_TOKENS VALUE' in macros
  assert macros.count('--gin.MODEL_DIR VALUE') == 1


@pytest.mark.parametrize('command', ['data_command', 'train_command'])
def test_every_flag_has_a_help_text(command):
  def flags(parser):
    for action in parser._actions:
      yield action
      if isinstance(action, argparse._SubParsersAction):
        for subparser in action.choices.values():
          yield from flags(subparser)

  parser = argparse.ArgumentParser()
  importlib.import_module(f'specdec_jax.training.{command}').add_arguments(
    parser
  )
  bare = [
    action.option_strings
    for action in flags(parser)
    if action.option_strings and not action.help
  ]
  assert not bare


def test_help_shows_defaults_as_they_are_typed(run):
  shown = ' '.join(run('data', 'rewrite', '--help').out.split())
  assert '(default: 0.0)' in shown
  assert '(default: train)' in shown
  assert '(default: )' not in run('data', 'prepare', '--help').out


def test_a_resumed_log_goes_on_after_its_step(tmp_path):
  def losses():
    lines = metrics_log.read_log(tmp_path / metrics_log.NAME)
    return [(line['step'], line['loss']) for line in lines]

  with metrics_log.open_log(tmp_path, step=0) as write:
    for step in (2, 4, 6):
      write(step, {'loss': float(step)})
  with (tmp_path / metrics_log.NAME).open('a') as file:
    file.write('{"step": 8, "lo')
  with metrics_log.open_log(tmp_path, step=2) as write:
    assert losses() == [(2, 2.0)]
    write(4, {'loss': 0.5})
    write(8, {'loss': 0.25})
  assert losses() == [(2, 2.0), (4, 0.5), (8, 0.25)]


@pytest.mark.slow
def test_a_killed_run_leaves_the_lines_of_one_that_was_not(folder, monkeypatch):
  """Killed before a validation at a checkpoint, and between checkpoints."""
  settings = [
    '--gin.CHECKPOINT_PERIOD=3',
    '--gin.EVAL_PERIOD=3',
    '--gin.loop.Schedule.log_period=4',
  ]

  def lines(name):
    found = metrics_log.read_log(folder / name / metrics_log.NAME)
    for line in found:
      line.pop('targets_per_second', None)
      line.pop('targets_per_processor_second', None)
    return found

  assert train(folder, 'unbroken', steps=8, bindings=settings) == 0
  assert [line['step'] for line in lines('unbroken')] == [3, 3, 4, 6, 6, 8, 8]
  place = meshes.place_batch
  for kill_at in (4, 6):
    calls = itertools.count(1)

    def placed(batch, calls=calls, kill_at=kill_at):
      if next(calls) == kill_at:
        raise KeyboardInterrupt
      return place(batch)

    name = f'killed_{kill_at}'
    monkeypatch.setattr(meshes, 'place_batch', placed)
    assert train(folder, name, steps=8, bindings=settings) == 130
    monkeypatch.setattr(meshes, 'place_batch', place)
    assert train(folder, name, steps=8, bindings=settings) == 0
    assert lines(name) == lines('unbroken')


def test_a_split_that_no_description_counts_is_rewritten(folder, tmp_path):
  tokens, out = tmp_path / 'tokens', tmp_path / 'out'
  shutil.copytree(folder / 'tokens', tokens)
  shutil.copy(tokens / 'validation.npz', tokens / 'extra.npz')
  model = f'{folder / "run/model"}'
  options = ('--model', model, '--tokens', f'{tokens}', '--out', f'{out}')
  assert cli.main(['data', 'rewrite', *options, '--splits', 'extra']) == 0
  split = token_files.load_description(out).at('splits').at('extra')
  assert split.text('written_by') == model


@pytest.mark.slow
def test_a_drafter_is_distilled(folder):
  """Text of the target, text of the drafter, and the divergence as a loss."""
  written = folder / 'written'
  status = cli.main(
    [
      'data',
      'rewrite',
      f'--model={folder / "run/model"}',
      f'--tokens={folder / "tokens"}',
      f'--out={written}',
      '--temperature=1',
    ]
  )
  assert status == 0
  before = token_files.load(folder / 'tokens/train.npz')
  after = token_files.load(written / 'train.npz')
  np.testing.assert_array_equal(after.inputs.tokens, before.inputs.tokens)
  assert len(after) == len(before)
  assert (written / 'spiece.model').read_bytes() == tiny_runs.vocabulary()
  # The vocabulary has 16 tokens, and the model's 20 logits are padding beyond.
  assert after.targets.tokens.max() == 15
  assert (written / 'validation.npz').read_bytes() == (
    folder / 'tokens/validation.npz'
  ).read_bytes()

  (folder / 'distill.gin').write_text(
    GIN.format(base='distill').replace(
      'train.train:',
      'from specdec_jax.training import recipes\n'
      'recipes.drafter_texts.config = @t5_layers.T5Config()\n'
      'train.train:',
    )
  )
  status = train(
    folder,
    'drafter',
    steps=4,
    gin='distill',
    bindings=[
      f'--gin.TARGET="{folder / "run/model"}"',
      f'--gin.TARGET_TOKENS="{written}"',
      '--gin.MIX_RATIOS=(0.2, 0.3, 0.5)',
      '--gin.NUM_DRAFTER_EXAMPLES=64',
      '--gin.REFRESH_PERIOD=2',
    ],
  )
  assert status == 0
  texts = sorted(p.name for p in (folder / 'drafter').glob('*.npz'))
  assert [re.sub('_[0-9a-f]{8}[.]', '.', name) for name in texts] == [
    'drafter_text_0.npz',
    'drafter_text_1.npz',
  ]
  for name in texts:
    written = token_files.load(folder / 'drafter' / name)
    assert written.targets.tokens.max() == 15
  loading.read(folder / 'drafter' / 'model')


@pytest.mark.slow
def test_rewriting_is_decoding_row_by_row(folder):
  """In whatever batch: lengths are mixed, and an example has its own key."""
  config, params = loading.read(folder / 'run/model')
  tokens = tiny_runs.examples(9, seed=1)
  settings = {
    'max_new_tokens': 16,
    'eos_id': 1,
    'vocab_size': 16,
    'temperature': 1.0,
  }
  wide, narrow = (
    recipes.rewrite_targets(
      config, params, tokens, recipes.Rewriting(batch_size=size, **settings)
    )
    for size in (64, 4)
  )
  for name, array in vars(wide.targets).items():
    np.testing.assert_array_equal(array, vars(narrow.targets)[name])
  assert wide.targets.lengths.max() <= 16
  assert params['decoder']['logits_dense']['kernel'].dtype == jnp.float32


def test_a_decoder_alone_rewrites_nothing():
  config = presets.preset('lm_nano')
  how = recipes.Rewriting(max_new_tokens=4, eos_id=1, vocab_size=16)
  with pytest.raises(ValueError, match='no encoder'):
    recipes.rewrite_targets(config, {}, tiny_runs.examples(2), how)


def test_bad_input_is_one_sentence(folder, capsys):
  def complaint(*bindings, name='run', steps=6):
    capsys.readouterr()
    assert train(folder, name, steps=steps, bindings=bindings) == 2
    return capsys.readouterr().err

  assert 'dtype is ' in complaint("--gin.DTYPE='float16'")
  assert 'log_period must be at least 1, got 0' in complaint(
    '--gin.loop.Schedule.log_period=0'
  )
  assert "TRAIN_STEPS is 'ten', expected int" in complaint(
    '--gin.TRAIN_STEPS="ten"'
  )
  assert "LEARNING_RATE is '0.1', expected float" in complaint(
    '--gin.LEARNING_RATE="0.1"'
  )
  assert 'dropout_rate must be at least 0 and less than 1, got 2' in complaint(
    '--gin.DROPOUT_RATE=2'
  )
  assert 'base_learning_rate must be a number greater than 0, got -1' in (
    complaint('--gin.LEARNING_RATE=-1')
  )
  assert 'seed must be from 0 to 2**32 - 1, got -1' in complaint(
    '--gin.train.train.seed=-1'
  )
  other = complaint('--gin.t5_layers.T5Config.mlp_dim=96')
  assert 'is of another network: mlp_dim 64 there and 96 here' in other
  tokens, words = folder / 'tokens', tiny_runs.vocabulary('lmnopqrstuvw')
  text = (shutil.copytree(tokens, folder / 'words') / 'tokens.json').read_text()
  digests = [
    hashlib.sha256(each).hexdigest() for each in (tiny_runs.vocabulary(), words)
  ]
  (folder / 'words/tokens.json').write_text(text.replace(*digests))
  (folder / 'words/spiece.model').write_bytes(words)
  other = complaint(f'--gin.TOKENS="{folder / "words"}"')
  assert f'is of another vocabulary: {digests[0][:12]} there' in other
  few = complaint('--gin.t5_layers.T5Config.vocab_size=8', name='new')
  assert 'a vocabulary of 16 tokens and embeddings of 8' in few
  (folder / 'other.model').write_bytes(b'another')
  words = f'--gin.datasets.from_token_files.vocabulary="{folder}/other.model"'
  assert 'were made with vocabulary ' in complaint(words, name='new')
  shutil.copytree(folder / 'tokens', folder / 'bare')
  (folder / 'bare/spiece.model').unlink()
  bare = complaint(f'--gin.TOKENS="{folder / "bare"}"', name='new')
  assert 'without a vocabulary, which a model needs' in bare
  assert 'not one full batch' in complaint('--gin.BATCH_SIZE=1000', name='new')
  assert 'average_last 4 exceeds keep 3' in complaint(
    '--gin.loop.Schedule.average_last=4', name='new'
  )
  assert (
    'average_last is 3, and 6 steps with a checkpoint_period of 4 leave only 2'
    in (
      complaint(
        '--gin.loop.Schedule.average_last=3',
        '--gin.CHECKPOINT_PERIOD=4',
        name='new',
      )
    )
  )
  shutil.copytree(folder / 'tokens', folder / 'damaged')
  path = folder / 'damaged/train.npz'
  path.write_bytes(path.read_bytes()[:200])
  assert 'is damaged' in complaint(
    f'--gin.TOKENS="{folder / "damaged"}"', name='new'
  )
