"""The margin of a first difference, from the cache that decoding left; and the
speed that counts and costs promise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import logits
from specdec_jax.base import Params
from specdec_jax.decoding import statistics
from specdec_jax.measure import benchmark, sides
from tests import toy

V, MAX_LEN = 11, 12


def test_logits_after_a_prefix_are_those_of_reading_it_anew():
  target = toy.compiled(toy.llama(V, num_layers=1))
  config = toy.llama_config(V, num_layers=1)
  params = Params(toy.llama_params(config, seed=0))
  side = sides.plain_side(
    params,
    jax.random.key(0),
    [toy.prompt([[1, 2, 3], [4]])],
    target=target,
    max_len=MAX_LEN,
    logits_to_probs=logits.standardize(temperature=0.0),
    eos_id=-1,
  )
  (state,) = side.decode()
  position = 6
  found = benchmark._logits_after(target, params, state, position)
  for row in range(2):
    prefix = np.asarray(state.context.tokens)[row, :position].tolist()
    cache = target.init(params.target, toy.prompt([prefix]), MAX_LEN)
    last = jnp.asarray([[prefix[-1]]], jnp.int32)
    expected, _ = target.extend(params.target, last, cache)
    np.testing.assert_allclose(found[row], expected[0, 0], atol=1e-4)
  # A text that is the beginning of the other is not the same text.
  lengths = state.context.lengths.at[1].add(-1)
  shorter = dataclasses.replace(
    state, context=dataclasses.replace(state.context, lengths=lengths)
  )
  for other, is_same in ((state, True), (shorter, False)):
    figures = benchmark.sameness(target, params, [state], [other])
    assert figures['identical'] is is_same
    assert figures['num_divergent_rows'] == (not is_same)
    assert figures['first_divergence_margin'] is None


def test_the_promised_speed_is_of_what_the_iterations_cost():
  """Two rows: 60 tokens in 10 iterations, 4 of them without a draft, against 40
  plain steps for as many."""
  counts = lambda iterations, short: benchmark.Counts(
    statistics=dataclasses.replace(
      statistics.init(2, 3), num_tokens=np.array([40, 20])
    ),
    iterations=iterations,
    short_iterations=short,
  )
  costs = {'c': 0.25, 'verify_cost_ratio': 1.5, 'without_draft_cost_ratio': 1.1}
  promised = functools.partial(
    benchmark.predict_speedup, counts(40, 0), counts(10, 4), **costs
  )
  cost = 6 * 1.5 + 4 * 1.1 + 18 * 0.25
  assert promised(num_drafted=18) == pytest.approx(40 / cost)
  # The fastest plain decoding is another than T(1) was measured in.
  assert promised(num_drafted=18, baseline_cost=0.8) == pytest.approx(32 / cost)
  assert promised(num_drafted=None) is None
