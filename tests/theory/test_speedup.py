"""Speedups against the tables of Leviathan et al. and against brute force."""

import subprocess
import sys

import numpy as np
import pytest

from specdec_jax import theory

# alpha, gamma, operations, speed; c = c_hat = 0.
_TABLE_1 = [
  (0.6, 2, 1.53, 1.96),
  (0.7, 3, 1.58, 2.53),
  (0.8, 2, 1.23, 2.44),
  (0.8, 5, 1.63, 3.69),
  (0.9, 2, 1.11, 2.71),
  (0.9, 10, 1.60, 6.86),
]

# c of the drafter, alpha, gamma, expected improvement; T5-XXL.
_TABLE_4 = [
  (0.02, 0.75, 7, 3.2),
  (0.04, 0.80, 7, 3.3),
  (0.11, 0.82, 7, 2.5),
  (0.02, 0.62, 7, 2.3),
  (0.04, 0.68, 5, 2.4),
  (0.11, 0.71, 3, 2.0),
  (0.02, 0.65, 5, 2.4),
  (0.04, 0.73, 5, 2.6),
  (0.11, 0.74, 3, 2.0),
  (0.02, 0.53, 5, 1.9),
  (0.04, 0.55, 3, 1.8),
  (0.11, 0.56, 3, 1.6),
]


@pytest.mark.proof
@pytest.mark.parametrize(('alpha', 'gamma', 'operations', 'speed'), _TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
  assert round(float(theory.operations_factor(alpha, gamma, 0)), 2) == (
    operations
  )
  assert round(float(theory.walltime_improvement(alpha, gamma, 0)), 2) == speed


@pytest.mark.proof
@pytest.mark.parametrize(('c', 'alpha', 'gamma', 'expected'), _TABLE_4)
def test_table_4_expected(c, alpha, gamma, expected):
  # The table's own alpha and c have two digits, which is worth up to 0.07.
  improvement = theory.walltime_improvement(alpha, gamma, c)
  assert improvement == pytest.approx(expected, abs=0.07)


def test_walltime_improvement_without_cost_is_expected_tokens():
  alpha = np.linspace(0, 1, 11)[:, None]
  np.testing.assert_array_equal(
    theory.walltime_improvement(alpha, range(9), 0),
    theory.expected_tokens(alpha, range(9)),
  )


def test_walltime_improvement_limits():
  assert theory.walltime_improvement(1, 4, 0.5) == pytest.approx(5 / 3)
  assert theory.walltime_improvement(0, 4, 0.5) == pytest.approx(1 / 3)
  assert theory.walltime_improvement(0.9, 0, 0.5) == 1


def test_walltime_improvement_falls_with_cost():
  improvement = theory.walltime_improvement(0.8, 5, np.linspace(0, 1, 30))
  assert (np.diff(improvement) < 0).all()


def test_operations_factor_limits():
  assert theory.operations_factor(1, 4, 0) == 1
  assert theory.operations_factor(0.9, 0, 0.5) == 1
  assert theory.operations_factor(0, 4, 0.5) == 7


def test_operations_are_never_saved():
  # Every token is scored at least once, so the factor cannot fall under 1.
  factors = theory.operations_factor(
    np.linspace(0, 1, 21)[:, None, None], np.arange(8)[:, None], [0, 0.1]
  )
  assert (factors >= 1 - 1e-12).all()


def test_best_gamma_against_brute_force():
  for alpha in (0, 0.3, 0.55, 0.8, 0.93, 1):
    for c in (0.01, 0.05, 0.2, 0.9, 1.5):
      best, factor = 0, 1.0
      for gamma in range(1, 41):
        tokens = sum(alpha**i for i in range(gamma + 1))
        if tokens / (gamma * c + 1) > factor * (1 + 1e-12):
          best, factor = gamma, tokens / (gamma * c + 1)
      assert theory.best_gamma(alpha, c, max_gamma=40) == best, (alpha, c)


def test_best_gamma_shapes():
  assert isinstance(theory.best_gamma(0.8, 0.05), int)
  grid = theory.best_gamma(np.linspace(0, 1, 5)[:, None], [0.01, 0.1])
  assert grid.shape == (5, 2)
  for i, alpha in enumerate(np.linspace(0, 1, 5)):
    for j, c in enumerate([0.01, 0.1]):
      assert grid[i, j] == theory.best_gamma(alpha, c)


def test_best_gamma_at_the_ends():
  assert theory.best_gamma(0.5, 0.5) == 0
  assert theory.best_gamma(0.0, 0.0) == 0
  assert theory.best_gamma(1.0, 0.5, max_gamma=9) == 9
  assert theory.best_gamma(0.8, 0.0, max_gamma=9) == 9
  assert theory.best_gamma(0.8, 0.01, max_gamma=0) == 0
  # Every gamma gives exactly 1 here, and the least is taken.
  assert theory.best_gamma(1.0, 1.0) == 0


def test_best_gamma_takes_the_least_of_a_tie():
  # With alpha equal to c one drafted token gains nothing, whatever the last
  # bits of the quotient say.
  rates = np.linspace(0, 1, 1001)
  assert (theory.best_gamma(rates, rates) == 0).all()


def test_figure_3():
  # The best gamma rises with alpha and falls with c; it drafts at least once
  # wherever alpha > c. At alpha .9 the curves end at 24, 19, 13 and 10.
  alpha = np.linspace(0.5, 0.9, 81)[:, None]
  gammas = theory.best_gamma(alpha, [0.01, 0.02, 0.05, 0.1])
  assert (np.diff(gammas, axis=0) >= 0).all()
  assert (np.diff(gammas, axis=1) <= 0).all()
  assert (gammas >= 1).all()
  np.testing.assert_array_equal(gammas[-1], [24, 19, 13, 10])


def test_improvement_rises_and_then_falls_with_gamma():
  improvement = theory.walltime_improvement(0.8, np.arange(60), 0.05)
  signs = np.sign(np.diff(improvement))
  assert (np.diff(signs) <= 0).all()
  assert signs[0] == 1
  assert signs[-1] == -1


def test_minimal_improvement_is_a_bound():
  alpha = np.linspace(0, 1, 41)[:, None]
  c = np.linspace(0, 1.2, 25)
  best = theory.walltime_improvement(alpha, theory.best_gamma(alpha, c), c)
  # Corollary 3.9: the gain of gamma 1, if that is one.
  minimal = np.where(alpha > c, (1 + alpha) / (1 + c), 1)
  assert (best >= minimal - 1e-12).all()
  assert (minimal >= 1).all()
  assert ((best > 1 + 1e-12) == (alpha > c + 1e-12)).all()
  one_token = theory.walltime_improvement(alpha, 1, c)
  np.testing.assert_allclose(minimal, np.maximum(one_token, 1))


def _oracle(alpha, c):
  # It drafts the n tokens that will be accepted and pays n c + 1 for n + 1.
  return 1 / (1 - alpha + alpha * c)


def test_oracle_is_above_every_fixed_gamma():
  alpha = np.linspace(0, 0.95, 20)[:, None]
  c = np.linspace(0.01, 1, 20)
  oracle = _oracle(alpha, c)
  for gamma in range(20):
    fixed = theory.walltime_improvement(alpha, gamma, c)
    assert (oracle >= fixed - 1e-12).all()


def test_oracle_against_chance():
  alpha, c = 0.8, 0.1
  rng = np.random.default_rng(11)
  accepted = rng.geometric(1 - alpha, 200_000) - 1
  ratio = (accepted + 1).mean() / (c * accepted + 1).mean()
  assert _oracle(alpha, c) == pytest.approx(ratio, rel=0.02)


def test_oracle_gains_up_to_about_60_percent():
  # Sec. 3.5 of the paper, over the ranges of its Figures 2 and 3 and beyond.
  alpha = np.linspace(0.5, 0.9, 41)[:, None]
  c = np.linspace(0.01, 0.3, 59)
  best = theory.walltime_improvement(alpha, theory.best_gamma(alpha, c), c)
  gain = _oracle(alpha, c) / best
  assert 1.5 < gain.max() < 1.6
  assert np.unravel_index(gain.argmax(), gain.shape)[0] == 40


def test_predicted_speedup_contains_the_theorem():
  tokens = theory.expected_tokens(0.7, 4)
  assert theory.predicted_speedup(tokens, 4, 0.1) == pytest.approx(
    theory.walltime_improvement(0.7, 4, 0.1)
  )
  assert theory.predicted_speedup(3.0, 4, 0.1, 1.6) == pytest.approx(1.5)
  np.testing.assert_allclose(
    theory.predicted_speedup(2.0, [0, 5], 0.0, [1, 4]), [2, 0.5]
  )


@pytest.mark.parametrize(
  ('function', 'arguments', 'message'),
  [
    (theory.walltime_improvement, (1.5, 3, 0.1), 'alpha .* got 1.5'),
    (theory.walltime_improvement, (0.5, -2, 0.1), 'gamma .* got -2'),
    (theory.walltime_improvement, (0.5, 3, -0.1), 'c .* got -0.1'),
    (theory.operations_factor, (0.5, 3, -1), 'c_hat .* got -1'),
    (theory.best_gamma, (0.5, -1), 'c .* got -1'),
    (theory.predicted_speedup, (0.5, 3, 0.1), 'block_efficiency .* got 0.5'),
    (theory.predicted_speedup, (2, 3, 0.1, 0), 'verify_cost_ratio .* above 0'),
  ],
)
def test_what_is_out_of_range_is_refused(function, arguments, message):
  with pytest.raises(ValueError, match=message):
    function(*arguments)


def test_theory_imports_neither_jax_nor_the_package():
  # Loaded beside its package: `specdec_jax/__init__.py` itself imports jax.
  program = (
    'import sys, types; package = types.ModuleType("specdec_jax");'
    'package.__path__ = [sys.argv[1]]; sys.modules["specdec_jax"] = package;'
    'import specdec_jax.theory;'
    'names = {name.split(".")[0] for name in sys.modules};'
    'assert not names & {"jax", "flax"}, names;'
    'ours = [n for n in sys.modules if n.startswith("specdec_jax.")];'
    'assert all(n.startswith("specdec_jax.theory") for n in ours), ours'
  )
  folder = theory.__path__[0].rsplit('theory', 1)[0]
  subprocess.run([sys.executable, '-c', program, folder], check=True)
