"""`specdec train` of Spec-Drafters, block drafters and heads, and what it
leaves."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import loading, orbax
from specdec_jax.cli import main as cli
from specdec_jax.contrib.block_heads.network import BlockHeadsConfig
from specdec_jax.models.drafting.block_decoder import BlockDecoderConfig
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig
from tests import toy_t5
from tests.training import tiny_runs

ROOT = Path(__file__).parent.parent.parent
TARGET = dataclasses.replace(tiny_runs.CONFIG, relpos_max_distance=20)
GIN = """
from __gin__ import dynamic_registration
from specdec_jax.training import train
from specdec_jax.models.drafting import block_decoder

include 'experiments/xia2023/gin/train_spec_drafter.gin'

DRAFTER = None
TRAIN_STEPS = 3
WARMUP_STEPS = 1
BATCH_TOKENS = 64
LENGTHS = (8,)
GAMMA = 3
CHECKPOINT_PERIOD = 1
EVAL_PERIOD = 3
AVERAGE_LAST = 2
train.train.config = @block_decoder.BlockDecoderConfig()
block_decoder.BlockDecoderConfig:
  vocab_size = 16
  embed_dim = 32
  num_encoder_layers = 1
  num_decoder_layers = 1
  num_heads = 2
  head_dim = 16
  mlp_dim = 64
  max_positions = 40
  relpos_max_distance = 20
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Token files and a target."""
  folder = tmp_path_factory.mktemp('drafters')
  tiny_runs.write_tokens(folder / 'tokens', train=60, validation=8)
  orbax.save(folder / 'target', TARGET, toy_t5.params(TARGET, seed=0))
  (folder / 'spec_drafter.gin').write_text(GIN)
  return folder


def train(folder, gin_file, name, *bindings):
  return cli.main(
    [
      'train',
      f'--gin_file={gin_file}',
      f'--gin.TOKENS="{folder / "tokens"}"',
      f'--gin.TARGET="{folder / "target"}"',
      f'--gin.MODEL_DIR="{folder / name}"',
      *bindings,
    ]
  )


def losses_of(folder, name):
  lines = (folder / name / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_spec_drafter_is_trained_and_averaged(folder):
  assert train(folder, folder / 'spec_drafter.gin', 'drafter') == 0
  config, params = loading.read(folder / 'drafter' / 'model')
  assert isinstance(config, BlockDecoderConfig)
  assert config.dropout_rate == 0
  # Three steps from the target's encoder are not far.
  began = toy_t5.params(TARGET, seed=0)['encoder']['layers_0']
  kernel = lambda tree: np.asarray(tree['mlp']['wo']['kernel'])
  moved = kernel(params['encoder']['layers_0']) - kernel(began)
  assert 0 < np.abs(moved).max() < 0.01
  assert any('validation_nats' in line for line in losses_of(folder, 'drafter'))


@pytest.mark.slow
def test_heads_are_trained_and_nothing_else_is_kept(folder):
  gin_file = ROOT / 'experiments/xia2023/gin/debian_ende_block_heads.gin'
  bindings = [
    '--gin.TRAIN_STEPS=2',
    '--gin.GAMMA=3',
    '--gin.MLP_DIM=8',
    '--gin.BATCH_SIZE=8',
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 16, 'targets': 16}",
  ]
  assert train(folder, gin_file, 'heads', *bindings) == 0
  config, params = loading.read(folder / 'heads' / 'model')
  assert config == BlockHeadsConfig(
    embed_dim=32, gamma=3, mlp_dim=8, dtype=jnp.dtype('float32')
  )
  assert jax.tree.map(jnp.shape, params) == {
    'wi': (3, 32, 8),
    'wo': (3, 8, 32),
  }


@pytest.mark.slow
def test_a_block_drafter_run_that_was_stopped_goes_on(folder, capsys):
  """Bit by bit, and the network that it leaves drafts for its target."""
  gin_file = ROOT / 'experiments/block/gin/train_block.gin'
  bindings = [
    '--gin.NUM_LAYERS=1',
    '--gin.BLOCK_SIZE=3',
    '--gin.DRAFT_VOCAB_SIZE=12',
    '--gin.MARKOV_RANK=4',
    '--gin.NUM_ANCHORS=4',
    "--gin.WEIGHTS='dpace'",
    '--gin.BATCH_TOKENS=64',
    '--gin.LENGTHS=(8,)',
    "--gin.DTYPE='float32'",
    '--gin.EVAL_PERIOD=4',
    '--gin.CHECKPOINT_PERIOD=2',
    # The rate depends on where a run ends.
    '--gin.optimizers.learning_rate.steps_per_cycle=4',
  ]
  assert (
    train(folder, gin_file, 'blocks', '--gin.TRAIN_STEPS=4', *bindings) == 0
  )
  assert '12 of 16 tokens can be drafted' in capsys.readouterr().out
  for steps in (2, 4):
    end = f'--gin.TRAIN_STEPS={steps}'
    assert train(folder, gin_file, 'halves', end, *bindings) == 0
  config, params = loading.read(folder / 'blocks' / 'model')
  assert isinstance(config, BlockDrafterConfig)
  assert (config.feature_layers, config.cross_layers) == ((1,), (0,))
  _, again = loading.read(folder / 'halves' / 'model')
  jax.tree.map(np.testing.assert_array_equal, params, again)
  line = losses_of(folder, 'blocks')[-1]
  assert line['validation_tokens'] >= 1
  assert 0 < line['validation_alpha_1'] < 1


def test_a_drafter_is_no_model(folder, capsys):
  orbax.save(
    folder / 'lone',
    BlockHeadsConfig(embed_dim=4, gamma=1, mlp_dim=2),
    {'wi': jnp.zeros((1, 4, 2)), 'wo': jnp.zeros((1, 2, 4))},
  )
  with pytest.raises(ValueError, match=r'block_heads.*is a drafter'):
    loading.load(str(folder / 'lone'))
  binding = f'--gin.TARGET="{folder / "lone"}"'
  assert train(folder, folder / 'spec_drafter.gin', 'none', binding) == 2
  assert 'is not a T5' in capsys.readouterr().err
