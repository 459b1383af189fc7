"""Decodes whose outcome is known beforehand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, lazy, verification
from specdec_jax.base import Draft, Params
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from tests import decoders, extras, slow, toy, toy_families, toy_tree
from tests.contracts.table_of_drafters import ROWS, VOCAB_SIZE, every_drafter
from tests.decoders import GREEDY, SAMPLED, plain, rows, silent, speculate

TARGET = toy.toy(VOCAB_SIZE)
TARGET_PARAMS = toy.toy_params(VOCAB_SIZE, seed=11)
PREFIXES = [[1, 2, 3, 1, 2], [2], [4, 4], [0, 3, 0, 3, 0, 3], [1, 0, 2, 1]]
LLAMA = toy.llama(VOCAB_SIZE)
LLAMA_PARAMS = toy.llama_params(toy.llama_config(VOCAB_SIZE), seed=12, scale=3)
MODELS = {'toy': (TARGET, TARGET_PARAMS), 'llama': (LLAMA, LLAMA_PARAMS)}
FIELDS = ('tokens', 'lengths', 'log_probs', 'done', 'has_nan')


def _prompt(copies: int = 4, **fields):
  return toy.prompt(PREFIXES * copies, **fields)


def _self_drafter(name: str, gamma: int, to_probs):
  return drafters.autoregressive(
    MODELS[name][0], gamma=gamma, logits_to_probs=to_probs
  )


@functools.cache
def _endless_rows():
  return rows(plain(TARGET, Params(TARGET_PARAMS), _prompt(8), to_probs=GREEDY))


@functools.cache
def _plain_rows(name: str, way: str):
  """The plain decode of the prompts, for comparison."""
  target, params = MODELS[name]
  to_probs = {'greedy': GREEDY, 'sampled': SAMPLED}[way]
  return plain(target, Params(params), _prompt(), to_probs=to_probs)


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter',
  [
    silent(0, may_abstain=False),
    silent(3, may_abstain=True),
    silent(3, may_abstain=False),
  ],
  ids=['gamma 0', 'abstains', 'empty drafts'],
)
@pytest.mark.parametrize('rule', ['speculative_sampling', 'block'])
def test_without_a_draft_it_is_plain_decoding(drafter, rule):
  params = Params(TARGET_PARAMS)
  output = speculate(TARGET, params, drafter, _prompt(), rule=rule)
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
    TARGET, params, drafter, _prompt(), rule=rule, to_probs=GREEDY
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
  prompt = _prompt(1, encoder_rows=encoder_rows if has_encoder else None)
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
      _prompt(max_lengths=[len(p) + 12 for p in PREFIXES * 4]),
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
    _prompt(1),
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
    _prompt(8, max_lengths=limits),
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
  _check_counters(output, prefixes)


def _check_counters(output, prefixes):
  """What holds between the counters of any decode."""
  counters = jax.tree.map(np.asarray, output.statistics)
  lengths = np.array([len(prefix) for prefix in prefixes])
  np.testing.assert_array_equal(counters.num_tokens, output.lengths - lengths)
  accepted, tested = counters.num_accepted, counters.num_tested
  assert (accepted <= tested).all()
  assert (tested[:, 1:] <= accepted[:, :-1]).all()
  assert (tested.sum(1) <= counters.num_drafted).all()
  assert (tested[:, 0] <= counters.num_target_runs).all()
  # Each run commits what it accepted and one more, unless the last was cut.
  cut = accepted.sum(1) + counters.num_target_runs - counters.num_tokens
  assert ((cut == 0) | (cut == 1)).all()
  assert (counters.num_target_runs[counters.num_tokens == 0] == 0).all()


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
  _check_counters(output, PREFIXES)


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


def _poison(table, where):
  return {'table': table['table'].at[where].set(jnp.nan)}


@slow.parametrize(
  'name', ['prompt_lookup', 'uniform', 'autoregressive'], now=['autoregressive']
)
def test_nan_in_the_target_stops_the_row_there(name):
  """After tokens 2, 1 the target returns NaN, for one next token even."""
  params = Params(TARGET_PARAMS, ROWS[name].make_params())
  drafter = ROWS[name].make(3)
  healthy = speculate(TARGET, params, drafter, _prompt())
  bad = params._replace(target=_poison(params.target, (2, 1, 0)))
  output = speculate(TARGET, bad, drafter, _prompt())
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
  _check_counters(output, PREFIXES * 4)


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
  ends = {'prompt': _prompt(max_lengths=limits), 'to_probs': GREEDY}
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
  healthy = speculate(TARGET, params, drafter, _prompt())
  bad = params._replace(drafter=_poison(params.drafter, (2, 1)))
  output = speculate(TARGET, bad, drafter, _prompt())
  assert output.done.all()
  assert 0 < output.has_nan.sum() < 20
  pairs = zip(rows(output), rows(healthy), output.has_nan, strict=True)
  for found, expected, has_nan in pairs:
    assert found == (expected[: len(found)] if has_nan else expected)
    assert found[-2:] == [2, 1] or not has_nan
  _check_counters(output, PREFIXES * 4)


@pytest.mark.slow
@pytest.mark.parametrize('rule', ['speculative_sampling', 'block'])
def test_nan_in_the_drafter_beyond_an_eos_stops_nothing(rule):
  drafter = ROWS['autoregressive'].make(3)
  table = _poison(toy.toy_params(VOCAB_SIZE, seed=3), (slice(None), 3))
  params = Params(TARGET_PARAMS, table)
  output = speculate(TARGET, params, drafter, _prompt(), rule=rule, eos_id=3)
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
      _prompt(1),
    ),
    plain(LLAMA, Params(bad), _prompt(1), to_probs=SAMPLED),
  ):
    assert output.has_nan.all()
    assert output.done.all()
    assert rows(output) == PREFIXES
    assert np.sum(output.statistics.num_target_runs) == 0


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
      params, jax.random.key(0), _prompt(20), method=method, max_len=24
    )
    run = functools.partial(speculative.run, method=method)
    counters = jax.jit(run)(params, state).statistics
    efficiency.append(
      np.sum(counters.num_tokens) / np.sum(counters.num_target_runs)
    )
  assert efficiency[0] + 0.1 < efficiency[1] < efficiency[2] - 0.1


def _fails(message: str, *, max_len=24, drafter=None, prompt=None):
  with pytest.raises(ValueError, match=message):
    speculate(
      TARGET,
      Params(TARGET_PARAMS),
      drafter or drafters.prompt_lookup(gamma=3, min_ngram=1),
      prompt or _prompt(1),
      max_len=max_len,
    )


def test_static_mistakes_are_named_with_their_numbers():
  _fails('prompt of 6 tokens does not fit in max_len 5', max_len=5)
  with pytest.raises(ValueError, match=r'6 tokens.*max_len 5'):
    plain(TARGET, Params(TARGET_PARAMS), _prompt(1), to_probs=GREEDY, max_len=5)
  nothing = jax.tree.map(lambda rows: rows[:0], _prompt(1))
  _fails('a batch of 0 rows', prompt=nothing)
  with pytest.raises(ValueError, match='0 rows'):
    plain(TARGET, Params(TARGET_PARAMS), nothing, to_probs=GREEDY)
  _fails(
    'drafter has 6 token ids, the target 5',
    drafter=drafters.uniform(gamma=2, vocab_size=6),
  )
  _fails(
    'declares gamma 4 and proposes 3 tokens',
    drafter=drafters.prompt_lookup(gamma=3, min_ngram=1)._replace(gamma=4),
  )


def test_decoder_only_model_refuses_encoder_tokens():
  prompt = dataclasses.replace(
    _prompt(1), encoder_tokens=jnp.ones((5, 3), jnp.int32)
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

  drafter = silent(6, may_abstain=False)._replace(propose=propose)
  params = Params(LLAMA_PARAMS)
  # A block behind 13 entries needs 20; for max_len + 1 there are 16.
  options = {'to_probs': GREEDY, 'max_len': 15}
  output = speculate(LLAMA, params, drafter, _prompt(1), **options)
  expected = plain(LLAMA, params, _prompt(1), **options)
  assert rows(output) == rows(expected)
  np.testing.assert_allclose(output.log_probs, expected.log_probs, atol=1e-5)
