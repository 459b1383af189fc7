"""Rows refilled between calls of the loop decode what a whole batch does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters
from specdec_jax.assembly import decode_many
from specdec_jax.base import Params, Prompt
from specdec_jax.decoding import refill
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.program import Program
from specdec_jax.verification import speculative_sampling
from tests import decoders, toy, toy_eagle

NUM_EXAMPLES, BATCH_SIZE, NUM_FRESH = 13, 4, 2
MAX_LEN, SEED = 24, 5
TARGET = toy.toy(8)
DRAFTER = drafters.autoregressive(
  TARGET, gamma=3, logits_to_probs=decoders.SAMPLED
)
TARGET_PARAMS = toy.toy_params(8, seed=1)
PARAMS = Params(
  target=TARGET_PARAMS, drafter=toy.perturb(TARGET_PARAMS, seed=2)
)
COUNTING = toy_eagle.counting(8, gamma=3, num_drafted=7)
# Target and drafter: one with a cache of its own, one that also reads what the
# target's last call left, and so what its prefill left in a refilled row.
PAIRS = {
  'draft model': (TARGET, DRAFTER),
  'eagle': (
    COUNTING.target,
    drafters.autoregressive(
      drafters.eagle(COUNTING.network),
      gamma=3,
      logits_to_probs=decoders.SAMPLED,
    ),
  ),
}


def make_prompt(indices) -> Prompt:
  """Prompts of 1 to 5 tokens, of as many new tokens as their index says; None
  stays empty."""
  indices = list(indices)
  tokens = np.zeros((len(indices), 5), np.int32)
  lengths = np.ones(len(indices), np.int32)
  limits = np.ones(len(indices), np.int32)
  for row, index in enumerate(indices):
    if index is not None:
      lengths[row] = 1 + index % 5
      tokens[row] = (index + np.arange(5)) % 7
      limits[row] = lengths[row] + 1 + 5 * index % 17
  return Prompt(
    encoder_tokens=None,
    decoder_tokens=tokens,
    decoder_lengths=lengths,
    row_ids=np.array([index or 0 for index in indices], np.int32),
    max_lengths=limits,
  )


@pytest.fixture(scope='module', params=PAIRS)
def pair(request):
  return PAIRS[request.param]


@pytest.fixture(scope='module')
def whole(pair):
  """All examples in one batch."""
  target, drafter = pair
  return decoders.speculate(
    target,
    PARAMS,
    drafter,
    jax.tree.map(jnp.asarray, make_prompt(range(NUM_EXAMPLES))),
    max_len=MAX_LEN,
    seed=SEED,
  )


def refill_programs(target, drafter, num_fresh, batch_size):
  method = Method(
    target=target,
    drafter=drafter,
    verify_fn=speculative_sampling,
    logits_to_probs=decoders.SAMPLED,
    eos_id=-1,
  )
  program = Program(
    method=method,
    params=PARAMS,
    prompt=make_prompt([None] * num_fresh),
    max_len=MAX_LEN,
  )
  return program.refill(batch_size)


@pytest.fixture(scope='module')
def programs(pair):
  return refill_programs(*pair, NUM_FRESH, BATCH_SIZE)


@pytest.mark.parametrize('num_examples', [0, 1, 2, 6, NUM_EXAMPLES])
def test_examples_decode_as_in_one_batch(whole, programs, num_examples):
  utilisation = decode_many.Utilisation(num_rows=BATCH_SIZE)
  results = list(
    decode_many.decode(
      programs,
      PARAMS,
      SEED,
      iter(range(num_examples)),
      pack=make_prompt,
      utilisation=utilisation,
      keep=lambda state, row: int(state.context.lengths[row]),
    )
  )
  examples = [example for example, *_ in results]
  assert sorted(examples) == list(range(num_examples))
  for example, output, kept in results:
    assert kept == output.lengths[0]
    expected = jax.tree.map(
      lambda leaf: np.asarray(leaf)[example : example + 1],  # noqa: B023
      whole,
    )
    jax.tree.map(np.testing.assert_array_equal, output, expected)
  runs = np.asarray(whole.statistics.num_target_runs)[:num_examples]
  assert utilisation.num_row_runs == runs.sum()
  assert utilisation.num_iterations >= runs.max(initial=0)
  if num_examples == NUM_EXAMPLES:
    batches = [runs[i : i + BATCH_SIZE].max() for i in range(0, 13, BATCH_SIZE)]
    assert utilisation.num_iterations < sum(batches)
    assert 0.5 < utilisation.share <= 1


def test_the_loop_returns_when_enough_rows_are_done(programs):
  prompt = make_prompt([1, 2])
  fresh = programs.init(PARAMS, np.uint32(SEED), prompt)
  state = programs.idle(fresh)
  assert state.done.all()
  sources = np.array([-1, 0, -1, 1], np.int32)
  state = programs.replace(state, fresh, sources)
  assert state.done.tolist() == [True, False, True, False]
  state, output = programs.run(PARAMS, state, np.int32(3))
  # Example 1 has six new tokens, example 2 has eleven.
  assert output.done.tolist() == [True, True, True, False]
  assert output.statistics.num_target_runs[0] == 0
  assert 0 < int(output.lengths[3]) < 3 + 11
  _, output = programs.run(PARAMS, state, np.int32(4))
  assert output.done.all()
  assert output.lengths.tolist()[1::2] == [2 + 6, 3 + 11]


def test_rows_of_another_shape_are_refused(programs):
  fresh = programs.init(PARAMS, np.uint32(0), make_prompt([1, 2]))
  longer = dataclasses.replace(
    fresh, log_probs=jnp.zeros((2, MAX_LEN + 1), jnp.float32)
  )
  with pytest.raises(ValueError, match=r'\[25\].*\[24\]'):
    refill.replace_rows(fresh, longer, jnp.zeros(2, jnp.int32))


def test_more_fresh_rows_than_rows_are_refused():
  with pytest.raises(ValueError, match=r'3 rows.*batch of 2'):
    refill_programs(TARGET, DRAFTER, 3, 2)
