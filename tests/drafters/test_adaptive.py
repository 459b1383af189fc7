"""Drafts that end early, and exact decodes with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Context, Params
from specdec_jax.sampling import logits
from tests import decoders, slow, toy, trial
from tests.decoding.test_exactness_loop import LOSSLESS

V = 4
TARGET = toy.toy(V)
TARGET_PARAMS = toy.toy_params(V, seed=1)
PARAMS = Params(TARGET_PARAMS, toy.perturb(TARGET_PARAMS, seed=2))
TO_PROBS = logits.standardize()


def adaptive(gamma=3, *, model=TARGET, to_probs=TO_PROBS, **options):
  return drafters.adaptive(
    model, gamma=gamma, logits_to_probs=to_probs, **options
  )


@slow.parametrize('rule', ['speculative_sampling', 'block'], now=['block'])
def test_decodes_have_the_target_s_distribution(rule):
  result = trial.run(
    trial.Trial(
      target=TARGET,
      params=PARAMS,
      drafter=adaptive(min_prob=0.4),
      verify_fn=LOSSLESS[rule],
    ),
    num_decodes=2**16,
  )
  assert not result.report.is_rejected
  # Drafts of all lengths were made and judged, and not always of three.
  tested = result.statistics.num_tested.sum(0)
  assert 0 < tested[2] < tested[1] < tested[0]


@pytest.mark.slow
def test_leaving_out_the_doubtful_token_is_caught():
  """The control: the same threshold, applied to the token that it drops."""
  whole = drafters.autoregressive(TARGET, gamma=3, logits_to_probs=TO_PROBS)

  def propose(params, row_keys, context, state):
    draft, state = whole.propose(params, row_keys, context, state)
    q = jnp.take_along_axis(draft.probs, draft.tokens[..., None], axis=2)
    is_sure = q[..., 0] >= 0.4
    kept = jnp.cumprod(is_sure.astype(jnp.int32), axis=1).sum(1)
    return draft.replace(lengths=kept.astype(jnp.int32)), state

  result = trial.run(
    trial.Trial(
      target=TARGET,
      params=PARAMS,
      drafter=whole._replace(propose=propose, may_abstain=True),
      verify_fn=verification.speculative_sampling,
    ),
    num_decodes=2**16,
  )
  assert result.report.is_rejected


@pytest.mark.slow
def test_without_a_reason_to_stop_it_drafts_as_the_fixed_gamma():
  prompt = toy.prompt([[1], [0, 2], [2, 1, 0]])
  whole = drafters.autoregressive(TARGET, gamma=3, logits_to_probs=TO_PROBS)
  expected, found = (
    decoders.speculate(TARGET, PARAMS, drafter, prompt, to_probs=TO_PROBS)
    for drafter in (whole, adaptive())
  )
  np.testing.assert_array_equal(expected.tokens, found.tokens)
  for name in ('num_target_runs', 'num_drafted', 'num_tested'):
    np.testing.assert_array_equal(
      getattr(expected.statistics, name), getattr(found.statistics, name)
    )


def test_no_more_draft_steps_than_some_row_wants():
  calls = []

  def extend(params, tokens, cache, at=None):
    jax.debug.callback(lambda: calls.append(tokens.shape[1]))
    return TARGET.extend(params, tokens, cache, at)

  counted = TARGET._replace(extend=extend)
  prompt = toy.prompt([[1, 3], [0, 2]])
  tokens = jnp.pad(prompt.decoder_tokens, ((0, 0), (0, 10)))
  context = Context(tokens=tokens, lengths=prompt.decoder_lengths)
  keys = jax.random.split(jax.random.key(0), 2)
  num_calls = []
  for min_prob in (0.0, 1.0):
    drafter = adaptive(gamma=6, model=counted, min_prob=min_prob)
    state = jax.jit(drafter.init, static_argnums=2)(PARAMS.drafter, prompt, 12)
    jax.effects_barrier()
    calls.clear()
    propose = jax.jit(drafter.propose)
    draft, state = propose(PARAMS.drafter, keys, context, state)
    jax.effects_barrier()
    num_calls.append(calls.copy())
    assert draft.lengths.tolist() == [1 if min_prob else 6] * 2
  assert num_calls == [[2, 1, 1, 1, 1, 1], [2]]
  # Nothing was committed since: both rows are finished.
  draft, _ = propose(PARAMS.drafter, keys, context, state)
  assert draft.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'min_prob': 1.5}, 'min_prob'),
    ({'gamma': 0}, 'gamma must be'),
  ],
)
def test_bad_settings_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    adaptive(**options)
