"""Spec-Verification: the rule, and what it promises about a whole decode."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Draft, Params
from specdec_jax.contrib.top_beta.rule import top_beta
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families
from specdec_jax.models.drafting import block_decoder
from specdec_jax.models.drafting.block_decoder import BlockDecoder
from specdec_jax.models.t5 import T5
from specdec_jax.sampling import logits
from tests import decoders, padded_drafts, toy, toy_block, toy_t5
from tests.contrib.top_beta import specdec_loop

V, MAX_LEN, GAMMA, EOS, NUM_ROWS = 12, 18, 4, 1, 100
CONFIG = toy_t5.config(V)
BLOCK_CONFIG = toy_block.config(V)
TARGET = families.language_model(CONFIG)
DRAFTER = drafters.spec_drafter(
  block_decoder.block_model(BLOCK_CONFIG), gamma=GAMMA
)
RAW = logits.standardize()
# An untrained drafter is right by chance; these rules accept by different
# chances.
STRICT = (1, math.inf)
SETTINGS = [(3, 1.0), (5, 1.0), (5, 3.0)]


@functools.cache
def weights() -> Params:
  target = toy_t5.params(CONFIG, seed=1, scale=1.5)
  return Params(target, toy_block.params(BLOCK_CONFIG, seed=5))


@functools.cache
def sources() -> list[list[int]]:
  rng = np.random.default_rng(0)
  rows = [rng.integers(2, V, rng.integers(1, 9)) for _ in range(NUM_ROWS)]
  return [[*row.tolist(), EOS] for row in rows]


def prompt_of(row_ids):
  return toy.prompt(
    [[0]] * len(row_ids),
    encoder_rows=[sources()[i] for i in row_ids],
    encoder_width=9,
  )


def rule_of(setting):
  beta, tau = setting
  return functools.partial(top_beta, beta=beta, tau=tau)


@functools.cache
def generator(setting):
  @jax.jit
  def generate(params, prompt):
    return speculative.generate(
      params,
      jax.random.key(0),
      prompt,
      method=Method(
        target=TARGET,
        drafter=DRAFTER,
        verify_fn=rule_of(setting),
        logits_to_probs=RAW,
        eos_id=EOS,
      ),
      max_len=MAX_LEN,
    )

  return generate


@functools.cache
def decoded(setting):
  """Rows, and tokens per iteration."""
  output = generator(setting)(weights(), prompt_of(range(NUM_ROWS)))
  counts = output.statistics
  return decoders.rows(output), float(
    counts.num_tokens.sum() / counts.num_target_runs.sum()
  )


@jax.jit
def _teacher_forced(params, source, text):
  return jax.nn.log_softmax(
    T5(CONFIG).apply({'params': params}, source, text), axis=-1
  )


@jax.jit
def _fill(params, source, text, start):
  block = BlockDecoder(BLOCK_CONFIG).apply(
    {'params': params},
    source,
    text,
    jnp.arange(text.shape[1])[None, :] < start,
    start[None],
    width=GAMMA,
  )
  return block[0].argmax(-1)


def _padded(rows, width):
  return np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)


@pytest.mark.parametrize('beta', [1, 2, 4])
@pytest.mark.parametrize('tau', [0.0, 0.7, math.inf])
def test_rule_is_the_definition(beta, tau):
  """Against sets and logarithms, ties and impossible tokens included."""
  rng = np.random.default_rng(beta)
  p = rng.choice([0.0, 1.0, 1.5, 3.0], (300, GAMMA + 1, 5))
  p[..., 0] += 0.5
  p = (p / p.sum(-1, keepdims=True)).astype(np.float32)
  tokens = rng.integers(0, 5, (300, GAMMA)).astype(np.int32)
  lengths = rng.integers(0, GAMMA + 1, 300).astype(np.int32)
  draft = Draft(
    tokens=jnp.asarray(tokens), probs=None, lengths=jnp.asarray(lengths)
  )
  keys = jax.random.split(jax.random.key(0), 300)
  made = jax.jit(rule_of((beta, tau)))(keys, draft, jnp.asarray(p))
  seen = set()
  for row in range(300):
    count = 0
    for token, probs in zip(tokens[row, : lengths[row]], p[row], strict=False):
      best = np.argsort(-probs, kind='stable')[:beta]
      with np.errstate(divide='ignore'):
        gap = np.log(probs.max()) - np.log(probs[token])
      if token not in best or probs[token] == 0 or gap > tau + 1e-6:
        break
      count += 1
    assert made.num_accepted[row] == count
    assert made.next_token[row] == p[row, count].argmax()
    seen.add(count)
  assert len(seen) >= 3


@pytest.mark.parametrize(
  ('beta', 'tau', 'message'),
  [
    (0, 1.0, r'beta.*integer'),
    (-1, 1.0, r'beta.*integer'),
    (True, 1.0, r'beta.*integer'),
    (1.0, 1.0, r'beta.*integer'),
    (2, -0.1, r'tau.*at least 0'),
    (2, math.nan, r'tau.*at least 0'),
  ],
)
def test_bad_settings_are_refused(beta, tau, message):
  with pytest.raises(ValueError, match=message):
    top_beta(None, None, None, beta=beta, tau=tau)


@pytest.mark.parametrize('setting', SETTINGS)
def test_loop_is_the_papers_on_100_sentences(setting):
  beta, tau = setting
  params = weights()
  iterations = 0
  for source, row in zip(sources(), decoded(setting)[0], strict=True):
    encoder_tokens = _padded([source], 9)

    def next_log_probs(text, encoder_tokens=encoder_tokens):
      padded = _padded([text], MAX_LEN + GAMMA)
      return np.asarray(
        _teacher_forced(params.target, encoder_tokens, padded)[0]
      )

    def fill_block(text, encoder_tokens=encoder_tokens):
      padded = _padded([text[1:]], MAX_LEN - 1 + GAMMA)
      start = np.int32(len(text) - 1)
      block = _fill(params.drafter, encoder_tokens, padded, start)
      return np.asarray(block).tolist()

    text, count = specdec_loop.decode(
      next_log_probs,
      fill_block,
      start=0,
      eos=EOS,
      max_len=MAX_LEN,
      beta=beta,
      tau=tau,
    )
    assert row == text
    iterations += count
  num_tokens = sum(len(row) - 1 for row in decoded(setting)[0])
  assert decoded(setting)[1] == pytest.approx(num_tokens / iterations)


@functools.cache
def greedy_rows() -> list[list[int]]:
  """Plain greedy decoding of all sentences."""
  generate = functools.partial(
    autoregressive.generate,
    method=Method(
      target=TARGET,
      logits_to_probs=logits.standardize(temperature=0.0),
      eos_id=EOS,
    ),
    max_len=MAX_LEN,
  )
  output = jax.jit(generate)(
    weights(), jax.random.key(0), prompt_of(range(NUM_ROWS))
  )
  return decoders.rows(output)


@pytest.mark.slow
@pytest.mark.parametrize('batch_size', [1, 32])
def test_strict_is_greedy(batch_size):
  strict = generator(STRICT)(weights(), prompt_of(range(batch_size)))
  assert decoders.rows(strict) == greedy_rows()[:batch_size]
  if batch_size > 1:
    # It is speculation: something was accepted, and not everything.
    accepted = int(strict.statistics.num_accepted.sum())
    assert 0 < accepted < int(strict.statistics.num_tested.sum())


@pytest.mark.slow
def test_strict_is_the_rule_greedy():
  """Beta 1 and `greedy` are one rule, whatever tau says."""
  rng = np.random.default_rng(3)
  p = rng.dirichlet(np.ones(V), (200, GAMMA + 1)).astype(np.float32)
  best = p[:, :GAMMA].argmax(-1)
  tokens = np.where(rng.random(best.shape) < 0.7, best, 3).astype(np.int32)
  draft = Draft(
    tokens=jnp.asarray(tokens),
    probs=None,
    lengths=jnp.full(200, GAMMA, jnp.int32),
  )
  keys = jax.random.split(jax.random.key(0), 200)
  first = verification.greedy(keys, draft, jnp.asarray(p))
  for tau in (0.0, math.inf):
    second = rule_of((1, tau))(keys, draft, jnp.asarray(p))
    np.testing.assert_array_equal(first.num_accepted, second.num_accepted)
    np.testing.assert_array_equal(first.next_token, second.next_token)


@pytest.mark.slow
def test_tokens_per_iteration_grow_with_beta_and_tau():
  per_iteration = [decoded(setting)[1] for setting in (STRICT, *SETTINGS)]
  assert np.all(np.diff(per_iteration) > 0), per_iteration
  assert per_iteration[-1] > 1.2 * per_iteration[0]


@pytest.mark.parametrize('setting', SETTINGS)
def test_every_token_is_within_beta_and_tau(setting):
  """Teacher forcing, one call for all rows."""
  beta, tau = setting
  rows = decoded(setting)[0]
  log_probs = _teacher_forced(
    weights().target, _padded(sources(), 9), _padded(rows, MAX_LEN)
  )
  log_probs = np.asarray(log_probs)
  relaxed = 0
  for row, after in zip(rows, log_probs, strict=True):
    for token, scores in zip(row[1:], after, strict=False):
      assert (scores > scores[token] + 1e-5).sum() < beta
      assert scores.max() - scores[token] <= tau + 1e-5
      relaxed += token != scores.argmax()
  assert relaxed > 20


@pytest.mark.slow
def test_each_correction_is_the_likeliest():
  """Step by step: what was not drafted is the target's argmax."""
  setting = SETTINGS[-1]
  prompt = prompt_of(range(NUM_ROWS))
  method = Method(
    target=TARGET,
    drafter=DRAFTER,
    verify_fn=rule_of(setting),
    logits_to_probs=RAW,
    eos_id=EOS,
  )
  state = jax.jit(
    lambda params, prompt: speculative.init(
      params, jax.random.key(0), prompt, method=method, max_len=MAX_LEN
    )
  )(weights(), prompt)
  step = jax.jit(functools.partial(speculative.step, method=method))
  corrections = []
  while not state.done.all():
    state, info = step(weights(), state)
    accepted = np.asarray(info.verification.num_accepted)
    is_made = np.asarray(info.counts) > accepted
    corrections.append(
      np.where(is_made, np.asarray(info.starts) + accepted, -1)
    )
  rows = decoders.rows(speculative.output(state))
  assert rows == decoded(setting)[0]
  log_probs = np.asarray(
    _teacher_forced(
      weights().target, _padded(sources(), 9), _padded(rows, MAX_LEN)
    )
  )
  checked = 0
  for positions in corrections:
    for i, position in enumerate(positions):
      if position >= 0:
        assert rows[i][position] == log_probs[i, position - 1].argmax()
        checked += 1
  assert checked > NUM_ROWS


def test_a_laxer_rule_is_caught():
  """The control: top-5 decodes break the promise of top-3."""
  rows = decoded((5, 3.0))[0]
  log_probs = np.asarray(
    _teacher_forced(
      weights().target, _padded(sources(), 9), _padded(rows, MAX_LEN)
    )
  )
  ranks = [
    (scores > scores[token]).sum()
    for row, after in zip(rows, log_probs, strict=True)
    for token, scores in zip(row[1:], after, strict=False)
  ]
  assert max(ranks) >= 3


def test_oracle_is_accepted_whole():
  """A block decoder that is given the answer drafts it all: one iteration for
  every gamma + 1 tokens."""
  answers = greedy_rows()[:32]

  def predict(params, tokens, lengths, memory, width):
    blocks = jnp.take_along_axis(
      params,
      lengths[:, None] + 1 + jnp.arange(width, dtype=jnp.int32)[None],
      axis=1,
      mode='clip',
    )
    return jax.nn.one_hot(blocks, V)

  oracle = drafters.BlockModel(lambda *args: (), predict, V)
  output = jax.jit(
    functools.partial(
      speculative.generate,
      method=Method(
        target=TARGET,
        drafter=drafters.spec_drafter(oracle, gamma=GAMMA),
        verify_fn=verification.greedy,
        logits_to_probs=RAW,
        eos_id=EOS,
      ),
      max_len=MAX_LEN,
    )
  )(
    Params(weights().target, jnp.asarray(_padded(answers, MAX_LEN))),
    jax.random.key(0),
    prompt_of(range(32)),
  )
  assert decoders.rows(output) == answers
  expected = [math.ceil((len(row) - 1) / (GAMMA + 1)) for row in answers]
  np.testing.assert_array_equal(output.statistics.num_target_runs, expected)
  np.testing.assert_array_equal(
    output.statistics.num_accepted, output.statistics.num_tested
  )


def test_a_source_is_needed():
  prompt = dataclasses.replace(prompt_of([0]), encoder_tokens=None)
  with pytest.raises(ValueError, match='needs encoder tokens'):
    DRAFTER.init(weights().drafter, prompt, MAX_LEN)


@pytest.mark.parametrize('has_probs', [True, False])
def test_a_draft_ends_before_an_id_that_is_no_token(has_probs):
  rule = functools.partial(top_beta, beta=3)
  padded_drafts.check(rule, has_probs=has_probs)
