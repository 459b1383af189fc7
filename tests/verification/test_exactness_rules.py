"""Every rule alone, integrated exactly over drafts and draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import verification
from specdec_jax.verification.block import decide as decide_block
from specdec_jax.verification.speculative_sampling import decide as decide_token
from tests import broken, goodness_of_fit, integrate
from tests.proof_report import record

RULES = {'speculative_sampling': decide_token, 'block': decide_block}
KINDS = (
  'full',
  'zeros',
  'disjoint',
  'equal',
  'near',
  'one_hot',
  'silent',
  'greedy',
)
ERROR_BOUND = 1e-6


def _trees(gamma: int, kind: str, count: int = 12) -> list[integrate.Tree]:
  rng = np.random.default_rng(gamma)
  return [
    integrate.random_tree(rng, gamma=gamma, kind=kind) for _ in range(count)
  ]


def _stop_after_zero(paths: np.ndarray) -> np.ndarray:
  """Proposes up to and including the first token 0."""
  is_zero = paths == 0
  return np.where(is_zero.any(1), is_zero.argmax(1) + 1, paths.shape[1])


@pytest.mark.proof
@pytest.mark.parametrize('gamma', [1, 2, 3])
@pytest.mark.parametrize('rule', RULES)
def test_lossless_rule_has_the_targets_distribution(
  rule, gamma, record_property
):
  largest, num_trees = 0.0, 0
  for kind in KINDS:
    for tree in _trees(gamma, kind):
      found = integrate.integrate(RULES[rule], tree)
      largest = max(largest, integrate.error(found, tree))
      num_trees += 1
  record(
    record_property,
    'Rules integrated exactly: error over the next gamma + 1 tokens',
    rule=rule,
    gamma=gamma,
    trees=num_trees,
    largest_error=largest,
    bound=ERROR_BOUND,
    verdict='lossless' if largest < ERROR_BOUND else 'WRONG',
  )
  assert largest < ERROR_BOUND


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('kind', ['full', 'zeros', 'silent'])
def test_ragged_drafts_have_the_targets_distribution(rule, kind):
  for length in range(4):
    constant = lambda paths, length=length: np.full(len(paths), length)
    for tree in _trees(3, kind, count=4):
      found = integrate.integrate(RULES[rule], tree, length_fn=constant)
      assert integrate.error(found, tree) < ERROR_BOUND
      assert found.num_accepted <= length


@pytest.mark.parametrize('rule', RULES)
def test_drafts_that_end_themselves_have_the_targets_distribution(rule):
  for tree in _trees(3, 'full'):
    found = integrate.integrate(RULES[rule], tree, length_fn=_stop_after_zero)
    assert integrate.error(found, tree) < ERROR_BOUND


@pytest.mark.proof
@pytest.mark.parametrize('rule', broken.RULES)
def test_broken_rule_has_another_distribution(rule, record_property):
  errors = [
    integrate.error(integrate.integrate(broken.RULES[rule], tree), tree)
    for tree in _trees(2, 'full')
  ]
  record(
    record_property,
    'Broken rules integrated exactly, gamma 2',
    rule=rule,
    trees=len(errors),
    largest_error=max(errors),
    verdict='rejected' if max(errors) > 1e-3 else 'NOT REJECTED',
  )
  assert max(errors) > 1e-3


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('kind', ['full', 'zeros', 'silent'])
def test_decision_flips_at_the_threshold(rule, kind):
  decide = jax.jit(RULES[rule])
  paths = goodness_of_fit.sequences(3, 3)
  num_open = 0
  for tree in _trees(3, kind, count=3):
    lengths = np.full(len(paths), 3)
    draft = integrate.make_draft(tree, paths, lengths)
    p = jnp.asarray(integrate.along(tree.p, paths))
    fails = np.full(paths.shape, 1 - 1e-7, np.float32)
    thresholds = np.asarray(decide(jnp.asarray(fails), draft, p).accept_probs)
    assert (thresholds >= 0).all()
    assert (thresholds <= 1).all()
    # Tokens that the drafter cannot draw are left out.
    is_open = ((thresholds > 0) & (thresholds < 0.999)).all(1)
    is_open &= integrate.path_probs(tree.q, paths).all(1)
    num_open += is_open.sum()
    for i in range(3):
      # Those before i pass, those after it fail: i alone decides.
      for factor, counts in ((1 - 1e-5, i + 1), (1 + 1e-5, i)):
        draws = fails.copy()
        draws[:, :i] = 0
        draws[:, i] = np.minimum(thresholds[:, i] * factor, 1 - 1e-7)
        made = decide(jnp.asarray(draws), draft, p)
        np.testing.assert_array_equal(
          np.asarray(made.num_accepted)[is_open], counts
        )
  assert num_open


@pytest.mark.parametrize('rule', RULES)
def test_impossible_token_never_passes_even_at_a_draw_of_zero(rule):
  p = jnp.array([[[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]]], jnp.float32)
  for q in (jnp.array([[[1.0, 0.0, 0.0]]], jnp.float32), None):
    draft = integrate.Draft(
      tokens=jnp.zeros((1, 1), jnp.int32),
      probs=q,
      lengths=jnp.ones(1, jnp.int32),
    )
    made = RULES[rule](jnp.zeros((1, 1), jnp.float32), draft, p)
    assert made.num_accepted[0] == 0
    np.testing.assert_array_equal(made.next_probs, [[0.0, 1.0, 0.0]])


@pytest.mark.parametrize('rule', RULES)
def test_silent_and_spoken_one_hot_drafts_are_one(rule):
  for tree in _trees(3, 'silent', count=4):
    spoken = tree._replace(is_one_hot=False)
    of_silent = integrate.integrate(RULES[rule], tree)
    of_spoken = integrate.integrate(RULES[rule], spoken)
    np.testing.assert_allclose(of_silent.joint, of_spoken.joint, atol=1e-7)
    assert of_silent.num_accepted == pytest.approx(
      of_spoken.num_accepted, abs=1e-6
    )


@pytest.mark.parametrize('lenience', [0.9, 0.5, 0.1])
@pytest.mark.parametrize('kind', ['full', 'zeros', 'silent'])
def test_lenience_bounds_every_token_by_p_over_lenience(lenience, kind):
  decide = functools.partial(decide_token, lenience=lenience)
  excess = []
  for tree in _trees(2, kind):
    joint = integrate.integrate(decide, tree).joint
    assert joint.sum() == pytest.approx(1, abs=1e-6)
    prefix = np.ones(())
    for table in tree.p:
      marginal = joint.sum(tuple(range(table.ndim, joint.ndim)))
      bound = prefix[..., None] * table / lenience
      assert (marginal <= bound + 1e-6).all()
      excess.append((marginal - lenience * bound).max())
      prefix = marginal
  # The bound is not kept by being exact.
  assert max(excess) > 0.01


def _toy_tree(gamma: int) -> integrate.Tree:
  """Sun et al.'s example: P = (1/3, 2/3), Q = (2/3, 1/3) at every step."""
  tables = lambda probs, count: [
    np.broadcast_to(np.float32(probs), (2,) * (i + 1)) for i in range(count)
  ]
  return integrate.Tree(
    tables([1 / 3, 2 / 3], gamma + 1), tables([2 / 3, 1 / 3], gamma)
  )


@pytest.mark.proof
@pytest.mark.parametrize(
  ('rule', 'expected'), [('speculative_sampling', 10 / 9), ('block', 11 / 9)]
)
def test_accepted_tokens_of_the_block_papers_example(
  rule, expected, record_property
):
  found = integrate.integrate(RULES[rule], _toy_tree(2))
  record(
    record_property,
    'Accepted tokens, P = (1/3, 2/3), Q = (2/3, 1/3), gamma 2 (Sun et al.)',
    rule=rule,
    paper=expected,
    here=found.num_accepted,
  )
  assert found.num_accepted == pytest.approx(expected, abs=1e-6)


def test_block_accepts_no_fewer_tokens():
  gains = []
  for gamma in (1, 2, 3):
    for kind in KINDS:
      for tree in _trees(gamma, kind, count=5):
        token = integrate.integrate(decide_token, tree).num_accepted
        block = integrate.integrate(decide_block, tree).num_accepted
        assert block >= token - 1e-6
        gains.append((gamma, kind, block - token))
  for gamma, kind, gain in gains:
    if gamma == 1 or kind == 'greedy':
      assert gain == pytest.approx(0, abs=1e-6)
  assert max(gain for *_, gain in gains) > 0.05


@pytest.mark.parametrize('lenience', [1.0, 0.6])
def test_greedy_accepts_what_it_says(lenience):
  rng = np.random.default_rng(5)
  p = rng.dirichlet(np.ones(4), (200, 4)).astype(np.float32)
  tokens = rng.integers(0, 4, (200, 3)).astype(np.int32)
  lengths = rng.integers(0, 4, 200).astype(np.int32)
  made = verification.greedy(
    jnp.zeros(200),
    integrate.Draft(tokens=jnp.asarray(tokens), probs=None, lengths=lengths),
    jnp.asarray(p),
    lenience=lenience,
  )
  for row in range(200):
    count = 0
    while (
      count < lengths[row]
      and p[row, count, tokens[row, count]] >= lenience * p[row, count].max()
    ):
      count += 1
    assert made.num_accepted[row] == count
    assert int(made.next_token[row]) == p[row, count].argmax()
