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
from specdec_jax.decoding.method import Method
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
    method=Method(
      target=target,
      logits_to_probs=logits.standardize(temperature=0.0),
      eos_id=-1,
    ),
    max_len=MAX_LEN,
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


def test_all_speeds_are_of_the_median_turn():
  """The turn that something else held up decides nothing."""
  counts = {
    name: benchmark.Counts(
      statistics=dataclasses.replace(
        statistics.init(1, 3), num_tokens=np.array([tokens])
      ),
      iterations=20,
      short_iterations=0,
    )
    for name, tokens in (('baseline', 40), ('speculative', 60))
  }
  seconds = {
    'baseline': np.array([1.0, 4.0, 1.0, 2.0, 4.0]),
    'speculative': np.array([4.0, 2.0, 2.0, 1.0, 1.0]),
  }
  some = sides.Side(
    run=lambda params, state: state,
    params=Params(()),
    states=(),
    compile_seconds=0.0,
    prefill_seconds=2.0,
  )
  found = benchmark._speeds(seconds, counts, dict.fromkeys(counts, some))
  plain, drafted = (
    found[f'{side}_tokens_per_second']
    for side in ('autoregressive', 'speculative')
  )
  assert (plain, drafted) == (20, 30)
  assert found['speedup'] == drafted / plain == found['most_speedup']
  assert found['end_to_end_speedup'] == 1
  assert found['speedup_range'] == pytest.approx([1.5 / 4, 6])


def test_figures_that_cannot_be_are_doubted():
  quiet = {'plain': [1.0, 1.05], 'speculative': [0.9, 0.9]}

  def doubts(turns=quiet, **changes):
    sound = {'verify_cost_ratio': 1.2, 'speedup': 1.4, 'most_speedup': 1.4}
    found = benchmark.doubts(sound | changes | {'turn_seconds': turns})
    return [each for each in found if not each.startswith('the load')]

  assert doubts() == []
  [told] = doubts(verify_cost_ratio=0.69)
  assert '0.69 of a plain step' in told
  [told] = doubts(speedup=1.81, most_speedup=1.44)
  assert 'beyond the 1.44' in told
  [told] = doubts(quiet | {'plain': [1.0, 1.0, 1.3]})
  assert 'plain decoding took 1 to 1.3 s' in told


def test_a_short_decode_begins_no_more_often_than_the_drafted_one():
  """An iteration takes a second, and a decode 6 s to begin."""
  counts = {
    name: benchmark.Counts(statistics.init(1, 3), iterations, 0)
    for name, iterations in (
      *(('full_width', 4), ('speculative', 60), ('plain', 120)),
    )
  }
  seconds = {
    name: np.array([6.0 + each.iterations] * 3) for name, each in counts.items()
  }
  seconds['launch'] = np.array([6.0, 6.0, 9.0])
  iteration = functools.partial(benchmark._iteration, seconds, counts, 1)
  for name, expected in (('full_width', 1.1), ('speculative', 1.1)):
    assert iteration(name) == pytest.approx(expected)
  assert iteration('plain') == pytest.approx(126 / 120)
