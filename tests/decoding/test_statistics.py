"""The counters, recounted from what every step reports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Draft, Params, Verification
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding import speculative, statistics
from specdec_jax.decoding.method import Method
from tests import decoders, toy, toy_tree

VOCAB_SIZE, GAMMA = 5, 3
TARGET = toy.toy(VOCAB_SIZE)
TARGET_PARAMS = toy.toy_params(VOCAB_SIZE, seed=11)
PREFIXES = [[1, 2, 3, 1, 2], [2], [4, 4], [0, 3, 0, 3, 0, 3], [1, 0, 2, 1]] * 4


def _count(draft_len, accepted, committed, thresholds, is_short=False):
  """Counters of one row after one iteration."""
  draft = Draft(
    tokens=jnp.zeros((1, GAMMA), jnp.int32),
    probs=None,
    lengths=jnp.array([draft_len], jnp.int32),
  )
  verdict = Verification(
    num_accepted=jnp.array([accepted], jnp.int32),
    next_token=jnp.zeros(1, jnp.int32),
    accept_probs=jnp.array([thresholds], jnp.float32),
  )
  counters = statistics.count(
    statistics.init(1, GAMMA),
    draft,
    verdict,
    jnp.array([committed], jnp.int32),
    is_short=jnp.array(is_short),
  )
  return jax.tree.map(lambda a: np.asarray(a)[0].tolist(), counters)


@pytest.mark.parametrize(
  ('draft_len', 'accepted', 'committed', 'drafted', 'tested', 'passed', 'prob'),
  [
    # A rejection after one, its correction committed.
    (3, 1, 2, 3, [1, 1, 0], [1, 0, 0], 0.75),
    # Everything accepted, and the bonus token.
    (3, 3, 4, 3, [1, 1, 1], [1, 1, 1], 1.0),
    (2, 2, 3, 2, [1, 1, 0], [1, 1, 0], 0.75),
    # Rejected at once.
    (3, 0, 1, 3, [1, 0, 0], [0, 0, 0], 0.5),
    # Cut after two of three accepted: what follows was never meant.
    (3, 3, 2, 2, [1, 1, 0], [1, 1, 0], 0.75),
    # Cut right before the correction: the rejection does not count.
    (3, 1, 1, 1, [1, 0, 0], [1, 0, 0], 0.5),
    # Nothing proposed; finished.
    (0, 0, 1, 0, [0, 0, 0], [0, 0, 0], 0.0),
    (3, 2, 0, 0, [0, 0, 0], [0, 0, 0], 0.0),
  ],
)
def test_one_iteration(
  draft_len, accepted, committed, drafted, tested, passed, prob
):
  counters = _count(draft_len, accepted, committed, [0.5, 0.25, 0.25])
  assert counters.num_tokens == committed
  assert counters.num_target_runs == int(committed > 0)
  assert counters.num_short_runs == 0
  assert counters.num_drafted == drafted
  assert counters.num_tested == tested
  assert counters.num_accepted == passed
  assert counters.accept_prob == pytest.approx(prob)


def test_run_of_one_position_is_short():
  counters = _count(0, 0, 1, [0.0] * GAMMA, is_short=True)
  assert counters.num_short_runs == counters.num_target_runs == 1
  assert counters.num_tested == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['uniform', 'prompt_lookup', 'autoregressive', 'tree']
)
def test_counters_are_the_sum_of_the_steps(name):
  drafter = {
    'uniform': lambda: drafters.uniform(gamma=GAMMA, vocab_size=VOCAB_SIZE),
    'prompt_lookup': lambda: drafters.prompt_lookup(gamma=GAMMA, min_ngram=2),
    'autoregressive': lambda: drafters.autoregressive(
      TARGET, gamma=GAMMA, logits_to_probs=decoders.SAMPLED
    ),
    'tree': lambda: toy_tree.drafter(toy_tree.BENT, is_sampled=True),
  }[name]()
  rule = verification.speculative_sampling
  if name == 'tree':
    rule = toy_tree.rule('traversal', toy_tree.BENT)
  params = Params(TARGET_PARAMS, toy.perturb(TARGET_PARAMS, seed=1))
  method = Method(
    target=TARGET,
    drafter=drafter,
    verify_fn=rule,
    logits_to_probs=decoders.SAMPLED,
    eos_id=3,
  )
  limits = [len(prefix) + i for i, prefix in enumerate(PREFIXES)]
  state = speculative.init(
    params,
    jax.random.key(0),
    toy.prompt(PREFIXES, max_lengths=limits),
    method=method,
    max_len=26,
  )
  step = jax.jit(functools.partial(speculative.step, method=method))
  num_rows = len(PREFIXES)
  tokens, runs, drafted = (np.zeros(num_rows, int) for _ in range(3))
  tested, accepted = (np.zeros((num_rows, GAMMA), int) for _ in range(2))
  prob = np.zeros(num_rows)
  while not state.done.all():
    state, info = step(params, state)
    for row in range(num_rows):
      count = int(info.counts[row])
      if not count:
        continue
      proposed = int(info.draft.lengths[row])
      passed = min(int(info.verification.num_accepted[row]), count)
      is_cut = count == passed
      reached = passed if is_cut else min(passed + 1, proposed)
      tokens[row] += count
      runs[row] += 1
      if name == 'tree':
        drafted[row] += drafter.gamma
      else:
        drafted[row] += min(proposed, count) if is_cut else proposed
      tested[row, :reached] += 1
      accepted[row, :passed] += 1
      prob[row] += np.sum(info.verification.accept_probs[row, :reached])
  counters = state.statistics
  np.testing.assert_array_equal(counters.num_tokens, tokens)
  np.testing.assert_array_equal(counters.num_target_runs, runs)
  np.testing.assert_array_equal(counters.num_drafted, drafted)
  np.testing.assert_array_equal(counters.num_tested, tested)
  np.testing.assert_array_equal(counters.num_accepted, accepted)
  np.testing.assert_allclose(counters.accept_prob, prob, rtol=1e-5)
  assert tested.sum() > accepted.sum() > 0
  if name == 'prompt_lookup':
    assert 0 < np.sum(counters.num_short_runs) < runs.sum()
  else:
    assert np.sum(counters.num_short_runs) == 0


@pytest.mark.slow
@pytest.mark.parametrize('name', ['uniform', 'tree'])
def test_acceptance_probability_has_the_expectation_of_acceptance(name):
  """With 8,000 rows, alpha by counting and by probabilities agree."""
  drafter = drafters.uniform(gamma=2, vocab_size=VOCAB_SIZE)
  rule = verification.speculative_sampling
  if name == 'tree':
    drafter = toy_tree.drafter(toy_tree.BENT, is_sampled=False)
    rule = toy_tree.rule('target_sample_walk', toy_tree.BENT)
  rows = [[i % VOCAB_SIZE] for i in range(8000)]
  params = Params(TARGET_PARAMS, toy.perturb(TARGET_PARAMS, seed=1))
  output = decoders.speculate(
    TARGET, params, drafter, toy.prompt(rows), rule=rule, max_len=9
  )
  rates = metrics.rates(output.statistics)
  tested = int(np.sum(output.statistics.num_tested))
  deviation = np.sqrt(rates.alpha * (1 - rates.alpha) / tested)
  assert abs(rates.alpha - rates.mean_accept_prob) < 5 * deviation
  assert 0.1 < rates.alpha < 0.9
