"""A row's tokens depend on its own prompt and key alone (invariant 7)."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Params, Sampling
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.sampling import logits
from tests import slow, toy, toy_eagle, toy_families, toy_tree

V, NUM_NEW, MAX_LEN, EOS = 12, 14, 24, 0
CONFIG = toy.llama_config(V)
TARGET = toy.llama(V)
ROWS = [
  [3, 1, 4],
  [1],
  [5, 9, 2, 6, 5],
  [3, 5],
  [8, 9, 7, 9],
  [3, 2],
  [3, 8, 4],
  [6, 2, 6, 4, 3],
]
WAYS = {
  'greedy': logits.standardize(temperature=0.0),
  'sampled': logits.standardize(temperature=0.9, top_p=0.95),
}
RULES = {
  'speculative_sampling': verification.speculative_sampling,
  'block_verification': verification.block_verification,
  'traversal': toy_tree.rule('traversal', toy_tree.BENT),
}
CASES = [
  ('prompt_lookup', 'speculative_sampling', 'greedy'),
  ('prompt_lookup', 'block_verification', 'sampled'),
  ('autoregressive', 'speculative_sampling', 'greedy'),
  ('autoregressive', 'block_verification', 'sampled'),
  ('eagle', 'speculative_sampling', 'sampled'),
  ('lookup first', 'block_verification', 'sampled'),
  ('tree', 'traversal', 'sampled'),
]
RAGGED = CASES[1:3] + CASES[4:]
EAGLE = toy_eagle.config(CONFIG)
EAGLE_TARGET, NETWORK = toy_families.networks(CONFIG, EAGLE, gamma=3)


def make_drafter(name: str, way: str):
  if name == 'prompt_lookup':
    return drafters.prompt_lookup(gamma=3, min_ngram=1)
  if name == 'uniform':
    return drafters.uniform(gamma=2, vocab_size=V)
  if name == 'tree':
    return toy_tree.drafter(
      toy_tree.BENT, is_sampled=True, logits_to_probs=WAYS[way]
    )
  if name == 'lookup first':
    return drafters.adaptive(
      TARGET,
      gamma=3,
      logits_to_probs=WAYS[way],
      first=drafters.prompt_lookup(gamma=3, min_ngram=1),
    )
  model = drafters.eagle(NETWORK) if name == 'eagle' else TARGET
  return drafters.autoregressive(model, gamma=3, logits_to_probs=WAYS[way])


@functools.cache
def weights(name: str = 'autoregressive') -> Params:
  target = toy.llama_params(CONFIG, seed=1, scale=2.5)
  if name in ('autoregressive', 'lookup first'):
    return Params(target, toy.perturb(target, seed=2, scale=0.2))
  if name == 'tree':
    return Params(target, toy.toy_params(V, seed=2))
  own = toy_eagle.params(EAGLE, seed=2)
  return Params(
    target, toy_eagle.joined(target, own) if name == 'eagle' else ()
  )


def prompt_of(row_ids, width=None, sampling=None):
  rows = [ROWS[i] for i in row_ids]
  prompt = toy.prompt(
    rows,
    width=width,
    row_ids=np.array(row_ids),
    max_lengths=[len(row) + NUM_NEW for row in rows],
  )
  return dataclasses.replace(prompt, sampling=sampling)


def sampling_of(row_ids, **other) -> Sampling:
  """How these rows are sampled if all differ: the first is greedy."""
  i = np.array(row_ids)
  values = {
    'temperature': np.array([0, 1, 0.5, 2, 1, 3, 0.9, 1], np.float32)[i],
    'top_k': np.array([V, V, 3, 5, V, 2, V, 4], np.int32)[i],
    'top_p': np.array([1, 0.7, 1, 0.9, 1, 1, 0.95, 0.8], np.float32)[i],
    'min_p': np.array([0, 0, 0, 0, 0.2, 0, 0, 0.05], np.float32)[i],
    'typical_p': np.array([1, 1, 1, 1, 1, 0.6, 0.9, 1], np.float32)[i],
  }
  return Sampling(**values | other)


@functools.cache
def generator(name: str, rule: str, way: str, max_len: int = MAX_LEN):
  params = weights(name)

  @jax.jit
  def generate(params, prompt, rng_key):
    return speculative.generate(
      params,
      rng_key,
      prompt,
      method=Method(
        target=EAGLE_TARGET if name == 'eagle' else TARGET,
        drafter=make_drafter(name, way),
        verify_fn=RULES[rule],
        logits_to_probs=WAYS[way],
        eos_id=EOS,
      ),
      max_len=max_len,
    )

  return lambda prompt, rng_key=None: generate(
    params, prompt, jax.random.key(7) if rng_key is None else rng_key
  )


def decoded(output) -> list[list[int]]:
  tokens = np.asarray(output.tokens)
  return [
    row[:length].tolist()
    for row, length in zip(tokens, output.lengths, strict=True)
  ]


@functools.cache
def expected(name: str, rule: str, way: str):
  """All eight rows in one batch, and their statistics."""
  output = generator(name, rule, way)(prompt_of(range(8)))
  assert np.all(output.done)
  assert not np.any(output.has_nan)
  return decoded(output), jax.device_get(output.statistics)


@slow.parametrize('case', RAGGED, ids='-'.join, now=CASES[1:2])
def test_a_row_alone_is_the_row_in_its_batch(case):
  rows, statistics = expected(*case)
  # Rows differ, and so do the number of runs they take: the batch is ragged.
  assert len({tuple(row) for row in rows}) == 8
  for i in (1, 2):
    output = generator(*case)(prompt_of([i]))
    assert decoded(output) == [rows[i]]
    for name in ('num_target_runs', 'num_drafted', 'num_tested'):
      np.testing.assert_array_equal(
        getattr(output.statistics, name)[0], getattr(statistics, name)[i]
      )


@slow.parametrize('case', CASES, ids='-'.join, now=CASES[1:2])
def test_order_of_the_batch_does_not_matter(case):
  rows, _ = expected(*case)
  order = [5, 0, 7, 2, 6, 1, 4, 3]
  output = generator(*case)(prompt_of(order))
  assert decoded(output) == [rows[i] for i in order]


@slow.parametrize('case', RAGGED, ids='-'.join, now=CASES[1:2])
def test_padding_and_buffers_do_not_matter(case):
  rows, _ = expected(*case)
  assert decoded(generator(*case, 41)(prompt_of(range(8), width=9))) == rows


@slow.parametrize(
  'case', CASES[1:4:2] + CASES[4:], ids='-'.join, now=[CASES[1]]
)
def test_eight_devices_give_the_tokens_of_one(case):
  rows, _ = expected(*case)
  assert len(jax.devices()) == 8
  mesh = jax.make_mesh(
    (8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  spec = jax.sharding.PartitionSpec('data')
  prompt = jax.device_put(
    prompt_of(range(8)), jax.sharding.NamedSharding(mesh, spec)
  )
  output = generator(*case)(prompt)
  assert len(output.tokens.sharding.device_set) == 8
  assert decoded(output) == rows


@slow.parametrize(
  'case',
  [case for case in CASES if 'sampled' in case],
  ids='-'.join,
  now=CASES[1:2],
)
def test_a_row_depends_on_its_own_sampling(case):
  """Each row alone, beside rows that are all sampled in another way; one that
  is greedy has the tokens of a greedy decode."""
  generate = generator(*case)
  together = decoded(
    generate(prompt_of(range(8), sampling=sampling_of(range(8))))
  )
  plain = functools.partial(expected, 'uniform', 'speculative_sampling')
  assert together[0] == plain('greedy')[0][0] != plain('sampled')[0][0]
  # Row 1 once again, and seven times what it must not depend on.
  ids, others = [1, *range(2, 8), 0], [1, 7, 7, 7, 6, 6, 6, 6]
  mixed = decoded(generate(prompt_of(ids, sampling=sampling_of(others))))
  assert mixed[0] == together[1]
  assert mixed[1:] != together[2:] + together[:1]
  # As one way of sampling for all rows, which the program has.
  same = sampling_of(
    [1] * 8,
    temperature=np.full(8, 0.9, np.float32),
    top_p=np.full(8, 0.95, np.float32),
  )
  rows = decoded(generate(prompt_of(range(8), sampling=same)))
  assert rows == expected(*case)[0]


def test_a_row_id_names_the_draws():
  """The same prompt twice in a batch: different ids, different draws."""
  case = ('uniform', 'speculative_sampling', 'sampled')
  rows = [ROWS[2]] * 2
  limits = [len(row) + NUM_NEW for row in rows]
  generate = generator(*case)
  apart = toy.prompt(rows, row_ids=np.array([4, 5]), max_lengths=limits)
  alike = toy.prompt(rows, row_ids=np.array([4, 4]), max_lengths=limits)
  first, second = decoded(generate(apart))
  assert first != second
  assert decoded(generate(alike)) == [first, first]


@pytest.mark.slow
@pytest.mark.parametrize('way', WAYS)
def test_plain_rows_do_not_depend_on_their_batch(way):
  @jax.jit
  def generate(params, prompt):
    return autoregressive.generate(
      params,
      jax.random.key(7),
      prompt,
      method=Method(target=TARGET, logits_to_probs=WAYS[way], eos_id=EOS),
      max_len=MAX_LEN,
    )

  params = Params(weights().target)
  rows = decoded(generate(params, prompt_of(range(8))))
  for i in (1, 4):
    assert decoded(generate(params, prompt_of([i]))) == [rows[i]]
  if way == 'greedy':
    assert rows == expected('uniform', 'speculative_sampling', way)[0]
  assert rows[0] != rows[1]


@pytest.mark.slow
@pytest.mark.parametrize('key_impl', ['rbg', 'unsafe_rbg'])
@pytest.mark.parametrize('case', CASES[3:4], ids='-'.join)
def test_rows_draw_apart_by_keys_of_every_kind(case, key_impl):
  """One prompt eight times, and a first row that is done from the start."""
  rng_key = jax.random.split(jax.random.key(7, impl=key_impl))[1]
  rows = [ROWS[2]] * 8
  limits = [len(row) + NUM_NEW for row in rows]
  limits[0] = len(rows[0])

  def decode(ids):
    prompt = toy.prompt(
      [rows[i] for i in ids],
      row_ids=np.array(ids),
      max_lengths=[limits[i] for i in ids],
    )
    return decoded(generator(*case)(prompt, rng_key))

  together = decode(range(8))
  assert together[0] == rows[0]
  assert len({tuple(row) for row in together[1:]}) == 7
  assert decode([3]) == together[3:4]


@pytest.mark.parametrize('key_impl', ['rbg', 'unsafe_rbg'])
def test_draws_go_on_after_the_first_row_is_done(key_impl):
  """From one flat distribution, again and again."""
  flat = {'table': np.zeros((V + 1, V, V), np.float32)}
  generate = functools.partial(
    autoregressive.generate,
    method=Method(
      target=toy.toy(V), logits_to_probs=WAYS['sampled'], eos_id=-1
    ),
    max_len=MAX_LEN,
  )
  output = jax.jit(generate)(
    Params(flat),
    jax.random.key(7, impl=key_impl),
    toy.prompt([[1], [2]], max_lengths=[1, MAX_LEN]),
  )
  assert len(set(decoded(output)[1])) > V // 2


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES[1:4:2], ids='-'.join)
def test_64_bit_types_change_no_token(case):
  rows, _ = expected(*case)
  with jax.enable_x64(True):
    assert decoded(generator(*case)(prompt_of(range(8)))) == rows
