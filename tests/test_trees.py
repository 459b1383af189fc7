"""Trees of drafts in the loop."""

import functools

import jax
import numpy as np
import pytest

from specdec_jax import drafters
from specdec_jax.assembly import recording
from specdec_jax.base import Params, Tree
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from tests import decoders, slow, toy, toy_gemma, toy_t5, toy_tree
from tests.decoders import GREEDY, SAMPLED, plain, rows, speculate
from tests.toy_tree import BENT, rule

V = 5
TARGET = toy.toy(V)
TARGET_PARAMS = toy.toy_params(V, seed=11)
PARAMS = Params(TARGET_PARAMS, toy.perturb(TARGET_PARAMS, seed=2))
PREFIXES = [[1, 2, 3, 1, 2], [2], [4, 4], [0, 3, 0, 3, 0, 3], [1, 0, 2, 1]]
DRAFTERS = {
  'likeliest': toy_tree.drafter(BENT, is_sampled=False),
  'sampled': toy_tree.drafter(BENT, is_sampled=True, logits_to_probs=SAMPLED),
  'abstains': toy_tree.drafter(BENT, is_sampled=True, may_abstain=True),
}


def _prompt(**fields):
  return toy.prompt(PREFIXES * 4, **fields)


def _ragged():
  """Rows with limits of their own."""
  limits = [len(prefix) + 4 * i for i, prefix in enumerate(PREFIXES)] * 4
  return _prompt(max_lengths=limits)


ENDS = {'eos_id': 3, 'seed': 4}


@functools.cache
def _stepped(name: str, walk: str):
  """The loop's state after the prefill, and a step of it, compiled."""
  method = Method(
    target=TARGET,
    drafter=DRAFTERS[name],
    verify_fn=rule(walk, BENT),
    logits_to_probs=SAMPLED,
    eos_id=3,
  )
  init = jax.jit(functools.partial(speculative.init, method=method, max_len=24))
  step = jax.jit(functools.partial(speculative.step, method=method))
  return init(PARAMS, jax.random.key(0), _prompt()), step


@slow.parametrize(
  ('name', 'way'),
  [(name, way) for name in DRAFTERS for way in ('greedy', 'sampled')],
  now=[('likeliest', 'greedy'), ('sampled', 'sampled')],
)
def test_the_walk_gives_the_tokens_of_plain_decoding(name, way):
  """Sampled ones too, by the same seed, through EOS and limits."""
  walk, to_probs = {
    'greedy': ('greedy_walk', GREEDY),
    'sampled': ('target_sample_walk', SAMPLED),
  }[way]
  prompt = _ragged()
  ends = {'to_probs': to_probs, **ENDS}
  expected = plain(TARGET, PARAMS, prompt, **ends)
  drafter = DRAFTERS[name]
  output = speculate(
    TARGET, PARAMS, drafter, prompt, rule=rule(walk, BENT), **ends
  )
  for field in ('tokens', 'lengths', 'done', 'has_nan'):
    np.testing.assert_array_equal(
      getattr(output, field), getattr(expected, field)
    )
  np.testing.assert_allclose(output.log_probs, expected.log_probs, atol=1e-6)
  counters = jax.device_get(output.statistics)
  assert counters.num_accepted.shape == (20, 3)
  assert (counters.num_accepted.sum(0)[:2] > 0).all()
  assert counters.num_target_runs.sum() < counters.num_tokens.sum()
  drafted = counters.num_target_runs * len(BENT.parents)
  if name == 'abstains':
    assert (counters.num_drafted < drafted).any()
  else:
    np.testing.assert_array_equal(counters.num_drafted, drafted)


@pytest.mark.slow
def test_rows_without_a_draft_cost_one_position():
  """Rows of one length, which abstain at once: those runs are short."""
  prompt = toy.prompt(
    [[1, 2, 3]] * 20,
    width=6,
    row_ids=np.zeros(20, np.int32),
    max_lengths=[24] * 20,
  )
  output = speculate(
    TARGET,
    PARAMS,
    DRAFTERS['abstains'],
    prompt,
    rule=rule('greedy_walk', BENT),
    to_probs=GREEDY,
    **ENDS,
  )
  counters = jax.device_get(output.statistics)
  assert (counters.num_short_runs > 0).all()
  runs = counters.num_target_runs - counters.num_short_runs
  np.testing.assert_array_equal(counters.num_drafted, 6 * runs)


def test_a_tree_without_branches_is_a_chain():
  """Traversal of it is block verification: the same tokens and counters."""
  chain = drafters.autoregressive(TARGET, gamma=3, logits_to_probs=SAMPLED)
  tree = Tree(parents=(0, 1, 2))
  expected = speculate(TARGET, PARAMS, chain, _prompt(), rule='block', eos_id=3)
  output = speculate(
    TARGET,
    PARAMS,
    chain._replace(tree=tree),
    _prompt(),
    rule=rule('traversal', tree),
    eos_id=3,
  )
  assert rows(output) == rows(expected)
  for field in ('num_tested', 'num_accepted', 'num_target_runs'):
    np.testing.assert_array_equal(
      getattr(output.statistics, field), getattr(expected.statistics, field)
    )
  np.testing.assert_allclose(
    output.statistics.accept_prob, expected.statistics.accept_prob, rtol=1e-4
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'walk'),
  [('sampled', 'traversal'), ('abstains', 'target_sample_walk')],
)
def test_a_step_tells_the_chain_that_stands_for_the_tree(name, walk):
  """Its records, joined, are the output, and agree with the counters."""
  state, step = _stepped(name, walk)
  records, traced = [], recording.init(_prompt())
  pieces = lambda ids: [f':{i}' for i in ids]
  while not state.done.all():
    state, info = step(PARAMS, state)
    assert info.draft.tokens.shape == (20, 3)
    assert info.target_probs.shape == (20, 4, V)
    np.testing.assert_array_equal(
      (info.verification.path > 0).sum(1), info.verification.num_accepted
    )
    made, traced = recording.iteration_records(info, traced, pieces)
    records += made
  output = speculative.output(state)
  for row, tokens in enumerate(rows(output)):
    told = [
      token['token']
      for record in records
      if record['row'] == row
      for token in recording.committed(record)
    ]
    assert PREFIXES[row % 5] + told == tokens
  summary = recording.summarize(records, 3)
  for field in ('num_tested', 'num_accepted', 'num_tokens', 'num_target_runs'):
    np.testing.assert_array_equal(
      getattr(summary, field), getattr(output.statistics, field).sum(0)
    )
  verdicts = {t['verdict'] for record in records for t in record['drafted']}
  assert {'accepted', 'rejected', 'discarded'} <= verdicts


def test_nan_stops_the_rows_that_it_stops_in_plain_decoding():
  table = PARAMS.target['table'].at[2, 1, 0].set(np.nan)
  bad = PARAMS._replace(target={'table': table.at[:, 3].set(np.nan)})
  expected = plain(TARGET, bad, _ragged(), to_probs=SAMPLED, **ENDS)
  output = speculate(
    TARGET,
    bad,
    DRAFTERS['likeliest'],
    _ragged(),
    rule=rule('target_sample_walk', BENT),
    **ENDS,
  )
  assert output.done.all()
  assert 0 < output.has_nan.sum() < 20
  assert rows(output) == rows(expected)
  np.testing.assert_array_equal(output.has_nan, expected.has_nan)
  assert np.isfinite(output.log_probs).all()


@pytest.mark.slow
def test_nan_of_a_sibling_that_was_drafted_is_seen():
  """Wherever it stands in the tree."""
  table = PARAMS.drafter['table'].at[2, 1].set(np.nan)
  output = speculate(
    TARGET,
    PARAMS._replace(drafter={'table': table}),
    DRAFTERS['sampled'],
    _prompt(),
    rule=rule('traversal', BENT),
  )
  # Four prompts end in 2, 1; other rows come to it, some of them in a draft.
  assert output.has_nan.sum() > 4
  for found, has_nan in zip(rows(output), output.has_nan, strict=True):
    assert found[-2:] == [2, 1] or not has_nan


@pytest.mark.parametrize(
  ('changes', 'walk', 'message'),
  [
    ({'gamma': 5}, 'greedy_walk', 'gamma 5.*6 nodes'),
    ({'tree': Tree((0, 1, 0))}, 'greedy_walk', 'breadth-first'),
    ({}, 'greedy', '6 nodes.*prefixes'),
  ],
)
def test_what_does_not_fit_is_refused(changes, walk, message):
  drafter = DRAFTERS['likeliest']._replace(**changes)
  verify_fn = walk if walk in decoders.RULES else rule(walk, BENT)
  with pytest.raises(ValueError, match=message):
    speculate(TARGET, PARAMS, drafter, _prompt(), rule=verify_fn)


def test_a_target_for_chains_alone_is_refused():
  target = TARGET._replace(gather=None)
  with pytest.raises(ValueError, match=r'6 nodes.*no gather'):
    speculate(
      target,
      PARAMS,
      DRAFTERS['likeliest'],
      _prompt(),
      rule=rule('greedy_walk', BENT),
    )


@pytest.mark.slow
def test_what_was_kept_of_a_tree_is_what_a_chain_leaves():
  """The cache's committed entries, after every step."""
  state, step = _stepped('abstains', 'target_sample_walk')
  has_moved = False
  for _ in range(6):
    state, info = step(PARAMS, state)
    cache, context = state.target_cache, state.context
    np.testing.assert_array_equal(cache.lengths, context.lengths - 1)
    for row, length in enumerate(np.asarray(cache.lengths)):
      np.testing.assert_array_equal(
        cache.tokens[row, :length], context.tokens[row, :length]
      )
    has_moved |= bool((info.verification.path[:, 0] > 1).any())
  assert has_moved


def _family(name: str):
  """A network in miniature and its params."""
  if name.startswith('Llama'):
    later = toy.LATER_LLAMA if name == 'Llama, later' else {}
    config = toy.llama_config(V, **later)
    return toy.llama(V, **later), toy.llama_params(config, seed=12, scale=3)
  if name == 'T5':
    config = toy_t5.config(V, num_layers=2)
    return toy_t5.model(V, num_layers=2), toy_t5.params(config, seed=1)
  make = {
    'Gemma 3': toy_gemma.decoder,
    'Gemma 4': toy_gemma.gemma_4_e2b,
    'Gemma 4, experts': toy_gemma.gemma_4_moe,
    'T5Gemma': toy_gemma.encoder_decoder,
  }
  config = make[name](V)
  return toy_gemma.model(config), toy_gemma.params(config, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'way'),
  [
    ('Llama', 'greedy'),
    ('Llama, later', 'sampled'),
    ('T5', 'sampled'),
    ('Gemma 3', 'sampled'),
    ('Gemma 4', 'sampled'),
    ('Gemma 4, experts', 'greedy'),
    ('T5Gemma', 'greedy'),
  ],
)
def test_the_walk_gives_plain_tokens_in_the_real_networks(name, way):
  """Ragged rows of the encoder and of the decoder; windows that are outgrown,
  and relative positions."""
  target, params = _family(name)
  encoder_rows = None
  if name.startswith('T5'):
    encoder_rows = [[5 - i % 4] * (1 + i % 3) for i in range(20)]
  prompt = _prompt(encoder_rows=encoder_rows)
  walk, to_probs = {
    'greedy': ('greedy_walk', GREEDY),
    'sampled': ('target_sample_walk', SAMPLED),
  }[way]
  both = Params(params, PARAMS.drafter)
  expected = plain(target, both, prompt, to_probs=to_probs)
  output = speculate(
    target,
    both,
    DRAFTERS['sampled'],
    prompt,
    rule=rule(walk, BENT),
    to_probs=to_probs,
  )
  assert rows(output) == rows(expected)
  np.testing.assert_allclose(output.log_probs, expected.log_probs, atol=1e-4)
  by_depth = np.sum(output.statistics.num_accepted, axis=0)
  assert (by_depth[:2] > 0).all()
