"""Gamma that varies: the limits themselves, and exact decodes with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, theory, verification
from specdec_jax.base import Context, Params
from specdec_jax.drafters import schedules
from specdec_jax.sampling import logits
from tests import decoders, slow, toy, trial
from tests.decoding.test_exactness_loop import LOSSLESS

V = 4
TARGET = toy.toy(V)
TARGET_PARAMS = toy.toy_params(V, seed=1)
PARAMS = Params(TARGET_PARAMS, toy.perturb(TARGET_PARAMS, seed=2))
TO_PROBS = logits.standardize()
SCHEDULES = {
  'heuristic': schedules.heuristic(start=3),
  'running alpha': schedules.running_alpha(c=0.2, prior=0.8, weight=1.0),
}


def adaptive(gamma=3, *, model=TARGET, to_probs=TO_PROBS, **options):
  return drafters.adaptive(
    model, gamma=gamma, logits_to_probs=to_probs, **options
  )


def limits_of(schedule, gamma, history):
  """The first limit, and that after each (drafted, accepted) of one row."""
  memory = schedule.init(1)
  found = []
  for drafted, accepted in [(0, 0), *history]:
    as_row = lambda n: jnp.array([n], jnp.int32)
    memory, limits = schedule.update(
      memory, as_row(drafted), as_row(accepted), gamma
    )
    found.append(int(limits[0]))
  return found


def test_the_heuristic_goes_two_up_and_one_down():
  history = [(3, 3), (5, 5), (6, 2), (5, 0), (4, 4)]
  found = limits_of(schedules.heuristic(start=3), 6, history)
  assert found == [3, 5, 6, 5, 4, 6]
  assert limits_of(schedules.heuristic(start=1), 6, [(1, 0)] * 2) == [1, 1, 1]


def test_the_running_alpha_finds_the_best_gamma():
  schedule = schedules.running_alpha(c=0.05, prior=0.5, discount=1.0)
  found = limits_of(schedule, 20, [(10, 9)] * 30)
  assert found[0] == theory.best_gamma(0.5, 0.05)
  assert found[-1] == theory.best_gamma(round((270 + 2) / 304, 2), 0.05)
  hopeless = limits_of(schedule, 20, [(1, 0)] * 100)
  assert hopeless[-1] == theory.best_gamma(0.02, 0.05) == 0


@slow.parametrize(
  ('name', 'rule'),
  [
    ('heuristic', 'block'),
    ('running alpha', 'speculative_sampling'),
    ('threshold', 'speculative_sampling'),
    ('threshold', 'block'),
  ],
  now=[('heuristic', 'block'), ('threshold', 'speculative_sampling')],
)
def test_decodes_have_the_target_s_distribution(name, rule):
  options = (
    {'min_prob': 0.4}
    if name == 'threshold'
    else {'schedule': SCHEDULES[name], 'min_prob': 0.2}
  )
  result = trial.run(
    trial.Trial(
      target=TARGET,
      params=PARAMS,
      drafter=adaptive(**options),
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
  with pytest.raises(ValueError, match='discount'):
    schedules.running_alpha(c=0.1, discount=0.0)
  with pytest.raises(ValueError, match=r'weight.*above 0'):
    schedules.running_alpha(c=0.1, weight=0.0)
