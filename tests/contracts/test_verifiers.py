"""What every verification rule promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import lazy, verification
from specdec_jax.base import Draft, Verification
from tests import slow

VOCAB_SIZE = 5
ROWS = {
  'speculative_sampling': verification.speculative_sampling,
  'speculative_sampling, lenience 0.5': functools.partial(
    verification.speculative_sampling, lenience=0.5
  ),
  'greedy': verification.greedy,
  'greedy, lenience 0.5': functools.partial(verification.greedy, lenience=0.5),
  'block_verification': verification.block_verification,
}
for rows in lazy.installed('tests.contrib.top_beta.contract_rows:RULES'):
  ROWS |= rows
COMPILED = {name: jax.jit(rule) for name, rule in ROWS.items()}
LENIENT = [verification.speculative_sampling, verification.greedy]


def _keys(count: int):
  return jax.random.split(jax.random.key(3), count)


def _case(batch_size: int, gamma: int, *, is_one_hot: bool, seed: int = 0):
  """A random draft of ragged lengths, and the target's distributions."""
  rng = np.random.default_rng(seed)
  draw = lambda count: rng.dirichlet(
    np.full(VOCAB_SIZE, 0.5), (batch_size, count)
  ).astype(np.float32)
  q, p = draw(gamma), draw(gamma + 1)
  tokens = (q.cumsum(-1) < rng.random((batch_size, gamma, 1))).sum(-1)
  draft = Draft(
    tokens=jnp.asarray(np.minimum(tokens, VOCAB_SIZE - 1), jnp.int32),
    probs=None if is_one_hot else jnp.asarray(q),
    lengths=jnp.asarray(rng.integers(0, gamma + 1, batch_size), jnp.int32),
  )
  return draft, jnp.asarray(p)


def _assert_equal(first: Verification, second: Verification, atol=0.0):
  np.testing.assert_array_equal(first.num_accepted, second.num_accepted)
  np.testing.assert_array_equal(first.next_token, second.next_token)
  np.testing.assert_allclose(first.accept_probs, second.accept_probs, atol=atol)


@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('is_one_hot', [False, True])
@slow.parametrize(
  ('batch_size', 'gamma'), [(1, 3), (5, 1), (40, 3)], now=[(40, 3)]
)
def test_verdict_is_well_formed(name, is_one_hot, batch_size, gamma):
  draft, p = _case(batch_size, gamma, is_one_hot=is_one_hot)
  made = COMPILED[name](_keys(batch_size), draft, p)
  assert made.num_accepted.shape == made.next_token.shape == (batch_size,)
  assert made.num_accepted.dtype == made.next_token.dtype == jnp.int32
  assert (made.num_accepted >= 0).all()
  assert (made.num_accepted <= draft.lengths).all()
  assert (made.next_token >= 0).all()
  assert (made.next_token < VOCAB_SIZE).all()
  assert made.accept_probs.shape == (batch_size, gamma)
  assert made.accept_probs.dtype == jnp.float32
  assert (made.accept_probs >= 0).all()
  assert (made.accept_probs <= 1).all()
  is_drafted = np.arange(gamma) < np.asarray(draft.lengths)[:, None]
  assert (np.asarray(made.accept_probs)[~is_drafted] == 0).all()
  if made.uniforms is None:
    return
  assert made.uniforms.shape == (batch_size, gamma)
  assert (made.uniforms >= 0).all()
  assert (made.uniforms < 1).all()


@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('is_one_hot', [False, True])
def test_rule_is_pure_and_compiles(name, is_one_hot):
  draft, p = _case(40, 3, is_one_hot=is_one_hot)
  made = COMPILED[name](_keys(40), draft, p)
  _assert_equal(made, COMPILED[name](_keys(40), draft, p))
  _assert_equal(made, ROWS[name](_keys(40), draft, p), atol=1e-6)


@pytest.mark.parametrize('name', ROWS)
def test_row_alone_is_judged_as_in_a_batch(name):
  draft, p = _case(5, 3, is_one_hot=False)
  keys = _keys(5)
  together = COMPILED[name](keys, draft, p)
  for row in range(5):
    one = lambda a, row=row: a[row : row + 1]
    alone = COMPILED[name](one(keys), jax.tree.map(one, draft), one(p))
    _assert_equal(alone, jax.tree.map(one, together), atol=1e-6)


@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('is_one_hot', [False, True])
def test_what_is_beyond_the_draft_does_not_matter(name, is_one_hot):
  draft, p = _case(40, 3, is_one_hot=is_one_hot)
  made = COMPILED[name](_keys(40), draft, p)
  is_drafted = jnp.arange(3, dtype=jnp.int32)[None, :] < draft.lengths[:, None]
  junk = draft.replace(
    tokens=jnp.where(is_drafted, draft.tokens, 4),
    probs=None
    if is_one_hot
    else jnp.where(is_drafted[..., None], draft.probs, 0.2),
  )
  # p beyond the draft's end is never met either.
  is_met = jnp.arange(4, dtype=jnp.int32)[None, :] <= draft.lengths[:, None]
  other_p = jnp.where(is_met[..., None], p, 0.2)
  _assert_equal(made, COMPILED[name](_keys(40), junk, other_p))


@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('is_one_hot', [False, True])
def test_empty_draft_leaves_the_targets_own_draw(name, is_one_hot):
  draft, p = _case(40, 3, is_one_hot=is_one_hot)
  empty = draft.replace(lengths=jnp.zeros(40, jnp.int32))
  made = COMPILED[name](_keys(40), empty, p)
  assert (made.num_accepted == 0).all()
  none = Draft(
    tokens=empty.tokens[:, :0],
    probs=None if is_one_hot else empty.probs[:, :0],
    lengths=empty.lengths,
  )
  without = COMPILED[name](_keys(40), none, p[:, :1])
  np.testing.assert_array_equal(made.next_token, without.next_token)
  assert without.accept_probs.shape == (40, 0)


@pytest.mark.parametrize('name', ROWS)
def test_draft_of_the_target_itself_is_accepted_whole(name):
  best = jnp.eye(VOCAB_SIZE, dtype=jnp.float32)[np.array([[2, 0, 1, 3]] * 5)]
  for probs in (best[:, :3], None):
    draft = Draft(
      tokens=jnp.array([[2, 0, 1]] * 5, jnp.int32),
      probs=probs,
      lengths=jnp.full(5, 3, jnp.int32),
    )
    made = COMPILED[name](_keys(5), draft, best)
    np.testing.assert_array_equal(made.num_accepted, 3)
    np.testing.assert_array_equal(made.next_token, 3)
    np.testing.assert_array_equal(made.accept_probs, 1.0)


@pytest.mark.parametrize('name', ROWS)
def test_nan_is_not_hidden_by_a_valid_verdict(name):
  """Ids stay within the vocabulary; the loop finds the NaN by itself."""
  draft, p = _case(5, 3, is_one_hot=False)
  made = COMPILED[name](_keys(5), draft, jnp.full_like(p, jnp.nan))
  assert (made.next_token >= 0).all()
  assert (made.next_token < VOCAB_SIZE).all()
  assert (made.num_accepted >= 0).all()
  assert (made.num_accepted <= draft.lengths).all()


@pytest.mark.parametrize('rule', LENIENT)
@pytest.mark.parametrize('lenience', [0.0, -0.5, 1.01, float('nan')])
def test_bad_lenience_is_refused(rule, lenience):
  draft, p = _case(5, 3, is_one_hot=False)
  with pytest.raises(ValueError, match='lenience'):
    rule(_keys(5), draft, p, lenience=lenience)
