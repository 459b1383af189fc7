"""Folders of block drafters, DFlash and DSpark, give their makers' logits.

`make_block.py` makes the folders and runs their makers' code; neither is ever
edited by hand.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('safetensors')

from specdec_jax.checkpoints import loading
from specdec_jax.models import families
from specdec_jax.models.drafting.block_drafter import BlockDrafter
from specdec_jax.models.layers import applied
from tests import slow, toy

GOLDEN = pathlib.Path(__file__).parent
NAMES = tuple(sorted(path.name for path in GOLDEN.glob('tiny_block_*')))


@functools.cache
def golden_of(name: str) -> dict[str, np.ndarray]:
  with np.load(GOLDEN / name / 'golden.npz') as golden:
    return dict(golden)


@functools.cache
def blocks_of(name: str):
  """The config, and the logits `[A, D, V]` and confidence `[A, D]` of a block
  after each anchor: rows of a ragged batch, with a target whose embeddings and
  output head are the golden ones."""
  config, own = loading.read(GOLDEN / name)
  golden = golden_of(name)
  target = toy.llama_config(config.vocab_size, num_layers=8)
  target = dataclasses.replace(
    target, embed_dim=config.embed_dim, is_tied=False
  )
  target_params = toy.llama_params(target, seed=0) | {
    'token_embedder': {'embedding': jnp.asarray(golden['embeddings'])},
    'logits_dense': {'kernel': jnp.asarray(golden['head'].T)},
  }
  bound = families.bind(target, config, width=1)
  model, params = bound.model, bound.join(target_params, own)
  anchors, tokens = golden['anchors'], jnp.asarray(golden['tokens'])
  num_rows, num_tokens = len(anchors), len(tokens)
  features = jnp.repeat(jnp.asarray(golden['features'])[None], num_rows, axis=0)
  # All is read, in two calls, and what follows an anchor taken back.
  cache = model.init(params, num_rows, num_tokens)
  cache = model.read(params, features[:, :4], cache)
  cache = model.read(params, features[:, 4:], cache)
  cache = model.rewind(cache, jnp.asarray(anchors))
  target_cache = bound.target.init(
    target_params, toy.prompt([[1, 2]] * num_rows), num_tokens
  )
  cache = model.fill(params, tokens[anchors], cache, target_cache.target)
  state = jnp.zeros((num_rows, 1, model.state_size))
  apply = applied(BlockDrafter(config))
  logits, confidence = [], []
  for i in range(config.num_drafts):
    before = tokens[anchors + i][:, None]
    slots = jnp.full((num_rows, 1), i, jnp.int32)
    scored, state = model.score(params, before, slots, state, cache)
    logits.append(scored[:, 0])
    if config.has_confidence:
      hidden = cache.hidden[:, i : i + 1]
      method = BlockDrafter.confidence
      confidence.append(apply(params['block'], before, hidden, method=method))
  confidence = jnp.concatenate(confidence, axis=1) if confidence else None
  return config, own, jnp.stack(logits, axis=1), confidence


@slow.parametrize(
  'name', NAMES, now=['tiny_block_zlab_newer', 'tiny_block_dspark']
)
def test_blocks_have_their_makers_logits(name):
  golden = golden_of(name)
  config, own, logits, confidence = blocks_of(name)
  first = config.block_size - config.num_drafts
  assert first == (name not in RELEASED_FROM_ANCHOR)
  ids = own['target_ids']
  np.testing.assert_allclose(
    logits[..., ids], golden['logits'][:, first:], atol=2e-5, rtol=2e-5
  )
  others = np.setdiff1d(np.arange(config.vocab_size), ids)
  assert (logits[..., others] < -1e29).all()
  assert (confidence is not None) == ('confidence' in golden)
  if confidence is not None:
    np.testing.assert_allclose(
      confidence, golden['confidence'][:, first:], atol=2e-5, rtol=2e-5
    )


RELEASED_FROM_ANCHOR = ('tiny_block_dspark', 'tiny_block_dspark_rnn')


def test_goldens_are_of_each_convention():
  configs = {name: loading.read(GOLDEN / name)[0] for name in NAMES}
  assert len(configs) == 8
  by = lambda name: configs[f'tiny_block_{name}']
  # z-lab counts layers by their outputs, speculators by their inputs.
  assert by('zlab_older').feature_layers == (2, 4, 5)
  assert by('dspark').feature_layers == (2, 4, 5)
  assert by('zlab_newer').block_size == by('zlab_older').block_size == 5
  assert by('zlab_newer').windows == (6,)
  assert not by('zlab_newer').has_causal_windows
  assert by('zlab_causal').has_causal_windows
  assert not by('zlab_causal').window_from_anchor
  assert by('dflash').has_causal_windows
  assert by('dflash').window_from_anchor
  assert not by('dflash_bidirectional').has_causal_windows
  assert by('dspark_gated').markov_head == 'gated'
  assert jax.tree.leaves(by('dspark_rnn').state_size) == [4]
