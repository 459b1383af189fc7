"""Standardised sampling against plain numpy, and where ties and limits fall."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import base
from specdec_jax.sampling import logits
from tests import goodness_of_fit

SETTINGS = [
  goodness_of_fit.Sampling(*values)
  for values in itertools.product(
    (0.0, 0.3, 1.0, 2.0), (None, 1, 3, 50), (None, 0.3, 0.9, 1.0)
  )
] + [
  goodness_of_fit.Sampling(temperature, *values)
  for temperature in (0.0, 0.7, 2.0)
  for values in (
    *((None, None, 0.1), (None, None, 0.6), (3, 0.9, 0.2)),
    *((None, None, None, p) for p in (0.1, 0.5, 0.9, 1.0)),
    *((4, None, None, 0.5), (None, 0.9, 0.1, 0.7)),
  )
]


@pytest.mark.parametrize('sampling', SETTINGS, ids=str)
def test_standardize_against_numpy(sampling):
  scores = np.random.default_rng(0).normal(size=(3, 20, 9)) * 3
  scores = scores.astype(np.float32)
  probs = logits.standardize(**sampling._asdict())(jnp.asarray(scores))
  expected = goodness_of_fit.reference_probs(scores, sampling)
  np.testing.assert_allclose(probs, expected, atol=2e-6)
  # What is ruled out has probability zero, not almost zero.
  np.testing.assert_array_equal(np.asarray(probs) == 0, expected == 0)
  assert probs.dtype == jnp.float32


def test_reference_itself_on_a_law_known_by_hand():
  scores = np.log([0.5, 0.25, 0.15, 0.1])
  reference = lambda *settings: goodness_of_fit.reference_probs(
    scores, goodness_of_fit.Sampling(*settings)
  )
  np.testing.assert_allclose(reference(), [0.5, 0.25, 0.15, 0.1])
  np.testing.assert_allclose(reference(0), [1, 0, 0, 0])
  np.testing.assert_allclose(reference(1.0, 2), [2 / 3, 1 / 3, 0, 0])
  # 0.5 alone is enough for 0.5, and not for a hair more.
  np.testing.assert_allclose(reference(1.0, None, 0.4999), [1, 0, 0, 0])
  np.testing.assert_allclose(reference(1.0, None, 0.501), [2 / 3, 1 / 3, 0, 0])
  # Half of the likeliest is enough for 0.5, and not for a hair more.
  kept = np.array([2 / 3, 1 / 3, 0, 0])
  np.testing.assert_allclose(reference(1.0, None, None, 0.499), kept)
  np.testing.assert_allclose(reference(1.0, None, None, 0.501), [1, 0, 0, 0])
  # The entropy is 1.21: with surprises of 0.69, 1.39, 1.9 and 2.3, the second
  # token is the most typical, and the first comes after it.
  typical = lambda p: reference(1.0, None, None, None, p)
  np.testing.assert_allclose(typical(0.25), [0, 1, 0, 0])
  np.testing.assert_allclose(typical(0.26), [2 / 3, 1 / 3, 0, 0])
  squared = np.array([0.25, 0.0625, 0.0225, 0.01])
  np.testing.assert_allclose(reference(0.5), squared / squared.sum())


def test_order_of_the_chain_is_temperature_then_top_p():
  """At temperature 2 the nucleus is wider than at 1."""
  scores = jnp.log(jnp.array([0.7, 0.2, 0.1]))
  probs = logits.standardize(temperature=2.0, top_p=0.6)(scores)
  assert np.count_nonzero(probs) == 2
  probs = logits.standardize(temperature=1.0, top_p=0.6)(scores)
  assert np.count_nonzero(probs) == 1


def test_rows_have_their_own_sampling():
  """Each row as with its settings for all, and with none as it is."""
  ways = [*SETTINGS[::3], goodness_of_fit.Sampling()]
  rng = np.random.default_rng(2)
  scores = jnp.asarray(rng.normal(size=(len(ways), 4, 9)) * 3, jnp.float32)
  pick = lambda name, off, kind: jnp.array(
    [off if (value := getattr(way, name)) is None else value for way in ways],
    kind,
  )
  rows = base.Sampling(
    temperature=pick('temperature', 1, jnp.float32),
    top_k=pick('top_k', 9, jnp.int32),
    top_p=pick('top_p', 1, jnp.float32),
    min_p=pick('min_p', 0, jnp.float32),
    typical_p=pick('typical_p', 1, jnp.float32),
  )
  probs = logits.standardize(vocab_size=8)(scores, rows)
  for row, way in enumerate(ways):
    to_probs = logits.standardize(**way._asdict(), vocab_size=8)
    np.testing.assert_allclose(probs[row], to_probs(scores[row]), atol=1e-6)
  np.testing.assert_array_equal(probs[-1], to_probs(scores[-1]))


def test_greedy_ties_go_to_the_lowest_id():
  scores = jnp.array([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
  probs = logits.standardize(temperature=0)(scores)
  np.testing.assert_array_equal(probs, [[0, 1, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize('wrong', [{'top_k': 0}, {'top_p': 0}, {'min_p': 2}])
def test_what_greedy_decoding_does_not_read_is_checked_too(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    logits.standardize(temperature=0, **wrong)


def test_ties_at_the_limit_are_all_kept():
  scores = jnp.array([3.0, 1.0, 1.0, 0.0])
  for keep, value in (
    (logits.keep_top_k, 2),
    (logits.keep_top_p, 0.8),
    (logits.keep_min_p, math.exp(-2)),
    # The entropy is 0.8, and surprises are 0.28, 2.28 and 3.28.
    (logits.keep_typical_p, 0.8),
  ):
    kept = np.isfinite(keep(scores, value))
    np.testing.assert_array_equal(kept, [True, True, True, False])


def typical_of_transformers(scores: np.ndarray, mass: float) -> np.ndarray:
  """The formula of transformers' `TypicalLogitsWarper`, in float64: which of
  scores `[N, V]` stay, bool."""
  weights = np.exp(scores.astype(np.float64))
  probs = weights / weights.sum(-1, keepdims=True)
  with np.errstate(divide='ignore', invalid='ignore'):
    log_probs = np.log(probs)
    entropy = -np.nansum(log_probs * probs, -1, keepdims=True)
  shifted = np.abs(-log_probs - entropy)
  order = np.argsort(shifted, axis=-1)
  cumulative = np.cumsum(np.take_along_axis(probs, order, -1), axis=-1)
  # The first with which the mass is reached, and all that are tied with it.
  last = np.minimum((cumulative < mass).sum(-1), scores.shape[-1] - 1)
  most = np.take_along_axis(np.sort(shifted, -1), last[:, None], -1)
  return (shifted <= most) & (probs > 0)


@pytest.mark.parametrize('mass', [0.05, 0.2, 0.5, 0.8, 0.95])
def test_typical_p_is_that_of_transformers(mass):
  """With ties in most rows, and ids that other limits ruled out."""
  rng = np.random.default_rng(3)
  scores = rng.integers(-12, 12, (400, 24)).astype(np.float32) / 4
  scores[::2] += rng.normal(size=(200, 24)).astype(np.float32)
  scores[::3, ::4] = -math.inf
  kept = np.isfinite(logits.keep_typical_p(jnp.asarray(scores), mass))
  expected = typical_of_transformers(scores, mass)
  np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize(
  ('keep', 'value'),
  [
    (logits.keep_top_p, 1e-6),
    (logits.keep_top_p, 1e-40),
    (logits.keep_min_p, 1.0),
  ],
)
def test_likeliest_token_survives_any_nucleus(keep, value):
  scores = jnp.array([0.0, 0.1, 0.0])
  kept = np.isfinite(keep(scores, value))
  np.testing.assert_array_equal(kept, [False, True, False])


@pytest.mark.parametrize(
  'limit', [{'top_k': 2**40}, {'top_p': 1e-46}, {'typical_p': 1e-46}]
)
def test_limits_beyond_32_bits_are_the_nearest_within(limit):
  scores = jnp.array([0.0, 2.0, 0.5])
  probs = logits.standardize(**limit)(scores)
  assert np.sum(probs) == pytest.approx(1)
  assert np.count_nonzero(probs) == (3 if 'top_k' in limit else 1)


@pytest.mark.parametrize('sampling', SETTINGS[::7], ids=str)
def test_padding_ids_are_impossible_and_change_nothing(sampling):
  scores = np.random.default_rng(1).normal(size=(20, 9)).astype(np.float32)
  padded = np.concatenate([scores, np.full((20, 3), 50, np.float32)], axis=1)
  settings = sampling._asdict()
  probs = logits.standardize(**settings, vocab_size=9)(jnp.asarray(padded))
  expected = logits.standardize(**settings)(jnp.asarray(scores))
  np.testing.assert_array_equal(probs[:, 9:], 0)
  np.testing.assert_allclose(probs[:, :9], expected, atol=1e-6)


def test_half_precision_is_widened_first():
  scores = jnp.array([1.0, 2.0, 3.0], jnp.bfloat16)
  probs = logits.standardize(temperature=0.7)(scores)
  assert probs.dtype == jnp.float32
  expected = jax.nn.softmax(scores.astype(jnp.float32) / 0.7)
  np.testing.assert_array_equal(probs, expected)


def test_nan_is_not_hidden():
  scores = jnp.array([1.0, jnp.nan, 0.0])
  limits = {'top_k': 2}, {'top_p': 0.9}, {'min_p': 0.1}, {'typical_p': 0.9}
  for settings in ({}, *limits):
    assert np.isnan(logits.standardize(**settings)(scores)).any()


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'temperature': -0.1}, 'temperature.*at least 1e-06'),
    ({'temperature': 1e-38}, '1e-06.*got 1e-38'),
    ({'temperature': float('inf')}, 'temperature.*finite'),
    ({'temperature': float('nan')}, 'temperature.*finite'),
    ({'top_k': 0}, 'top_k.*got 0'),
    ({'top_k': 2.5}, 'top_k.*got 2.5'),
    ({'top_p': 0.0}, 'top_p.*got 0.0'),
    ({'top_p': 1.1}, 'top_p must'),
    ({'typical_p': 0.0}, 'typical_p.*got 0.0'),
    ({'min_p': 1.5}, 'min_p.*got 1.5'),
    ({'min_p': float('nan')}, 'min_p must'),
    ({'vocab_size': 0}, 'vocab_size must'),
  ],
)
def test_bad_settings_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    logits.standardize(**settings)
