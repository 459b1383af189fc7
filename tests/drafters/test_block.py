"""Block drafters in the loop: each kind of q is exact, features are true."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Context, Draft, Params, Tree
from specdec_jax.drafters.block import check_depth
from specdec_jax.models import families, presets
from specdec_jax.sampling import logits
from tests import decoders, slow, toy, toy_blocks, toy_families, toy_tree, trial
from tests.goodness_of_fit import Sampling
from tests.models.test_independent_forward import (
  CONFIG,
  PARAMS,
  PROMPTS,
  forward,
)

V, GAMMA = 4, 3
SIZES = toy_blocks.config(CONFIG)
T_1, TOP_2 = Sampling(), Sampling(top_k=2)


def pair(sampling: Sampling, **sizes):
  """A target of which one token cannot be drafted, and the chain."""
  config = dataclasses.replace(SIZES, **sizes)
  target, network = toy_families.networks(CONFIG, config, gamma=GAMMA)
  own = toy_blocks.params(config, seed=2)
  params = toy_blocks.joined(CONFIG, config, PARAMS, own)
  to_probs = logits.standardize(**sampling._asdict())
  return target, network, params, to_probs


def check(
  sampling: Sampling,
  *,
  change=lambda drafter, network: drafter,
  rule=verification.block_verification,
  tree: Tree | None = None,
  is_argmax: bool = False,
  min_confidence: float = 0.0,
  num_decodes: int = 50_400,
  **sizes,
):
  """Decodes in a loop of ragged rows against the target's forward pass."""
  target, network, params, to_probs = pair(sampling, **sizes)
  chain = drafters.block(network)
  if tree is not None:
    gamma = len(tree.parents)
    config = dataclasses.replace(SIZES, **sizes)
    target, network = toy_families.networks(CONFIG, config, gamma=gamma)
    drafter = drafters.branching(
      drafters.block(network), tree=tree, logits_to_probs=to_probs
    )
    rule = toy_tree.rule('traversal', tree)
  elif min_confidence:
    drafter = drafters.adaptive(
      chain,
      gamma=GAMMA,
      logits_to_probs=to_probs,
      is_argmax=is_argmax,
      min_confidence=min_confidence,
    )
  else:
    drafter = drafters.autoregressive(
      chain, gamma=GAMMA, logits_to_probs=to_probs, is_argmax=is_argmax
    )
  return trial.run(
    trial.Trial(
      target=target,
      params=Params(PARAMS, params),
      drafter=change(drafter, network),
      verify_fn=rule,
      sampling=sampling,
      prompts=PROMPTS,
      num_new=(4, 4, 3),
      eos_id=3,
      forward=forward,
    ),
    num_decodes=num_decodes,
  )


# Each kind of q, by a rule: drawn along the chain, per slot, and one-hot.
KINDS = {
  'chain': {},
  'chain, token by token': {'rule': verification.speculative_sampling},
  'chain with a state': {'markov_head': 'rnn'},
  'gated chain': {'markov_head': 'gated'},
  'chain behind the anchor': {
    'sample_from_anchor': False,
    'block_size': 4,
    'mask_token_id': 2,
    'windows': (0, 2),
    'has_causal_windows': True,
  },
  'drawn per slot': {'markov_rank': 0, 'has_confidence': False},
  'likeliest of a chain': {'is_argmax': True},
  'likeliest per slot': {'is_argmax': True, 'markov_rank': 0},
  'ended by confidence': {'min_confidence': 0.3},
  'likeliest, ended by confidence': {'min_confidence': 0.3, 'is_argmax': True},
  'tree': {'tree': toy_tree.shape(2, 2)},
  'bent tree': {'tree': toy_tree.BENT},
}


@slow.parametrize(
  ('kind', 'sampling'),
  [(kind, sampling) for kind in KINDS for sampling in (T_1, TOP_2)],
  now=[('chain', T_1)],
)
def test_each_kind_of_q_is_lossless(kind, sampling):
  result = check(sampling, **KINDS[kind])
  assert not result.report.is_rejected
  accepted = np.sum(result.statistics.num_accepted)
  assert 0 < accepted < np.sum(result.statistics.num_tested)


def scored(drafter, network, params, context, state, tokens):
  """The chain's own q of drafted tokens, `[B, G, V]`."""
  last = (context.lengths - 1)[:, None]
  anchors = jnp.take_along_axis(context.tokens, last, axis=1)
  before = jnp.concatenate([anchors, tokens[:, :-1]], axis=1)
  slots = jnp.broadcast_to(
    jnp.arange(drafter.gamma, dtype=jnp.int32)[None], before.shape
  )
  nothing = jnp.zeros((*before.shape, 0), jnp.float32)
  found, _ = network.score(params, before, slots, nothing, state)
  return jax.nn.softmax(found)


def independent_draws(drafter, network):
  """Broken: tokens drawn per slot, handed over with the chain's q."""

  def alone(params, tokens, slots, state, cache):
    own = params['block']
    kernel = jnp.zeros_like(own['markov_dense']['kernel'])
    own = own | {'markov_dense': {'kernel': kernel}}
    unchained = params | {'block': own}
    return network.score(unchained, tokens, slots, state, cache)

  drawn = drafters.autoregressive(
    drafters.block(network._replace(score=alone)),
    gamma=drafter.gamma,
    logits_to_probs=logits.standardize(),
  )
  return with_q_of_the_chain(drawn, network)


def likeliest(drafter, network):
  """Broken: the likeliest tokens, handed over with the chain's q."""
  greedy = drafters.autoregressive(
    drafters.block(network),
    gamma=drafter.gamma,
    logits_to_probs=decoders.GREEDY,
    is_argmax=True,
  )
  return with_q_of_the_chain(greedy, network)


def with_q_of_the_chain(drafter, network):
  def propose(params, row_keys, context, state, target):
    draft, state = drafter.propose(params, row_keys, context, state, target)
    q = scored(drafter, network, params, context, state, draft.tokens)
    return dataclasses.replace(draft, probs=q), state

  return drafter._replace(propose=propose)


def before_the_gap(drafter, network):
  """Broken: q of the tokens that can be drafted, as if they were the first of
  the vocabulary."""

  def propose(params, row_keys, context, state, target):
    draft, state = drafter.propose(params, row_keys, context, state, target)
    ids = params['block']['target_ids']
    shifted = jnp.take(draft.probs, ids, axis=-1)
    missing = ((0, 0), (0, 0), (0, V - len(ids)))
    return Draft(
      tokens=draft.tokens,
      probs=jnp.pad(shifted, missing),
      lengths=draft.lengths,
    ), state

  return drafter._replace(propose=propose)


def ended_by_what_was_drawn(drafter, network):
  """Broken: a draft ends before a token that was drawn and is in doubt."""

  def propose(params, row_keys, context, state, target):
    draft, state = drafter.propose(params, row_keys, context, state, target)
    q = jnp.take_along_axis(draft.probs, draft.tokens[..., None], axis=2)
    is_kept = jnp.cumprod(q[..., 0] > 0.3, axis=1)
    return dataclasses.replace(draft, lengths=is_kept.sum(axis=1)), state

  return drafter._replace(propose=propose, may_abstain=True)


BROKEN = [
  independent_draws,
  likeliest,
  before_the_gap,
  ended_by_what_was_drawn,
]


@pytest.mark.slow
@pytest.mark.parametrize('change', BROKEN, ids=lambda change: change.__name__)
def test_another_q_than_that_of_the_draws_is_caught(change):
  result = check(T_1, change=change, rule=verification.speculative_sampling)
  assert result.report.is_rejected


@pytest.mark.parametrize('name', toy_blocks.TARGETS)
def test_the_greedy_tokens_are_the_targets(name):
  config, target_params, sizes, prompt = toy_blocks.case(name)
  own = toy_blocks.params(sizes, seed=2)
  params = toy_blocks.joined(config, sizes, target_params, own)
  both = Params(target_params, params)
  target, network = toy_families.networks(config, sizes, gamma=GAMMA)
  drafter = drafters.autoregressive(
    drafters.block(network),
    gamma=GAMMA,
    logits_to_probs=decoders.GREEDY,
    is_argmax=True,
  )
  settings = {'to_probs': decoders.GREEDY, 'max_len': 40}
  output = decoders.speculate(target, both, drafter, prompt, **settings)
  model = families.language_model(config)
  plain = decoders.plain(model, both, prompt, **settings)
  assert decoders.rows(output) == decoders.rows(plain)
  assert output.statistics.num_accepted.sum() > 0


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'embed_dim': 16}, 'width of 16, not 8'),
    ({'feature_layers': (1, 4)}, 'layer 4 is not'),
    ({'cross_layers': (0, 1)}, 'no encoder'),
  ],
)
def test_a_target_that_does_not_fit_is_refused(changes, message):
  sizes = toy_blocks.config(toy_blocks.LLAMA, **changes)
  with pytest.raises(ValueError, match=message):
    families.bind(toy_blocks.LLAMA, sizes, width=2)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'block_size': 0}, 'block_size must be at least 1'),
    ({'block_size': 1, 'sample_from_anchor': False}, 'at least 2, got 1'),
    ({'mask_token_id': 12}, 'mask_token_id 12'),
    ({'draft_vocab_size': 13}, 'draft_vocab_size 13'),
    ({'feature_layers': (2, 1)}, 'must ascend'),
    ({'feature_layers': ()}, 'must ascend'),
    ({'markov_head': 'lstm'}, "'lstm'; there are vanilla"),
    ({'cross_layers': (1,)}, '1 layers of the target for 2'),
  ],
)
def test_sizes_that_no_network_has_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    toy_blocks.config(toy_blocks.LLAMA, **changes)


def test_confidence_sets_each_rows_length():
  """A draft ends before the first token of which the product of the
  probabilities so far is below the bound; the first token is always drafted."""
  target, network, params, to_probs = pair(T_1)
  bound = 0.3
  drafter = drafters.adaptive(
    drafters.block(network),
    gamma=GAMMA,
    logits_to_probs=to_probs,
    min_confidence=bound,
  )
  num_rows = 40
  prompt = toy.prompt(num_rows * PROMPTS)

  @jax.jit
  def draft(prompt):
    cache = target.init(PARAMS, prompt, 12)
    state, cache = drafter.init(params, prompt, 12, cache)
    context = Context(
      tokens=jnp.pad(prompt.decoder_tokens, ((0, 0), (0, 8))),
      lengths=prompt.decoder_lengths,
    )
    keys = jax.random.split(jax.random.key(0), len(prompt.row_ids))
    drafted, state = drafter.propose(params, keys, context, state, cache)
    last = (context.lengths - 1)[:, None]
    anchors = jnp.take_along_axis(context.tokens, last, axis=1)
    before = jnp.concatenate([anchors, drafted.tokens[:, :-1]], axis=1)
    slots = jnp.arange(GAMMA, dtype=jnp.int32)[None]
    slots = jnp.broadcast_to(slots, before.shape)
    return drafted, network.confidence(params, before, slots, state.cache)

  drafted, confidence = jax.tree.map(np.asarray, draft(prompt))
  is_likely = np.cumprod(confidence, axis=1) >= bound
  expected = np.cumprod(is_likely, axis=1).sum(axis=1)
  np.testing.assert_array_equal(drafted.lengths, np.maximum(expected, 1))
  assert len(set(drafted.lengths.tolist())) > 1


def test_min_confidence_needs_a_confidence_head():
  _, network, _, to_probs = pair(T_1, has_confidence=False)
  options = {'gamma': GAMMA, 'logits_to_probs': to_probs}
  with pytest.raises(ValueError, match='a confidence head'):
    drafters.adaptive(drafters.block(network), min_confidence=0.3, **options)
  with pytest.raises(ValueError, match=r'lie in \[0, 1\], got 2'):
    drafters.adaptive(drafters.block(network), min_confidence=2, **options)


def test_more_than_a_block_is_refused():
  check_depth(3, 3)
  with pytest.raises(ValueError, match='blocks of 3 tokens, got 4'):
    check_depth(4, 3)


@pytest.mark.parametrize(
  ('target', 'streams'),
  [
    # Of Qwen3-8B, published: after layers 1, 9, 17, 25 and 33, counted from 0.
    ('qwen3_8b', (2, 10, 18, 26, 34)),
    ('t5_1_1_small', (2, 3, 4, 5, 6)),
  ],
)
def test_sizes_of_dflash_for_a_target(target, streams):
  config = presets.preset(target)
  sizes = presets.block('dflash_b16', config, dtype=jnp.bfloat16)
  assert sizes.feature_layers == streams
  assert (sizes.num_layers, sizes.block_size, sizes.num_drafts) == (5, 16, 15)
  assert (sizes.embed_dim, sizes.mlp_dim) == (config.embed_dim, config.mlp_dim)
  with pytest.raises(ValueError, match="'dflash_16', expected one of dflash_b"):
    presets.block('dflash_16', config, dtype=jnp.bfloat16)
