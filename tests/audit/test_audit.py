"""The instrument itself, on samplers in numpy that are right or wrong."""

import json

import numpy as np
import pytest

from specdec_jax.audit import audit
from specdec_jax.audit.goodness_of_fit import Cells, g_test, pool
from tests.proof_report import record

VOCAB_SIZE = 8
BIAS = 0.02
TABLE = np.random.default_rng(0).dirichlet(np.full(8, 2.0), size=8)


def next_probs(prefix) -> np.ndarray:
  """A Markov chain."""
  return TABLE[prefix[-1] % VOCAB_SIZE]


def drawn(rng: np.random.Generator, probs: np.ndarray) -> np.ndarray:
  """An id of each row of `[N, V]`."""
  mass = probs.cumsum(-1)
  return (mass < rng.random((len(probs), 1)) * mass[:, -1:]).sum(-1)


def sampler(change=lambda probs: probs, num_tokens: int = 2):
  """Draws from `change` of the chain's distributions."""
  table = change(TABLE)

  def sample(prompt, num, seed):
    rng = np.random.default_rng(seed)
    tokens = [np.full(num, prompt[-1])]
    for _ in range(num_tokens):
      tokens.append(drawn(rng, table[tokens[-1]]))
    return np.stack(tokens[1:], axis=1)

  return sample


def biased(probs: np.ndarray, size: float = BIAS) -> np.ndarray:
  """The bias of total variation `size` that a G-test sees least: half of the
  mass grows, and the other half shrinks, in proportion."""
  # By rank: 1, 4, 5 and 8 grow, the others shrink.
  rank = np.argsort(np.argsort(probs, axis=-1), axis=-1)
  up = np.where(np.isin(rank % 4, (0, 3)), probs, 0)
  down = probs - up
  return (
    probs
    + size * up / up.sum(-1, keepdims=True)
    - size * down / down.sum(-1, keepdims=True)
  )


@pytest.mark.parametrize(
  'num_seeds',
  [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.proof])],
)
def test_a_small_bias_is_seen_and_none_is_invented(num_seeds, record_property):
  counts = {'exact': 0, 'biased': 0}
  num_bounded = 0
  for seed in range(num_seeds):
    for name, change in (('exact', lambda p: p), ('biased', biased)):
      report = audit(
        sampler(change),
        next_probs,
        [[1]],
        num_tokens=2,
        num_draws=100_000,
        seeds=[seed],
        false_alarm_rate=0.01,
      )
      counts[name] += report.is_rejected
      if name == 'biased':
        num_bounded += report.checks[0].bound >= BIAS
      elif not report.is_rejected:
        assert report.verdict == 'not rejected'
  record(
    record_property,
    'The audit of samplers in numpy, 100,000 draws, 8 tokens',
    seeds=num_seeds,
    exact_rejected=counts['exact'],
    bias_of_002_rejected=counts['biased'],
    bound_holds=num_bounded,
  )
  assert counts['exact'] <= 0.05 * num_seeds
  assert counts['biased'] >= 0.95 * num_seeds
  assert num_bounded >= 0.95 * num_seeds


# Rows of a batch whose biases cancel out.
ROWS_UP = {
  'every second row': lambda i: i % 2 == 0,
  'two rows of four': lambda i: i % 4 < 2,
  'the outer rows of four': lambda i: np.isin(i % 4, (0, 3)),
  'half a batch of 64': lambda i: i % 64 < 32,
}


@pytest.mark.parametrize('rows', ROWS_UP)
@pytest.mark.parametrize('position', [0, 1])
def test_biases_of_rows_that_cancel_out_are_seen(rows, position):
  up = biased(TABLE, 0.1)
  down = 2 * TABLE - up

  def sample(prompt, num, seed):
    rng = np.random.default_rng(seed)
    is_up = ROWS_UP[rows](np.arange(num))[:, None]
    tokens = [np.full(num, prompt[-1])]
    for i in range(2):
      last = tokens[-1]
      rows_of_table = np.where(is_up, up[last], down[last])
      probs = rows_of_table if i == position else TABLE[last]
      tokens.append(drawn(rng, probs))
    return np.stack(tokens[1:], axis=1)

  report = audit(sample, next_probs, [[1]], num_tokens=2, num_draws=20_000)
  rejected = [
    check.name
    for check in report.checks
    if check.p_value <= report.false_alarm_rate
  ]
  assert rejected
  assert all(name.endswith('rows apart') for name in rejected)


def test_one_wrong_row_of_a_batch_is_seen():
  """A row that is too rare for all draws together to show its bias."""
  wrong = biased(TABLE, 0.45)

  def sample(prompt, num, seed):
    rng = np.random.default_rng(seed)
    is_wrong = (np.arange(num) % 48 == 5)[:, None]
    return drawn(rng, np.where(is_wrong, wrong[1], TABLE[1]))[:, None]

  options = {'num_tokens': 1, 'num_draws': 10_000}
  report = audit(sample, next_probs, [[1]], num_rows=48, **options)
  assert report.is_rejected
  names = [check.name for check in report.checks]
  assert names[-2:] == ['prompt 1, 2 rows apart', 'prompt 1, 48 rows apart']
  # As of an engine that decodes text by text.
  assert not audit(sample, next_probs, [[1]], num_rows=1, **options).is_rejected


def test_a_bias_of_the_stated_size_is_seen_nineteen_times_in_twenty():
  probs, n, rng = TABLE[1], 100_000, np.random.default_rng(1)
  size = g_test([pool(n * probs, probs)], n).detectable(1e-4, 0.95)
  worse = biased(probs, size)
  seen = [
    g_test([pool(rng.multinomial(n, worse), probs)], n).p_value <= 1e-4
    for _ in range(400)
  ]
  assert 0.9 < np.mean(seen) < 0.99


@pytest.mark.parametrize('drafts_argmax', [True, False])
def test_keras_hub_s_rule(drafts_argmax):
  """The argmax of q is drafted and judged as if it were a draw; the same loop
  with a draw is right. One drafted token, then one of p."""
  q = np.roll(TABLE, 1, axis=1)

  def sample(prompt, num, seed):
    rng, rows = np.random.default_rng(seed), np.arange(num)
    p = np.tile(TABLE[prompt[-1]], (num, 1))
    own = np.tile(q[prompt[-1]], (num, 1))
    draft = own.argmax(-1) if drafts_argmax else drawn(rng, own)
    is_accepted = rng.random(num) * own[rows, draft] < p[rows, draft]
    residual = np.maximum(p - own, 0)
    first = np.where(is_accepted, draft, drawn(rng, residual))
    return np.stack([first, drawn(rng, TABLE[first])], axis=1)

  report = audit(sample, next_probs, [[1]], num_tokens=2, num_draws=5000)
  assert report.is_rejected == drafts_argmax
  # What follows the first token is drawn from p either way.
  assert report.checks[1].p_value > 1e-4


def test_prefixes_that_are_reached_rarely_are_tested_by_rank():
  """A thousand ids: hardly a prefix is reached twice."""
  probs = np.random.default_rng(1).dirichlet(np.ones(1000))
  orders = [np.random.default_rng(i).permutation(1000) for i in range(1000)]

  def sample(prompt, num, seed, temperature=1.0):
    rng = np.random.default_rng(seed)
    tempered = probs ** (1 / temperature)
    ranks = drawn(rng, np.tile(tempered, (num, 1)))
    first = rng.choice(1000, size=num)
    second = [orders[i][rank] for i, rank in zip(first, ranks, strict=True)]
    return np.stack([first, second], axis=1)

  def after(prefix):
    if len(prefix) == 1:
      return np.full(1000, 1e-3)
    return probs[np.argsort(orders[prefix[-1]])]

  options = {'num_tokens': 2, 'num_draws': 5000}
  assert not audit(sample, after, [[0]], **options).is_rejected
  cold = audit(lambda *a: sample(*a, 0.8), after, [[0]], **options)
  assert cold.is_rejected
  assert 'token 2' in str(cold)


def test_what_is_not_tested_is_told_and_bounds_no_bias():
  """A fifth of the draws is impossible, behind prefixes too many to ask for."""
  first = np.repeat([1.6, 0.4], 2000) / 4000

  def sample(prompt, num, seed):
    rng = np.random.default_rng(seed)
    ids = rng.choice(4000, size=num, p=first)
    return np.stack(
      [ids, np.where(ids < 2000, rng.integers(2, size=num), 2)], 1
    )

  def after(prefix):
    return first if len(prefix) == 1 else np.array([0.5, 0.5, 0.0])

  report = audit(sample, after, [[0]], num_tokens=2, num_draws=50_000)
  checks = {check.name: check for check in report.checks}
  assert checks['prompt 1, token 1'].num_untested == 0
  for name in ('token 2', 'sequences, seed 1', 'sequences'):
    check = checks[f'prompt 1, {name}']
    share = check.num_untested / check.test.num_draws
    assert 0.15 < share < min(check.bound, check.detectable) < 0.3
    assert f'{check.num_untested} of {check.test.num_draws} draws' in str(
      report
    )


def test_faults_and_figures_of_a_report():
  top = np.where(np.sort(TABLE, axis=1)[:, -4:-3] <= TABLE, TABLE, 0)
  after = lambda prefix: top[prefix[-1] % VOCAB_SIZE]
  options = {'num_tokens': 2, 'num_draws': 2000}
  # What top-k leaves out is impossible.
  report = audit(sampler(), after, [[1]], **options)
  assert report.is_rejected
  assert np.isinf(report.checks[0].test.statistic)
  assert report.to_json()['checks'][0]['statistic'] is None
  json.dumps(report.to_json(), allow_nan=False)
  few = audit(sampler(), next_probs, [[1]], num_tokens=2, num_draws=2)
  assert few.verdict == 'inconclusive'
  short = lambda *given: sampler()(*given)[:, :1]
  report = audit(short, next_probs, [[1], [2]], **options)
  assert report.is_rejected
  assert len(report.faults) == 2
  # All but what follows an EOS is compared.
  eos = lambda *given: [row[: 1 + (row[0] != 3)] for row in sampler()(*given)]
  report = audit(eos, next_probs, [[1]], eos_ids=[3], **options)
  assert not report.is_rejected


NAN = np.full(VOCAB_SIZE, np.nan)
NO_PROBS = r'of \(1,\) are no probabilities'
REFUSED = {
  'one seed for all': (
    {'sample': lambda prompt, num, seed: sampler()(prompt, num, 0)},
    'seed',
  ),
  'no axis of prefixes': ({'next_probs': lambda prefix: np.ones(3)}, 'V'),
  'NaN': ({'next_probs': lambda prefix: NAN}, NO_PROBS),
  'below 0': ({'next_probs': lambda prefix: -TABLE[0]}, NO_PROBS),
  'no prompts': ({'prompts': []}, 'at least 1'),
  'no tokens': ({'num_tokens': 0}, 'at least 1'),
  'no draws': ({'num_draws': 0}, 'at least 1'),
  'no seeds': ({'seeds': ()}, 'at least 1'),
  'no limits': ({'num_tokens': []}, 'at least 1'),
  'two limits': ({'num_tokens': [2, 2]}, 'at least 1'),
  'never': ({'false_alarm_rate': 0}, 'false_alarm_rate'),
  'always': ({'false_alarm_rate': 1}, 'false_alarm_rate'),
  'no rate': ({'false_alarm_rate': float('nan')}, 'false_alarm_rate'),
}


@pytest.mark.parametrize(('changes', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_audited_is_refused(changes, message):
  usual = {
    'sample': sampler(),
    'next_probs': next_probs,
    'prompts': [[1]],
    'num_tokens': 2,
    'num_draws': 2000,
  }
  with pytest.raises(ValueError, match=message):
    audit(**usual | changes)


def test_greedy_tokens_are_compared_apart():
  likeliest = lambda prompt: [int(next_probs(prompt).argmax())]
  options = {'num_tokens': 2, 'num_draws': 2000}
  report = audit(sampler(), next_probs, [[1]], greedy=likeliest, **options)
  assert report.differences == ()
  other = lambda prompt: [(likeliest(prompt)[0] + 1) % VOCAB_SIZE]
  report = audit(sampler(), next_probs, [[1]], greedy=other, **options)
  assert len(report.differences) == 1
  assert not report.is_rejected


def test_cells_are_pooled_and_the_impossible_stays_apart():
  observed = np.array([50, 40, 3, 6, 0, 1])
  probs = np.array([0.5, 0.4, 0.04, 0.06, 0.0, 0.0])
  cells = pool(observed, probs)
  # Of 100 draws, 4 of the third are too few, and join the likeliest.
  np.testing.assert_allclose(cells.expected, [54, 40, 6, 0])
  np.testing.assert_allclose(cells.observed, [53, 40, 6, 1])
  assert g_test([cells], 100).p_value == 0
  possible = Cells(cells.observed[:3], cells.expected[:3])
  assert g_test([possible], 100).degrees == 2
