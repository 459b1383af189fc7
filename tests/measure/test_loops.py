"""Sides that share a prefill, and the parts that a decode is timed in."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import common
from specdec_jax import drafters, verification
from specdec_jax.base import Params
from specdec_jax.decoding.method import Method
from specdec_jax.measure import iteration_costs, loops, stopwatch
from specdec_jax.sampling import logits
from tests import toy, toy_grammar

V, MAX_LEN = 11, 30
MODEL = toy.toy(V)
GREEDY = logits.standardize(temperature=0.0)
PLAIN = Method(
  target=MODEL,
  verify_fn=verification.greedy,
  logits_to_probs=GREEDY,
  eos_id=-1,
)


@pytest.fixture(scope='module')
def args():
  params = toy.toy_params(V, seed=0)
  weights = Params(params, toy.perturb(params, seed=1))
  return weights, jax.random.key(0), [toy.prompt([[1, 2, 3], [4]])]


def drafter(gamma):
  return drafters.autoregressive(MODEL, gamma=gamma, logits_to_probs=GREEDY)


def method_of(gamma):
  return dataclasses.replace(PLAIN, drafter=drafter(gamma))


def loop_of(args, gamma):
  return loops.speculative_loop(*args, method=method_of(gamma), max_len=MAX_LEN)


@pytest.mark.slow
@pytest.mark.parametrize('gamma', [1, 3])
def test_a_shared_prefill_changes_nothing(args, gamma):
  methods = {each: method_of(each) for each in (gamma, 5)}
  made = common.speculative_loops(*args, methods=methods, max_len=MAX_LEN)
  shared, own = made[gamma], loop_of(args, gamma)
  [one], [other] = shared.on(args[2]).decode(), own.decode()
  np.testing.assert_array_equal(one.context.tokens, other.context.tokens)
  jax.tree.map(np.testing.assert_array_equal, one.statistics, other.statistics)
  assert one.statistics.num_tested.shape == (2, gamma)
  assert not one.statistics.num_short_runs.any()


def test_a_finished_loop_runs_no_iteration(args):
  loop = loop_of(args, 2)
  [state] = loops.finished(loop).decode()
  assert not state.statistics.num_target_runs.any()
  np.testing.assert_array_equal(state.context.lengths, [3, 1])


@pytest.mark.slow
def test_what_a_decode_costs_once_is_no_part_of_an_iteration(args):
  params, key, [prompt] = args
  made = iteration_costs.cost_programs(
    params,
    key,
    prompt,
    drafters={gamma: drafter(gamma) for gamma in (1, 3)},
    method=PLAIN,
    max_len=MAX_LEN,
  )
  seconds, results = stopwatch.alternate(made.programs, repeats=1)
  # By hand: every decode takes 5 s to begin, and a second an iteration.
  for name in seconds:
    if name == 'extend' or name[0] == 'draft':
      continue
    part, _ = name
    if isinstance(part, tuple):  # A launch.
      seconds[name] = np.array([5.0])
    else:
      runs = int(results[name].statistics.num_target_runs.max())
      seconds[name] = np.array([5.0 + runs])
  figures = made.costs(seconds, results)
  # Of two rows, a CPU's tiles take a width of 2, and no longer one of 3.
  assert figures['widths'] == [1, 2, 3, 4]
  assert figures['target_seconds'] == pytest.approx([1.0, 1.0, 1.0, 1.0])
  assert figures['launch_seconds'] == figures['plain_launch_seconds'] == 5.0


def in_turns():
  """5 or 6, then 7, and again: no copy may come, and 7 is a guess."""
  source = 'start: /((f|g)h){40}/'
  return toy_grammar.of_rows(source, source, vocabulary=toy_grammar.letters(V))


@pytest.mark.parametrize('has_grammar', [False, True])
def test_both_kinds_of_iteration_are_timed_in_one_program(args, has_grammar):
  """A drafter that may abstain is judged in the program that it will run in;
  guesses of a grammar change no kind."""
  *weights, [prompt] = args
  prompts = [prompt.replace(grammar=in_turns() if has_grammar else None)]
  copying = drafters.prompt_lookup(gamma=2)
  method = dataclasses.replace(PLAIN, drafter=copying)
  loop = loops.speculative_loop(
    *weights, prompts, method=method, max_len=MAX_LEN
  )
  full = loops.full_width_loop(loop)
  without = loops.without_drafts(full)
  assert full.run is without.run
  [drafted], [undrafted] = full.decode(), without.decode()
  assert not drafted.statistics.num_short_runs.any()
  assert drafted.statistics.num_tested.any()
  runs = undrafted.statistics.num_target_runs
  np.testing.assert_array_equal(undrafted.statistics.num_short_runs, runs)
  assert runs.all()
