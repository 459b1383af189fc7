"""The margin of a first difference, from the cache that decoding left; and the
speed that counts and costs promise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters
from specdec_jax.assembly import packed_settings
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Params
from specdec_jax.decoding.method import Method
from specdec_jax.measure import benchmark, comparison, loops, sameness
from specdec_jax.measure.loops import Timed
from specdec_jax.sampling import logits
from tests import toy
from tests.measure.some_rows import some_counts, some_row, some_timed

V, MAX_LEN = 11, 12


def test_logits_after_a_prefix_are_those_of_reading_it_anew():
  target = toy.compiled(toy.llama(V, num_layers=1))
  config = toy.llama_config(V, num_layers=1)
  params = Params(toy.llama_params(config, seed=0))
  loop = loops.plain_loop(
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
  (state,) = loop.decode()
  position = 6
  found = sameness._logits_after(target, params, state, position)
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
    result = sameness.sameness(target, params, [state], [other])
    assert result.identical is is_same
    assert result.num_divergent_rows == (not is_same)
    assert result.first_divergence_margin is None


def test_margins_are_of_logits_that_were_processed():
  target, params = toy.toy(V), Params(toy.toy_params(V, seed=1))
  told = TextSettings(logit_bias={5: 9.0}, frequency_penalty=0.5)
  process = packed_settings.packer([told] * 2, eos_ids=[], vocab_size=V)
  prompt = toy.prompt([[1, 2, 3], [4]], max_lengths=[MAX_LEN] * 2)
  loop = loops.plain_loop(
    params,
    jax.random.key(0),
    [process(range(2), jax.tree.map(np.asarray, prompt))],
    method=Method(
      target=target,
      logits_to_probs=logits.standardize(temperature=0.0),
      eos_id=-1,
    ),
    max_len=MAX_LEN,
  )
  (state,) = loop.decode()
  assert state.context.tokens[0, 3:7].tolist() == [5] * 4
  # At position 6 the other loop said 7, after three 5s that count.
  tokens = state.context.tokens.at[0, 6].set(7)
  other = dataclasses.replace(
    state, context=state.context.replace(tokens=tokens)
  )
  found = sameness.sameness(target, params, [state], [other])
  own = params.target['table'][5, 5]
  margin = float(own[5] + 9 - 3 * 0.5 - own[7])
  assert found.divergence_margins == pytest.approx([margin])


@pytest.mark.slow
def test_margins_are_plain_decodings_whose_cache_may_be_of_another_kind():
  target = toy.toy(V)

  def extend(params, tokens, cache, at=None, placement=None):
    found, cache = target.extend(params, tokens, cache['own'], at, placement)
    return -found, {'own': cache}

  # As a drafter's own target is, with more in its cache; this one errs, too.
  other = target._replace(
    init=lambda *args: {'own': target.init(*args)},
    extend=extend,
    rewind=lambda cache, to: {'own': target.rewind(cache['own'], to)},
  )
  args = Params(toy.toy_params(V, seed=1)), jax.random.key(0)
  plain, method = (
    Method(
      target=each,
      drafter=drafters.none(1),
      logits_to_probs=logits.standardize(temperature=0.0),
      eos_id=-1,
    )
    for each in (target, other)
  )
  prompts = [toy.prompt([[1, 2, 3], [4]])]
  loop = loops.plain_loop(*args, prompts, method=plain, max_len=MAX_LEN)
  drafted = benchmark.drafted(
    loops.speculative_loop(*args, prompts, method=method, max_len=MAX_LEN)
  )
  [row] = benchmark.compare(loop, [drafted], repeats=1, expected=loop)
  assert row.sameness.num_divergent_rows == 2
  # What the other took for the likeliest is the least likely of all.
  assert min(row.sameness.divergence_margins) > 1


def test_the_promised_speed_is_of_what_the_iterations_cost():
  """Two rows: 60 tokens in 10 iterations, 4 of them without a draft, against 40
  plain steps for as many."""
  counts = functools.partial(some_counts, [40, 20])
  costs = {'c': 0.25, 'verify_cost_ratio': 1.5, 'without_draft_cost_ratio': 1.1}
  promised = functools.partial(
    comparison.predict_speedup, counts(40), counts(10, 4), **costs
  )
  cost = 6 * 1.5 + 4 * 1.1 + 18 * 0.25
  assert promised(num_drafted=18) == pytest.approx(40 / cost)
  # The fastest plain decoding is another than T(1) was measured in.
  assert promised(num_drafted=18, baseline_cost=0.8) == pytest.approx(32 / cost)
  assert promised(num_drafted=None) is None


def test_all_speeds_are_of_the_median_turn():
  """The turn that something else held up decides nothing."""
  baseline = some_timed([1.0, 4.0, 1.0, 2.0, 4.0], 40, 20)
  drafted = some_timed([4.0, 2.0, 2.0, 1.0, 1.0], 60, 20)
  figures = comparison.figures(some_row(baseline, drafted))
  speeds = [
    figures[f'{name}_tokens_per_second']
    for name in ('autoregressive', 'speculative')
  ]
  assert speeds == [20, 30]
  assert figures['speedup'] == 1.5 == figures['most_speedup']
  assert figures['speedup_range'] == pytest.approx([1.5 / 4, 6])
  assert figures['speedup_interval'] is None


def test_the_interval_of_a_speedup_is_over_batches():
  """Two batches of 12 tokens; the second is no faster than plain decoding."""

  def timed(seconds):
    loop = Timed(np.array(seconds)[:, None], [None, None])
    loop.__dict__['counts'] = some_counts([12, 12], 8)
    loop.__dict__['num_tokens'] = np.array([12, 12])
    return loop

  row = some_row(timed([1.0, 1.0]), timed([0.5, 1.0]))
  assert row.speedup == pytest.approx(2 / 1.5)
  low, high = row.speedup_interval
  assert low < 1 < 2 / 1.5 < high


def test_a_short_decode_begins_no_more_often_than_the_drafted_one():
  """An iteration takes a second, and a decode 6 s to begin."""
  full_width, drafted = (
    some_timed([6.0 + iterations] * 3, iterations=iterations)
    for iterations in (4, 60)
  )
  launch = some_timed([6.0, 6.0, 9.0])
  seconds = benchmark.iteration_seconds(full_width, launch, drafted)
  assert seconds == pytest.approx(1.1)
  assert some_timed([126.0], iterations=120).per_iteration == 1.05


def test_costs_are_of_plain_steps_in_the_dtype_of_the_target():
  """Ten iterations of 40 plain steps of a second, in a baseline twice as fast;
  a step of the drafter takes .25 s, and one of all four positions 1.5 s."""
  row = some_row(some_timed([20.0], 40, 40), some_timed([20.0], 40, 10))
  row = dataclasses.replace(
    row,
    plain=dataclasses.replace(row.plain, per_iteration=1.0),
    drafted=dataclasses.replace(
      row.drafted, prefill=20.0, per_iteration=1.5, per_proposal=0.75
    ),
  )
  assert (row.c, row.verify_cost_ratio) == (0.25, 1.5)
  assert row.without_draft_cost_ratio is None
  # 40 half seconds against 10 (1.5 + .75).
  assert row.predicted_speedup == pytest.approx(20 / 22.5)
  assert row.end_to_end_speedup == 20 / 40
  assert row.num_drafted == 30
