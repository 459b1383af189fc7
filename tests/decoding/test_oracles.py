"""Decodes whose outcome is known beforehand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Draft, Params
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from tests import decoders, slow, toy, toy_families, toy_tree
from tests.contracts.table_of_drafters import ROWS, VOCAB_SIZE, every_drafter
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

MODELS = {'toy': (TARGET, TARGET_PARAMS), 'llama': (LLAMA, LLAMA_PARAMS)}
FIELDS = ('tokens', 'lengths', 'log_probs', 'done', 'has_nan')


def _self_drafter(name: str, gamma: int, to_probs):
  return drafters.autoregressive(
    MODELS[name][0], gamma=gamma, logits_to_probs=to_probs
  )


@functools.cache
def _endless_rows():
  return rows(
    plain(TARGET, Params(TARGET_PARAMS), prompts_of(8), to_probs=GREEDY)
  )


@functools.cache
def _plain_rows(name: str, way: str):
  """The plain decode of the prompts, for comparison."""
  target, params = MODELS[name]
  to_probs = {'greedy': GREEDY, 'sampled': SAMPLED}[way]
  return plain(target, Params(params), prompts_of(), to_probs=to_probs)


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter',
  [
    drafters.none(),
    drafters.none(3)._replace(may_abstain=True),
    drafters.none(3),
  ],
  ids=['gamma 0', 'abstains', 'empty drafts'],
)
@pytest.mark.parametrize('rule', ['speculative_sampling', 'block'])
def test_without_a_draft_it_is_plain_decoding(drafter, rule):
  params = Params(TARGET_PARAMS)
  output = speculate(TARGET, params, drafter, prompts_of(), rule=rule)
  expected = _plain_rows('toy', 'sampled')
  for field in FIELDS:
    np.testing.assert_array_equal(
      getattr(output, field), getattr(expected, field)
    )
  counters = output.statistics
  np.testing.assert_array_equal(counters.num_tokens, counters.num_target_runs)
  is_short = int(drafter.may_abstain)
  np.testing.assert_array_equal(
    counters.num_short_runs, counters.num_target_runs * is_short
  )
  assert np.sum(counters.num_drafted) == 0


@pytest.mark.parametrize('rule', decoders.RULES)
@every_drafter
def test_greedy_speculation_is_plain_greedy(name, rule):
  if rule != 'greedy' and name not in ('prompt_lookup', 'autoregressive'):
    pytest.skip('at temperature 0 the rules are one; two drafters will do')
  params = Params(TARGET_PARAMS, ROWS[name].make_params())
  drafter = ROWS[name].make(3)
  if ROWS[name].is_tree:
    rule = toy_tree.rule('greedy_walk', drafter.tree)
  output = speculate(
    TARGET, params, drafter, prompts_of(), rule=rule, to_probs=GREEDY
  )
  expected = _plain_rows('toy', 'greedy')
  assert rows(output) == rows(expected)
  np.testing.assert_allclose(output.log_probs, expected.log_probs, atol=1e-6)
  accepted = np.sum(output.statistics.num_accepted)
  tokens, runs = (
    np.sum(getattr(output.statistics, field))
    for field in ('num_tokens', 'num_target_runs')
  )
  assert accepted > 0
  assert runs < tokens


@slow.parametrize('family', toy_families.NAMES, now=['T5'])
def test_greedy_speculation_is_plain_greedy_in_every_family(family):
  """Ragged rows, on both sides of an encoder-decoder, in any order; windows are
  shorter."""
  target, params = toy_families.make(family, VOCAB_SIZE, num_layers=2)
  own = toy.perturb(params, seed=2, scale=0.2)
  encoder_rows = [[1], [3, 1, 4, 1], [2, 2], [4, 3, 2, 1, 1], [1, 2, 3]]
  has_encoder = toy_families.has_encoder(family)
  prompt = prompts_of(1, encoder_rows=encoder_rows if has_encoder else None)
  decode = functools.partial(
    speculate,
    target,
    Params(params, own),
    drafters.autoregressive(target, gamma=3, logits_to_probs=GREEDY),
    rule='greedy',
    to_probs=GREEDY,
  )
  output = decode(prompt)
  counters = output.statistics
  assert 0 < np.sum(counters.num_accepted) < np.sum(counters.num_tested)
  expected = rows(plain(target, Params(params), prompt, to_probs=GREEDY))
  assert rows(output) == expected
  order = np.array([3, 0, 4, 1, 2])
  others = decode(jax.tree.map(lambda x: x[order], prompt))
  assert rows(others) == [expected[i] for i in order]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'rule'),
  [*(('toy', rule) for rule in decoders.RULES), ('llama', 'block')],
)
def test_self_drafting_accepts_everything(name, rule):
  target, params = MODELS[name]
  to_probs = GREEDY if rule == 'greedy' else SAMPLED
  # Blocks of two and of four tokens; one of them for the dearer model.
  for gamma in (1, 3) if name == 'toy' else (3,):
    output = speculate(
      target,
      Params(params, params),
      _self_drafter(name, gamma, to_probs),
      prompts_of(max_lengths=[len(p) + 12 for p in PREFIXES * 4]),
      rule=rule,
      to_probs=to_probs,
    )
    counters = output.statistics
    np.testing.assert_array_equal(counters.num_tested, counters.num_accepted)
    # 12 tokens in blocks of gamma + 1, which divides 12.
    np.testing.assert_array_equal(counters.num_target_runs, 12 // (gamma + 1))
    if rule != 'block':
      # Its thresholds are not chances of single tokens.
      tested = np.sum(counters.num_tested, axis=1)
      np.testing.assert_allclose(counters.accept_prob, tested, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_log_probs_are_the_targets_own(name):
  """Before temperature and top-k, teacher-forced, 0 for the prompt."""
  target, params = MODELS[name]
  output = speculate(
    target,
    Params(params),
    drafters.prompt_lookup(gamma=3, min_ngram=1),
    prompts_of(1),
  )
  tokens = np.asarray(output.tokens)
  target = toy.compiled(target)
  start = target.init(params, toy.prompt([[0]] * 5), 24)
  scores, _ = target.extend(params, jnp.asarray(tokens[:, :-1]), start)
  expected = jax.nn.log_softmax(scores, axis=-1)
  expected = np.take_along_axis(
    np.asarray(expected), tokens[:, 1:, None], axis=-1
  )[..., 0]
  for row, prefix in enumerate(PREFIXES):
    np.testing.assert_array_equal(output.log_probs[row, : len(prefix)], 0)
    np.testing.assert_allclose(
      output.log_probs[row, len(prefix) :],
      expected[row, len(prefix) - 1 :],
      atol=1e-4,
    )


def _truncate(row, prompt_len: int, limit: int, eos_ids) -> list[int]:
  """What a plain decode keeps of `row`."""
  kept = row[:prompt_len]
  for token in row[prompt_len:limit]:
    kept.append(token)
    if token in eos_ids:
      break
  return kept


@pytest.mark.parametrize(
  ('name', 'eos_id'),
  [
    ('prompt_lookup', 3),
    ('prompt_lookup', -1),
    ('bigram', (0, 3)),
    ('autoregressive', 3),
    ('autoregressive', (0, 3)),
  ],
)
def test_eos_and_limits_in_mid_block_cut_what_plain_decoding_cuts(name, eos_id):
  prefixes = PREFIXES * 8
  rng = np.random.default_rng(0)
  limits = [len(prefix) + rng.integers(0, 15) for prefix in prefixes]
  params = Params(TARGET_PARAMS, ROWS[name].make_params())
  output = speculate(
    TARGET,
    params,
    ROWS[name].make(4),
    prompts_of(8, max_lengths=limits),
    rule='greedy',
    to_probs=GREEDY,
    eos_id=eos_id,
  )
  eos_ids = eos_id if isinstance(eos_id, tuple) else (eos_id,)
  endless = _endless_rows()
  assert rows(output) == [
    _truncate(row, len(prefix), limit, eos_ids)
    for row, prefix, limit in zip(endless, prefixes, limits, strict=True)
  ]
  assert output.done.all()
  is_beyond = np.arange(24) >= np.asarray(output.lengths)[:, None]
  assert (np.asarray(output.tokens)[is_beyond] == 0).all()
  assert (np.asarray(output.log_probs)[is_beyond] == 0).all()
  check_counters(output, prefixes)


def test_row_that_is_done_from_the_start_commits_nothing():
  limits = [len(prefix) + 9 for prefix in PREFIXES]
  limits[1], limits[3] = 1, 2
  params = Params(TARGET_PARAMS)
  drafter = drafters.uniform(gamma=2, vocab_size=VOCAB_SIZE)
  output = speculate(
    TARGET, params, drafter, toy.prompt(PREFIXES, max_lengths=limits)
  )
  decoded = rows(output)
  assert decoded[1] == PREFIXES[1]
  assert decoded[3] == PREFIXES[3]
  for counter in jax.tree.leaves(output.statistics):
    assert (np.asarray(counter)[[1, 3]] == 0).all()
  check_counters(output, PREFIXES)


@pytest.mark.slow
def test_steps_after_the_end_change_nothing_that_is_committed():
  state, take_step = _stepper('autoregressive')
  while not state.done.all():
    state, _ = take_step(state)
  again, info = take_step(state)
  assert (info.counts == 0).all()
  for field in ('context', 'log_probs', 'done', 'has_nan', 'statistics'):
    jax.tree.map(
      np.testing.assert_array_equal,
      getattr(state, field),
      getattr(again, field),
    )


def _stepper(name: str):
  """A state after prefill, and a compiled step."""
  method = Method(
    target=TARGET,
    drafter=ROWS[name].make(3),
    logits_to_probs=SAMPLED,
    eos_id=3,
  )
  params = Params(TARGET_PARAMS, ROWS[name].make_params())
  prompt = toy.prompt(PREFIXES)
  state = speculative.init(
    params, jax.random.key(0), prompt, method=method, max_len=24
  )
  step = functools.partial(speculative.step, method=method)
  return state, functools.partial(jax.jit(step), params)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['prompt_lookup', 'autoregressive'])
def test_steps_are_the_run(name):
  state, take_step = _stepper(name)
  while not state.done.all():
    before = np.asarray(state.context.lengths)
    state, info = take_step(state)
    np.testing.assert_array_equal(info.starts, before)
    np.testing.assert_array_equal(state.context.lengths, before + info.counts)
    for row, start in enumerate(before):
      count = int(info.counts[row])
      accepted = int(info.verification.num_accepted[row])
      block = info.draft.tokens[row, :accepted].tolist()
      block.append(int(info.verification.next_token[row]))
      committed = state.context.tokens[row, start : start + count].tolist()
      assert committed == block[:count]
  params = Params(TARGET_PARAMS, ROWS[name].make_params())
  whole = speculate(
    TARGET, params, ROWS[name].make(3), toy.prompt(PREFIXES), eos_id=3
  )
  assert rows(speculative.output(state)) == rows(whole)
  jax.tree.map(
    np.testing.assert_array_equal, state.statistics, whole.statistics
  )


@pytest.mark.slow
def test_lenience_commits_more_a_run():
  params = Params(TARGET_PARAMS, toy.perturb(TARGET_PARAMS, seed=2))
  drafter = _self_drafter('toy', 3, SAMPLED)
  efficiency = []
  for lenience in (1.0, 0.5, 0.1):
    method = Method(
      target=TARGET,
      drafter=drafter,
      verify_fn=functools.partial(
        verification.speculative_sampling, lenience=lenience
      ),
      logits_to_probs=SAMPLED,
      eos_id=-1,
    )
    state = speculative.init(
      params, jax.random.key(0), prompts_of(20), method=method, max_len=24
    )
    run = functools.partial(speculative.run, method=method)
    counters = jax.jit(run)(params, state).statistics
    efficiency.append(
      np.sum(counters.num_tokens) / np.sum(counters.num_target_runs)
    )
  assert efficiency[0] + 0.1 < efficiency[1] < efficiency[2] - 0.1


NO_ROWS = jax.tree.map(lambda rows: rows[:0], prompts_of(1))
LOOKUP = drafters.prompt_lookup(gamma=3, min_ngram=1)
MISTAKES = {
  'too long a prompt': (
    {'max_len': 5},
    'prompt of 6 tokens does not fit in max_len 5',
  ),
  'no rows': ({'prompt': NO_ROWS}, 'a batch of 0 rows'),
  'another vocabulary': (
    {'drafter': drafters.uniform(gamma=2, vocab_size=6)},
    'drafter has 6 token ids, the target 5',
  ),
  'another gamma': (
    {'drafter': LOOKUP._replace(gamma=4)},
    'declares gamma 4 and proposes 3 tokens',
  ),
}


@pytest.mark.parametrize(
  ('settings', 'message'), MISTAKES.values(), ids=MISTAKES
)
def test_static_mistakes_are_named_with_their_numbers(settings, message):
  settings = {'drafter': LOOKUP, 'prompt': prompts_of(1)} | settings
  with pytest.raises(ValueError, match=message):
    speculate(TARGET, Params(TARGET_PARAMS), **settings)


@pytest.mark.parametrize(
  ('prompt', 'max_len', 'message'),
  [(prompts_of(1), 5, r'6 tokens.*max_len 5'), (NO_ROWS, 24, '0 rows')],
  ids=['too long a prompt', 'no rows'],
)
def test_static_mistakes_of_plain_decoding(prompt, max_len, message):
  with pytest.raises(ValueError, match=message):
    plain(
      TARGET, Params(TARGET_PARAMS), prompt, to_probs=GREEDY, max_len=max_len
    )


def test_decoder_only_model_refuses_encoder_tokens():
  prompt = dataclasses.replace(
    prompts_of(1), encoder_tokens=jnp.ones((5, 3), jnp.int32)
  )
  with pytest.raises(ValueError, match='no encoder'):
    LLAMA.init(LLAMA_PARAMS, prompt, 24)


@pytest.mark.slow
def test_draft_longer_than_what_is_left_writes_nowhere_else():
  """Blocks that run over max_len, next to rows that do not."""

  def propose(params, row_keys, context, state):
    tokens = jnp.full((context.lengths.shape[0], 6), 4, jnp.int32)
    lengths = jnp.full_like(context.lengths, 6)
    return Draft(tokens=tokens, probs=None, lengths=lengths), state

  drafter = drafters.none(6)._replace(propose=propose)
  params = Params(LLAMA_PARAMS)
  # A block behind 13 entries needs 20; for max_len + 1 there are 16.
  options = {'to_probs': GREEDY, 'max_len': 15}
  output = speculate(LLAMA, params, drafter, prompts_of(1), **options)
  expected = plain(LLAMA, params, prompts_of(1), **options)
  assert rows(output) == rows(expected)
  np.testing.assert_allclose(output.log_probs, expected.log_probs, atol=1e-5)
