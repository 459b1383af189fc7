"""Acceptance rates and expected tokens against the paper, limits and chance."""

import numpy as np
import pytest

from specdec_jax import theory


def _random_pairs(rows: int, size: int, seed: int) -> tuple[np.ndarray, ...]:
  rng = np.random.default_rng(seed)
  return tuple(rng.dirichlet(np.full(size, 0.5), rows) for _ in range(2))


def test_expected_tokens_at_the_ends():
  assert theory.expected_tokens(0.0, 7) == 1
  assert theory.expected_tokens(1.0, 7) == 8
  assert theory.expected_tokens(0.8, 0) == 1
  assert theory.expected_tokens(0.75, np.inf) == pytest.approx(4, rel=1e-15)
  assert theory.expected_tokens(1.0, np.inf) == np.inf
  assert theory.expected_tokens(0.0, np.inf) == 1


def test_expected_tokens_is_the_geometric_sum():
  alpha = np.linspace(0, 1, 101)[:, None]
  gamma = np.arange(12)
  sums = (alpha[..., None] ** np.arange(12)).cumsum(-1)[:, 0]
  np.testing.assert_allclose(theory.expected_tokens(alpha, gamma), sums)


def test_expected_tokens_keeps_its_digits_near_one():
  # To second order in the rejection rate e: n - e n (n - 1) / 2.
  rejection, n = 1e-12, 9
  tokens = theory.expected_tokens(1 - rejection, n - 1)
  exact_rejection = 1 - (1 - rejection)
  assert n - tokens == pytest.approx(
    exact_rejection * n * (n - 1) / 2, rel=1e-3
  )


def test_expected_tokens_rises_with_alpha_and_gamma():
  tokens = theory.expected_tokens(np.linspace(0, 1, 50)[:, None], range(20))
  assert (np.diff(tokens, axis=0) >= -1e-12).all()
  assert (np.diff(tokens, axis=1) >= -1e-12).all()
  assert (tokens[:, 0] == 1).all()


@pytest.mark.parametrize('gamma', [1, 4, 9])
@pytest.mark.parametrize('alpha', [0.2, 0.75, 0.95])
def test_expected_tokens_against_chance(alpha, gamma):
  rng = np.random.default_rng(7)
  is_accepted = rng.random((200_000, gamma)) < alpha
  tokens = 1 + is_accepted.cumprod(-1).sum(-1)
  margin = 5 * tokens.std() / np.sqrt(len(tokens))
  assert abs(tokens.mean() - theory.expected_tokens(alpha, gamma)) < margin


def test_profile_of_equal_rates_is_expected_tokens():
  for gamma in range(6):
    tokens = theory.expected_tokens_of_profile(np.full(gamma, 0.7))
    assert tokens == pytest.approx(theory.expected_tokens(0.7, gamma))


def test_profile_of_unequal_rates():
  assert theory.expected_tokens_of_profile([0.5, 0.8, 0.25]) == pytest.approx(
    1 + 0.5 + 0.4 + 0.1
  )
  never_tested = theory.expected_tokens_of_profile([0.5, 0.0, np.nan])
  assert never_tested == 1.5
  batch = theory.expected_tokens_of_profile([[1.0, 0.0], [0.0, 1.0]])
  np.testing.assert_array_equal(batch, [2, 1])


def test_tokens_of_drafts_without_end():
  tokens = theory.expected_tokens([0, 0.5, 0.9, 1.0], np.inf)
  np.testing.assert_allclose(tokens, [1, 2, 10, np.inf])


@pytest.mark.parametrize('gamma', [1, 2, 7, np.inf])
def test_alpha_from_block_efficiency_inverts(gamma):
  alpha = np.linspace(0, 0.999, 200)
  tokens = theory.expected_tokens(alpha, gamma)
  inverse = theory.alpha_from_block_efficiency(tokens, gamma)
  np.testing.assert_allclose(inverse, alpha, atol=1e-12)


def test_alpha_from_block_efficiency_at_the_ends():
  alphas = theory.alpha_from_block_efficiency([1, 4, 4 + 1e-12, 1 - 1e-12], 3)
  np.testing.assert_array_equal(alphas, [0, 1, 1, 0])
  assert theory.alpha_from_block_efficiency(np.inf, np.inf) == 1


def test_acceptance_rate_of_equal_and_disjoint_distributions():
  assert theory.acceptance_rate([0.25, 0.75], [0.25, 0.75]) == 1
  assert theory.acceptance_rate([0.0, 1.0], [1.0, 0.0]) == 0


def test_acceptance_rate_is_one_minus_divergence():
  p, q = _random_pairs(50, 9, 1)
  # Definition 3.2: half the L1 distance is the distance to the middle.
  middle = (p + q) / 2
  divergence = abs(p - middle).sum(-1)
  np.testing.assert_allclose(theory.acceptance_rate(p, q), 1 - divergence)


def test_acceptance_rate_against_chance():
  p, q = (rows[0] for rows in _random_pairs(1, 6, 4))
  rng = np.random.default_rng(5)
  drafted = rng.choice(6, 200_000, p=q)
  for lenience in (1.0, 0.5):
    is_accepted = rng.random(len(drafted)) * q[drafted] * lenience < p[drafted]
    rate = theory.acceptance_rate(p, q, lenience)
    margin = 5 * np.sqrt(rate * (1 - rate) / len(drafted)) + 1e-9
    assert abs(is_accepted.mean() - rate) < margin


def test_lenience_accepts_more():
  p, q = _random_pairs(20, 7, 6)
  rates = theory.acceptance_rate(
    p[:, None], q[:, None], np.array([1, 0.5, 0.3, 0.1])
  )
  assert (np.diff(rates, axis=-1) >= 0).all()
  assert (rates <= 1).all()


@pytest.mark.parametrize(
  ('function', 'arguments', 'message'),
  [
    (theory.expected_tokens, (1.2, 3), 'alpha.*got 1.2'),
    (theory.expected_tokens, (0.5, -1), 'gamma .* got -1'),
    (theory.expected_tokens, (np.nan, 3), 'alpha .* got nan'),
    (theory.expected_tokens_of_profile, ([0.5, 2.0],), 'profile .* got 2'),
    (theory.expected_tokens, (-0.1, np.inf), 'alpha .* got -0.1'),
    (theory.alpha_from_block_efficiency, (4.5, 3), '4.5.*4'),
    (theory.alpha_from_block_efficiency, (0.5, 3), 'block_efficiency'),
    (theory.alpha_from_block_efficiency, (1.0, 0), 'gamma.*above 0'),
    (theory.acceptance_rate, ([0.5, 0.4], [0.5, 0.5]), 'p must sum'),
    (theory.acceptance_rate, ([0.5, 0.5], [1.5, -0.5]), 'q must lie'),
    (theory.acceptance_rate, ([1.0], [1.0], 0), 'lenience .* above 0'),
    (theory.acceptance_rate, ([1.0], [1.0], 1.5), 'lenience .* got 1.5'),
  ],
)
def test_what_is_out_of_range_is_refused(function, arguments, message):
  with pytest.raises(ValueError, match=message):
    function(*arguments)


def test_runs_at_the_ends():
  assert theory.expected_runs([], 3) == 0
  assert theory.expected_runs([1.0] * 5, 2) == 2


def test_runs_are_many_where_hard_tokens_stand_together():
  # Ten hard tokens take a run each; the easy ones come four a run.
  hard, easy = [0.0] * 10, [1.0] * 12
  assert theory.expected_runs(hard + easy, 3) == 10 + 3
  # One by one in between, an easy token and the next hard one share a run.
  assert theory.expected_runs([1.0, 0.0] * 10, 3) == 10
  # The last block has more room than there is text.
  assert theory.expected_runs([1.0] * 5, 3) == 2


def test_runs_are_what_drawing_the_acceptances_gives():
  rng = np.random.default_rng(0)
  rates, gamma, num_draws = rng.uniform(size=9), 2, 20_000
  total = 0
  for accepted in rng.uniform(size=(num_draws, 9)) < rates:
    place = 0
    while place < 9:
      block = accepted[place : place + gamma]
      place += 1 + (len(block) if block.all() else int(block.argmin()))
      total += 1
  found = theory.expected_runs(rates, gamma)
  assert abs(total / num_draws - found) < 0.05


@pytest.mark.parametrize(
  ('rates', 'gamma', 'words'),
  [
    ([0.5, 1.5], 2, 'rates must lie'),
    ([0.5], -1, 'gamma.*got -1'),
    ([0.5], np.nan, 'gamma.*got nan'),
  ],
)
def test_runs_of_nonsense_are_refused(rates, gamma, words):
  with pytest.raises(ValueError, match=words):
    theory.expected_runs(rates, gamma)
