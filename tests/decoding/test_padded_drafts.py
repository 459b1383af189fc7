"""Drafts of third-party drafters that propose more than gamma tokens, or ids
that are no tokens, such as a copier's padding of -1."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Drafter, Params
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.sampling import logits
from tests import padded_drafts, slow, toy, toy_tree, trial

V, GAMMA = padded_drafts.V, 3
TARGET = toy.toy(V)
TARGET_PARAMS = toy.toy_params(V, seed=1)
DRAFTER_PARAMS = toy.perturb(TARGET_PARAMS, seed=2)


def faulty(drafter: Drafter, fault: str) -> Drafter:
  """The drafter with a fault: 'too_long', whose lengths exceed gamma, or ids of
  `NO_TOKENS`, whose lengths do as well."""

  def propose(params, row_keys, context, state):
    draft, state = drafter.propose(params, row_keys, context, state)
    tokens = draft.tokens
    if fault != 'too_long':
      # With gamma 3: at position 0, 1, 2, or nowhere.
      places = context.lengths % (drafter.gamma + 1)
      positions = jnp.arange(drafter.gamma, dtype=jnp.int32)
      is_faulty = positions[None, :] == places[:, None]
      tokens = jnp.where(is_faulty, padded_drafts.NO_TOKENS[fault], tokens)
    lengths = jnp.where(draft.lengths > 0, draft.lengths + 5, 0)
    return draft.replace(tokens=tokens, lengths=lengths), state

  return drafter._replace(propose=propose)


def _drafter(name: str):
  """A drafter and its params."""
  if name == 'prompt_lookup':
    return drafters.prompt_lookup(gamma=GAMMA, min_ngram=1), ()
  if name.endswith('tree'):
    is_sampled = name == 'sampled_tree'
    made = toy_tree.drafter(toy_tree.BENT, is_sampled=is_sampled)
    return made, DRAFTER_PARAMS
  made = drafters.autoregressive(
    TARGET, gamma=GAMMA, logits_to_probs=logits.standardize()
  )
  return made, DRAFTER_PARAMS


def _rule(name: str):
  if name in ('traversal', 'target_sample_walk', 'greedy_walk'):
    return toy_tree.rule(name, toy_tree.BENT)
  return getattr(verification, name)


_CASES = [
  (drafter, rule, fault)
  for drafter, rule in (
    ('autoregressive', 'speculative_sampling'),
    ('autoregressive', 'block_verification'),
    ('prompt_lookup', 'speculative_sampling'),
    ('prompt_lookup', 'block_verification'),
    ('sampled_tree', 'traversal'),
    ('tree', 'traversal'),
    ('tree', 'target_sample_walk'),
  )
  for fault in ('too_long', 'padded', 'beyond')
]
_NOW = [
  ('autoregressive', 'speculative_sampling', 'padded'),
  ('autoregressive', 'block_verification', 'too_long'),
  ('sampled_tree', 'traversal', 'padded'),
]


@slow.parametrize(('drafter', 'rule', 'fault'), _CASES, now=_NOW)
def test_the_loop_follows_the_target(drafter, rule, fault, record_property):
  made, params = _drafter(drafter)
  result = trial.check(
    trial.Trial(
      target=TARGET,
      params=Params(TARGET_PARAMS, params),
      drafter=faulty(made, fault),
      verify_fn=_rule(rule),
    ),
    record_property,
    'Drafts with ids that are no tokens, false alarm rate 1e-9',
    f'{drafter}, {rule}, {fault}',
    num_decodes=100_800,
  )
  # What is proposed beside them still counts.
  assert np.sum(result.statistics.num_accepted) > 0
  num_drafted = np.asarray(result.statistics.num_drafted)
  num_runs = np.asarray(result.statistics.num_target_runs)
  assert (num_drafted <= num_runs * made.gamma).all()


@functools.cache
def _decode(loop, drafter: str, rule: str, fault: str):
  method = Method(
    target=TARGET,
    drafter=faulty(_drafter(drafter)[0], fault),
    verify_fn=_rule(rule),
    logits_to_probs=logits.standardize(temperature=0),
    eos_id=-1,
  )
  return jax.jit(functools.partial(loop.generate, method=method, max_len=24))


@pytest.mark.parametrize('fault', ['too_long', *padded_drafts.NO_TOKENS])
@pytest.mark.parametrize(
  ('drafter', 'rule'),
  [
    ('autoregressive', 'greedy'),
    ('prompt_lookup', 'greedy'),
    ('tree', 'greedy_walk'),
  ],
)
def test_greedy_tokens_are_plain_decodings(drafter, rule, fault):
  prompt = toy.prompt([[1], [0, 2], [2, 1, 0], [3, 3]])
  params = Params(TARGET_PARAMS, _drafter(drafter)[1])
  key = jax.random.key(0)
  plain = _decode(autoregressive, 'prompt_lookup', 'greedy', 'too_long')
  expected = plain(params, key, prompt)
  output = _decode(speculative, drafter, rule, fault)(params, key, prompt)
  np.testing.assert_array_equal(output.tokens, expected.tokens)
  np.testing.assert_array_equal(output.has_nan, False)
  assert np.sum(output.statistics.num_accepted) > 0


@pytest.mark.parametrize('has_probs', [True, False])
@pytest.mark.parametrize(
  'rule',
  [
    verification.speculative_sampling,
    verification.block_verification,
    verification.greedy,
    functools.partial(verification.greedy, lenience=0.1),
  ],
)
def test_a_rule_judges_a_chain_up_to_its_first_id_that_is_no_token(
  rule, has_probs
):
  padded_drafts.check(rule, has_probs=has_probs)
