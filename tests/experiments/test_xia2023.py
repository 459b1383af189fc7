"""The tables of Xia et al., on untrained models: nothing that speculates may
change what strict verification gives, whatever a drafter is worth."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest

from experiments import common
from experiments.xia2023 import __main__ as xia2023
from experiments.xia2023 import checks, tables, ways
from experiments.xia2023.tables import BEAM, FULL, GREEDY, Settings
from experiments.xia2023.ways import BLOCK, HEADS
from specdec_jax.assembly.drafters import Block, BlockHeads
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import TopBeta
from specdec_jax.base import Draft
from specdec_jax.checkpoints import orbax
from specdec_jax.contrib.block_heads import network as block_heads
from specdec_jax.contrib.block_heads.network import BlockHeadsConfig
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Layout
from specdec_jax.models import presets
from specdec_jax.text import tasks
from tests import toy_blocks
from tests.experiments.tiny import TINY

pytest.importorskip('orbax.checkpoint')
pytest.importorskip('tokenizers')
pytest.importorskip('sacrebleu')
SETTINGS = Settings(
  gamma=3, gammas=[2], batch_sizes=[1, 2], num_timed=2, repeats=1, batch_size=2
)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """A target, a Spec-Drafter, heads and a block drafter, all of them drawn at
  random."""
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  path = tmp_path_factory.mktemp('corpus') / 'test.jsonl'
  lines = [
    json.dumps({'inputs': f'number {i}', 'targets': f'Nummer {i}'})
    for i in range(3)
  ]
  path.write_text('\n'.join(lines) + '\n')
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(presets.PRESETS, 'tiny', TINY)
    chosen = Model(checkpoint='random:tiny', dtype='float32')
    target = common.load(chosen)
    layout = Layout(
      config=target.config,
      vocabulary=target.vocabulary,
      inputs_length=16,
      targets_length=8,
    )
    drafter = ways.spec_drafter_of(
      TINY, num_encoder_layers=1, num_decoder_layers=1, max_positions=16
    )
    heads = BlockHeadsConfig(embed_dim=8, gamma=2, mlp_dim=8)
    weights = block_heads.init_params(heads, jax.random.key(2))
    blocks = toy_blocks.config(TINY)
    orbax.save(path.parent / 'heads', heads, weights)
    orbax.save(
      path.parent / 'blocks', blocks, toy_blocks.params(blocks, seed=3)
    )
    load = lambda drafter, name: ways.load(
      drafter(model=Model(checkpoint=str(path.parent / name), dtype='float32')),
      target,
    )
    yield ways.Pair(
      chosen=chosen,
      layout=layout,
      target=target.params,
      rows=list(examples.encode(tasks.find(str(path)), layout, 0, 1)),
      drafters={
        HEADS: load(BlockHeads, 'heads'),
        BLOCK: load(Block, 'blocks'),
        FULL: ways.untrained(drafter, jax.random.key(1)),
      },
    )
  jax.config.update('jax_disable_most_optimizations', before)


@pytest.mark.slow
def test_the_main_table_says_what_an_iteration_costs(pair):
  rows = {row['way']: row for row in tables.main_table(pair, SETTINGS)}
  assert list(rows) == [
    *(BEAM, GREEDY, 'blockwise', 'strict', 'top-3 tau 1', 'top-5 tau 3', BLOCK)
  ]
  greedy = rows[GREEDY]
  assert greedy['tokens per iteration'] == 1
  assert greedy['speed over greedy'] == 1
  assert rows[BEAM]['speed over beam 5'] == 1
  # They are lossless.
  for name in ('strict', 'blockwise', BLOCK):
    assert rows[name]['BLEU'] == greedy['BLEU']
  for name in ('blockwise', 'strict', 'top-5 tau 3', BLOCK):
    row = rows[name]
    assert row['tokens per iteration'] >= 1
    assert row['cost per iteration'].endswith(('wins', 'loses'))
  assert rows['strict']['paper: tokens'] == '6.41 (S)'


@pytest.mark.slow
def test_right_guesses_are_counted_by_position(pair):
  """Of a drafter that knows one position and, in some texts, the next."""
  [row] = tables.positions_table(pair, SETTINGS)
  assert list(row) == ['drafter', *(f'position {i}' for i in (1, 2, 3))]
  made = ways.decoder(pair, FULL, 3, ways.RULES['strict'])

  def propose(params, keys, context, state):
    # Token i of a text is 10 + i, but for the last one.
    tokens = context.lengths[:, None] + jnp.array([[10, 11, 0]])
    return Draft(tokens=tokens, probs=None, lengths=context.lengths), state

  method = dataclasses.replace(
    made.method, drafter=made.drafter._replace(propose=propose)
  )
  made = made.with_method(method)
  texts = [[0, 11, 12, 13, 14], [0, 11, 12, 13, 1], [0, 11, 12, 13, 1]]
  first, second, third = checks.right_by_position(pair, made, texts, 2)
  assert 0.5 < second < first < 1
  assert third == 0
  assert checks.right_by_position(pair, made, texts[:1] * 3, 2)[:2] == [1, 1]


def test_promises_are_kept_by_an_untrained_drafter(pair):
  rows = tables.checks_table(pair, SETTINGS)
  assert [row['violations'] for row in rows] == [0] * len(rows)
  checks = [row['check'] for row in rows]
  assert checks[:3] == [
    *('strict is greedy, batch 1', 'strict is greedy, batch 2'),
    'beta 1 is greedy, batch 2',
  ]
  assert all(row['examples'] == 3 for row in rows)


@pytest.mark.slow
def test_a_broken_promise_is_seen(pair, monkeypatch):
  anything = TopBeta(beta=512, tau=math.inf)
  monkeypatch.setitem(ways.RULES, 'strict', anything)
  monkeypatch.setitem(ways.RULES, 'top-3 tau 1', anything)
  broken = {
    row['check']: row['violations']
    for row in tables.checks_table(pair, SETTINGS)
  }
  assert broken['strict is greedy, batch 2'] > 0
  assert broken['top-3 tau 1: within beta and tau'] > 0


def test_the_baseline_is_the_fastest(pair, monkeypatch):
  slow = dataclasses.replace(pair, plain=[pair])
  made = []

  def decode(pair, compared, rows, **_):
    made.extend(compared.values())
    return {
      name: ways.Result(loop_seconds=1.0 / (1 + int(name))) for name in compared
    }

  monkeypatch.setattr(ways, 'decode', decode)
  assert ways.fastest(ways.greedy, slow) is made[1]


@pytest.mark.slow
def test_a_model_of_another_kind_gets_one_sentence(tmp_path, capsys):
  argv = [
    *('--target=ende-nano', '--drafter=ende-nano', '--task=none.jsonl'),
    f'--output={tmp_path}',
  ]
  assert xia2023.main(argv) == 2
  error = capsys.readouterr().err
  assert error.startswith('xia2023: error: ')
  assert error.count('\n') == 1
