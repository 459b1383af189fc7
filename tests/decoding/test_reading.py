"""Text that is read behind what rows hold decodes as if it were all new."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters
from specdec_jax.base import Params, Prompt, Tree
from specdec_jax.decoding import reading
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.program import Program
from specdec_jax.verification import speculative_sampling, traversal
from tests import decoders, slow, toy, toy_eagle, toy_families

MAX_LEN, LARGER, SEED = 40, 56, 5
TARGET = toy.toy(8)
COUNTING = toy_eagle.counting(8, gamma=3, num_drafted=7)
TARGET_PARAMS = toy.toy_params(8, seed=1)
PARAMS = Params(
  target=TARGET_PARAMS, drafter=toy.perturb(TARGET_PARAMS, seed=2)
)
TREE = Tree(parents=(0, 0, 1, 1, 2, 3))
OF_MODEL = {'gamma': 3, 'logits_to_probs': decoders.SAMPLED}
# Targets, drafters and rules: with no memory, with a cache, with one that lags
# behind by more than a token, and with what the target's last call left.
WAYS = {
  'lookup': (TARGET, drafters.prompt_lookup(gamma=3), speculative_sampling),
  'model': (
    TARGET,
    drafters.autoregressive(TARGET, **OF_MODEL),
    speculative_sampling,
  ),
  'adaptive': (
    TARGET,
    drafters.adaptive(
      TARGET,
      min_prob=0.4,
      first=drafters.prompt_lookup(gamma=3),
      **OF_MODEL,
    ),
    speculative_sampling,
  ),
  'tree': (
    TARGET,
    drafters.branching(
      TARGET,
      tree=TREE,
      logits_to_probs=decoders.SAMPLED,
    ),
    functools.partial(traversal, tree=TREE),
  ),
  'eagle': (
    COUNTING.target,
    drafters.autoregressive(drafters.eagle(COUNTING.network), **OF_MODEL),
    speculative_sampling,
  ),
}


def programs_of(way: str, prompt: Prompt, max_len: int):
  target, drafter, rule = WAYS[way]
  method = Method(
    target=target,
    drafter=drafter,
    verify_fn=rule,
    logits_to_probs=decoders.SAMPLED,
    eos_id=-1,
  )
  program = Program(
    method=method, params=PARAMS, prompt=prompt, max_len=max_len
  )
  parts = program.prefill, program.read_on, program.run
  return [part.jitted for part in parts]


def prompt_of(rows, num_new: int, width: int | None = None) -> Prompt:
  width = width or max(map(len, rows))
  lengths = np.array([len(row) for row in rows], np.int32)
  return Prompt(
    encoder_tokens=None,
    decoder_tokens=np.array(
      [[*row, *[0] * (width - len(row))] for row in rows], np.int32
    ),
    decoder_lengths=lengths,
    row_ids=np.arange(len(rows), dtype=np.int32),
    max_lengths=lengths + num_new,
  )


def committed(state) -> list[list[int]]:
  pairs = zip(state.context.tokens, state.context.lengths, strict=True)
  return [tokens[:length].tolist() for tokens, length in pairs]


@slow.parametrize(
  ('way', 'num_rows'),
  [(way, n) for n in (3, 1) for way in WAYS],
  now=[('model', 3), ('eagle', 3), ('adaptive', 1)],
)
def test_turns_decode_as_one_prompt(monkeypatch, way, num_rows):
  monkeypatch.setattr(reading, '_WIDTH', 4)
  rows = [[1], [2], [3]][:num_rows]
  prompt, key = prompt_of(rows, 1), jax.random.key(SEED)
  prefill, read_on, run = programs_of(way, prompt, MAX_LEN)
  whole = jax.jit(prefill)
  state = prefill(PARAMS, key, prompt)
  rng = np.random.default_rng(0)
  # New tokens of each turn; and what is taken back of all before.
  for turn, (num_new, num_back) in enumerate([(9, 0), (1, 0), (5, 4), (2, 9)]):
    rows = [
      [*row[: max(1, len(row) - num_back * b)], *rng.integers(0, 7, num_new)]
      for b, row in enumerate(committed(state))
    ]
    prompt = prompt_of(rows, 4, MAX_LEN)
    state, num_fed = read_on(PARAMS, key, prompt, state)
    lag = 1 if way == 'lookup' else 5
    if not turn or not num_back:
      assert num_fed[0] <= -(-(num_new + lag) // 4) * 4
    state = run(PARAMS, state)
    expected = run(PARAMS, whole(PARAMS, key, prompt))
    assert committed(state) == committed(expected)
    np.testing.assert_array_equal(state.log_probs, expected.log_probs)
    jax.tree.map(
      np.testing.assert_array_equal, state.statistics, expected.statistics
    )
  assert state.statistics.num_drafted.sum() > 0


@pytest.mark.slow
def test_eagle_reads_again_what_was_taken_back():
  # An entry of the real network has read the token after it.
  config = toy.llama_config(8)
  sizes = toy_eagle.config(config)
  target, network = toy_families.networks(config, sizes, gamma=3)
  own = toy.llama_params(config, seed=1, scale=3)
  drafted = toy_eagle.joined(own, toy_eagle.params(sizes, seed=2))
  params = Params(target=own, drafter=drafted)
  method = Method(
    target=target,
    drafter=drafters.autoregressive(drafters.eagle(network), **OF_MODEL),
    verify_fn=speculative_sampling,
    logits_to_probs=decoders.SAMPLED,
    eos_id=-1,
  )
  first = prompt_of([[1, 2]], 20)
  program = Program(method=method, params=params, prompt=first, max_len=MAX_LEN)
  read_on, run = program.read_on.jitted, program.run.jitted
  prefill = jax.jit(program.prefill.jitted)
  for seed in range(6):
    key = jax.random.key(seed)
    state = run(params, prefill(params, key, first))
    [held] = committed(state)
    row = [*held[:8], (held[8] + 1) % 7, 3, 1, 5, 2, 4, 6, 1, 3]
    prompt = prompt_of([row], 12, MAX_LEN)
    state, _ = read_on(params, key, prompt, state)
    found, expected = (
      run(params, state),
      run(params, prefill(params, key, prompt)),
    )
    assert committed(found) == committed(expected)


@pytest.mark.slow
def test_more_room_changes_nothing():
  rows, key = [[1], [2]], jax.random.key(SEED)
  first = prompt_of(rows, 6)
  prefill, _, run = programs_of('model', first, MAX_LEN)
  state = run(PARAMS, prefill(PARAMS, key, first))
  rows = [[*row, 5, 2, 6] for row in committed(state)]
  prefill, read_on, run = programs_of('model', first, LARGER)
  state = reading.grown(state, prefill(PARAMS, key, first))
  prompt = prompt_of(rows, 9, LARGER)
  state, num_fed = read_on(PARAMS, key, prompt, state)
  assert num_fed.tolist() == [32, 32]
  state = run(PARAMS, state)
  expected = run(PARAMS, jax.jit(prefill)(PARAMS, key, prompt))
  assert committed(state) == committed(expected)
  jax.tree.map(
    np.testing.assert_array_equal, state.statistics, expected.statistics
  )


def test_a_prompt_is_as_wide_as_the_buffer():
  prompt, key = prompt_of([[1, 2]], 1), jax.random.key(0)
  prefill, read_on, _ = programs_of('lookup', prompt, MAX_LEN)
  state = prefill(PARAMS, key, prompt)
  narrow = dataclasses.replace(prompt, decoder_tokens=jnp.zeros((1, 7), int))
  with pytest.raises(ValueError, match=r'\[1, 7\].*\[1, 40\]'):
    read_on(PARAMS, key, narrow, state)
