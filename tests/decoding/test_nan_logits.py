"""NaN logits stop the rows that they concern, and no others (invariant 12)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, lazy, verification
from specdec_jax.base import Params
from tests import decoders, extras, slow, toy
from tests.contracts.table_of_drafters import ROWS, VOCAB_SIZE
from tests.decoders import GREEDY, SAMPLED, plain, rows, speculate
from tests.decoding.oracle_models import (
  LLAMA,
  LLAMA_PARAMS,
  PREFIXES,
  TARGET,
  TARGET_PARAMS,
  check_counters,
  prompts_of,
)


def _poison(table, where):
  return {'table': table['table'].at[where].set(jnp.nan)}


@slow.parametrize(
  'name', ['prompt_lookup', 'uniform', 'autoregressive'], now=['autoregressive']
)
def test_nan_in_the_target_stops_the_row_there(name):
  """After tokens 2, 1 the target returns NaN, for one next token even."""
  params = Params(TARGET_PARAMS, ROWS[name].make_params())
  drafter = ROWS[name].make(3)
  healthy = speculate(TARGET, params, drafter, prompts_of())
  bad = params._replace(target=_poison(params.target, (2, 1, 0)))
  output = speculate(TARGET, bad, drafter, prompts_of())
  assert output.done.all()
  assert 0 < output.has_nan.sum() < 20
  pairs = zip(rows(output), rows(healthy), output.has_nan, strict=True)
  for found, expected, has_nan in pairs:
    # What was committed before is untouched; whoever saw no NaN is as ever.
    assert found == (expected[: len(found)] if has_nan else expected)
    follows = [i for i in range(2, 24) if found[i - 2 : i] == [2, 1]]
    assert follows == [len(found)] * bool(has_nan)
  assert np.isfinite(output.log_probs).all()
  assert np.isfinite(output.statistics.accept_prob).all()
  check_counters(output, PREFIXES * 4)


@pytest.mark.slow
@pytest.mark.parametrize(
  'rule',
  [
    *decoders.RULES,
    pytest.param('top_beta', marks=extras.needs('contrib/top_beta')),
    'lenient',
  ],
)
@pytest.mark.parametrize(
  'name',
  ['prompt_lookup', 'uniform', 'autoregressive'],
)
def test_nan_stops_the_rows_that_it_stops_in_plain_decoding(name, rule):
  """Not where it follows an EOS, or what would exceed a row's limit."""
  if rule == 'top_beta':
    rule = lazy.attribute('tests.contrib.top_beta.contract_rows:STRICT')
  elif rule == 'lenient':
    rule = functools.partial(verification.greedy, lenience=1 - 1e-6)
  rng = np.random.default_rng(0)
  limits = [len(prefix) + rng.integers(0, 15) for prefix in PREFIXES * 4]
  bad = Params(_poison(TARGET_PARAMS, (slice(None), 3)))
  bad = Params(_poison(bad.target, (2, 1)), ROWS[name].make_params())
  ends = {'prompt': prompts_of(max_lengths=limits), 'to_probs': GREEDY}
  for eos_id in (3, -1):
    expected = plain(TARGET, bad, eos_id=eos_id, **ends)
    output = speculate(
      TARGET, bad, ROWS[name].make(3), rule=rule, eos_id=eos_id, **ends
    )
    assert rows(output) == rows(expected)
    np.testing.assert_array_equal(output.has_nan, expected.has_nan)
    assert 0 < output.has_nan.sum() < 20


def test_nan_in_the_drafter_stops_the_row_there():
  drafter = ROWS['autoregressive'].make(3)
  params = Params(TARGET_PARAMS, toy.toy_params(VOCAB_SIZE, seed=3))
  healthy = speculate(TARGET, params, drafter, prompts_of())
  bad = params._replace(drafter=_poison(params.drafter, (2, 1)))
  output = speculate(TARGET, bad, drafter, prompts_of())
  assert output.done.all()
  assert 0 < output.has_nan.sum() < 20
  pairs = zip(rows(output), rows(healthy), output.has_nan, strict=True)
  for found, expected, has_nan in pairs:
    assert found == (expected[: len(found)] if has_nan else expected)
    assert found[-2:] == [2, 1] or not has_nan
  check_counters(output, PREFIXES * 4)


@pytest.mark.slow
@pytest.mark.parametrize('rule', ['speculative_sampling', 'block'])
def test_nan_in_the_drafter_beyond_an_eos_stops_nothing(rule):
  drafter = ROWS['autoregressive'].make(3)
  table = _poison(toy.toy_params(VOCAB_SIZE, seed=3), (slice(None), 3))
  params = Params(TARGET_PARAMS, table)
  output = speculate(TARGET, params, drafter, prompts_of(), rule=rule, eos_id=3)
  is_first = [prefix[-1] == 3 for prefix in PREFIXES * 4]
  np.testing.assert_array_equal(output.has_nan, is_first)


@pytest.mark.slow
def test_nan_everywhere_commits_nothing_at_all():
  bad = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), LLAMA_PARAMS)
  for output in (
    speculate(
      LLAMA,
      Params(bad),
      drafters.prompt_lookup(gamma=2, min_ngram=1),
      prompts_of(1),
    ),
    plain(LLAMA, Params(bad), prompts_of(1), to_probs=SAMPLED),
  ):
    assert output.has_nan.all()
    assert output.done.all()
    assert rows(output) == PREFIXES
    assert np.sum(output.statistics.num_target_runs) == 0
