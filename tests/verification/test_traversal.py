"""Rules for trees alone: traversal integrated exactly over drafts and draws,
and the walk held against all paths of a tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import trees, verification
from specdec_jax.base import Draft, Tree
from specdec_jax.verification import target_walk
from specdec_jax.verification.block import decide as decide_block
from specdec_jax.verification.traversal import decide as decide_tree
from tests import broken, integrate, integrate_trees, toy_tree
from tests.proof_report import record
from tests.verification.test_exactness_rules import ERROR_BOUND, KINDS

SHAPES = {
  '(2)': toy_tree.shape(2),
  '(3)': toy_tree.shape(3),
  '(2, 1)': toy_tree.shape(2, 1),
  '(1, 2)': toy_tree.shape(1, 2),
  '(2, 1, 1)': toy_tree.shape(2, 1, 1),
  '(2, 2)': toy_tree.shape(2, 2),
  'bent': toy_tree.BENT,
}


@functools.cache
def _decide(shape: Tree):
  """One program per shape."""
  return jax.jit(functools.partial(decide_tree, tree=shape))


def _tables(shape: Tree, kind: str, count: int) -> list[integrate.Tree]:
  # Likeliest tokens, where none are drawn: of distributions with many.
  kind = 'full' if kind == 'silent' else kind
  rng = np.random.default_rng(len(shape.parents))
  depth = trees.depth(shape)
  return [
    integrate.random_tree(rng, gamma=depth, kind=kind) for _ in range(count)
  ]


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize('name', SHAPES)
def test_traversal_has_the_targets_distribution(name, record_property):
  shape, largest, num_tables = SHAPES[name], 0.0, 0
  for kind in KINDS:
    for tables in _tables(shape, kind, 3):
      found = integrate_trees.integrate_rule(
        _decide(shape), shape, tables, is_sampled=kind != 'silent'
      )
      largest = max(largest, integrate.error(found, tables))
      num_tables += 1
  record(
    record_property,
    'Traversal integrated exactly: error over the next D + 1 tokens',
    shape=name,
    nodes=len(shape.parents),
    tables=num_tables,
    largest_error=largest,
    bound=ERROR_BOUND,
    verdict='lossless' if largest < ERROR_BOUND else 'WRONG',
  )
  assert largest < ERROR_BOUND


@pytest.mark.proof
@pytest.mark.parametrize('name', SHAPES)
def test_traversal_is_the_papers_algorithm(name, record_property):
  """Step by step in float64: the same distribution and mean length, which is
  that of the recursive rule or more."""
  shape, accepted = SHAPES[name], []
  for tables in _tables(shape, 'full', 2):
    made = integrate_trees.integrate_rule(_decide(shape), shape, tables)
    exact = tables._replace(
      p=[_in_float64(probs) for probs in tables.p],
      q=[_in_float64(probs) for probs in tables.q],
    )
    found, other = (
      integrate_trees.integrate_reference(rule, shape, exact)
      for rule in (
        integrate_trees.traversal,
        integrate_trees.recursive_rejection,
      )
    )
    for reference in (found, other):
      assert integrate.error(reference, exact) < 1e-12
    assert made.num_accepted == pytest.approx(found.num_accepted, abs=1e-5)
    accepted.append((found.num_accepted, other.num_accepted))
  record(
    record_property,
    'Accepted tokens of trees, mean of random p and q over 3 tokens',
    shape=name,
    traversal=float(np.mean(accepted, axis=0)[0]),
    recursive_rejection=float(np.mean(accepted, axis=0)[1]),
  )
  gains = np.subtract(*np.transpose(accepted))
  assert min(gains) > -1e-12
  if trees.depth(shape) > 1:
    assert max(gains) > 1e-3


def _in_float64(probs: np.ndarray) -> np.ndarray:
  probs = probs.astype(np.float64)
  return probs / probs.sum(-1, keepdims=True)


@pytest.mark.proof
def test_broken_traversal_has_another_distribution(record_property):
  shape = SHAPES['(2, 1)']
  decide = functools.partial(broken.traversal_without_norm, tree=shape)
  errors = [
    integrate.error(
      integrate_trees.integrate_rule(jax.jit(decide), shape, tables), tables
    )
    for tables in _tables(shape, 'full', 3)
  ]
  record(
    record_property,
    'Broken rules for trees integrated exactly',
    rule='q not renormalised',
    largest_error=max(errors),
    verdict='rejected' if max(errors) > 1e-3 else 'NOT REJECTED',
  )
  assert max(errors) > 1e-3


@pytest.mark.parametrize('is_one_hot', [False, True])
@pytest.mark.parametrize('gamma', [1, 3])
def test_traversal_of_a_chain_is_block_verification(gamma, is_one_hot):
  rng = np.random.default_rng(gamma)
  q, p = (
    rng.dirichlet(np.full(5, 0.5), (500, count)).astype(np.float32)
    for count in (gamma, gamma + 1)
  )
  tokens = (q.cumsum(-1) < rng.random((500, gamma, 1))).sum(-1)
  draft = Draft(
    tokens=jnp.asarray(np.minimum(tokens, 4), jnp.int32),
    probs=None if is_one_hot else jnp.asarray(q),
    lengths=jnp.asarray(rng.choice([0, gamma], 500), jnp.int32),
  )
  uniforms = jnp.asarray(rng.random((500, gamma)), jnp.float32)
  chain = jax.jit(decide_block)(uniforms, draft, jnp.asarray(p))
  made = _decide(Tree(tuple(range(gamma))))(uniforms, draft, jnp.asarray(p))
  np.testing.assert_array_equal(made.num_accepted, chain.num_accepted)
  for field in ('accept_probs', 'next_probs'):
    np.testing.assert_allclose(
      getattr(made, field), getattr(chain, field), atol=1e-6
    )
  depths = np.arange(1, gamma + 1)
  is_accepted = depths <= np.asarray(made.num_accepted)[:, None]
  np.testing.assert_array_equal(made.path, np.where(is_accepted, depths, 0))
  assert 0 < np.mean(is_accepted) < 1


@pytest.mark.slow
@pytest.mark.parametrize('name', ['(3)', '(2, 2)', 'bent'])
def test_the_walk_ends_at_the_deepest_node_that_was_drawn(name):
  """Among few tokens, so that siblings and whole paths are often equal."""
  shape, num_rows = SHAPES[name], 400
  depth, num_nodes = trees.depth(shape), len(shape.parents)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 3, (num_rows, num_nodes)).astype(np.int32)
  drawn = rng.integers(0, 3, (num_rows, depth + 1)).astype(np.int32)
  lengths = np.where(np.arange(num_rows) % 5, num_nodes, 0).astype(np.int32)
  p = rng.dirichlet(np.ones(3), (num_rows, num_nodes + 1)).astype(np.float32)
  met = []

  def draw(depth: int, probs):
    met.append(probs)
    return jnp.asarray(drawn)[:, depth]

  made = target_walk.decide(
    draw,
    Draft(tokens=jnp.asarray(tokens), probs=None, lengths=jnp.asarray(lengths)),
    jnp.asarray(p),
    tree=shape,
  )
  made = jax.device_get(made)
  paths = np.asarray(trees.path_of(shape, jnp.arange(num_nodes + 1)))
  for row in range(num_rows):
    fits = [0]
    for node in range(1, num_nodes + 1):
      path = paths[node][paths[node] > 0]
      if (tokens[row, path - 1] == drawn[row, : len(path)]).all():
        fits.append(node)
    longest = int((paths[fits] > 0).sum(1).max()) if lengths[row] else 0
    assert made.num_accepted[row] == longest
    assert made.next_token[row] == drawn[row, longest]
    path = made.path[row]
    assert (path > 0).sum() == longest
    end = path[longest - 1] if longest else 0
    np.testing.assert_array_equal(path, paths[end])
    assert end in fits
    np.testing.assert_array_equal(met[longest][row], p[row, end])
    _check_chances(shape, tokens[row], lengths[row], p[row], made, row)
  assert len(set(made.num_accepted.tolist())) == depth + 1


def _check_chances(shape, tokens, length, p, made, row):
  """Each node's is the mass of its siblings' tokens, itself one of them."""
  for node, parent in enumerate(shape.parents, start=1):
    siblings = {
      tokens[other]
      for other, its_parent in enumerate(shape.parents)
      if its_parent == parent
    }
    expected = sum(p[parent, token] for token in siblings) if length else 0
    assert made.accept_probs[row, node - 1] == pytest.approx(expected, abs=1e-6)


RULES = 'target_sample_walk', 'greedy_walk', 'traversal'


@pytest.mark.parametrize('name', RULES)
def test_rule_for_trees_is_well_formed(name):
  """Ids in range whatever it reads; empty drafts leave the target's own draw,
  and a draft that the target is sure of is accepted to a leaf."""
  shape, rng = toy_tree.BENT, np.random.default_rng(1)
  rule = jax.jit(toy_tree.rule(name, shape))
  row_keys = jax.random.split(jax.random.key(0), (4, 40))
  q, p = (
    jnp.asarray(rng.dirichlet(np.ones(5), (40, count)), jnp.float32)
    for count in (6, 7)
  )
  tokens = jnp.asarray(rng.integers(0, 5, (40, 6)), jnp.int32)
  draft = Draft(tokens=tokens, probs=q, lengths=jnp.full(40, 6, jnp.int32))
  for probs in (p, jnp.full_like(p, jnp.nan)):
    made = rule(row_keys, draft, probs)
    assert made.num_accepted.dtype == made.next_token.dtype == jnp.int32
    assert made.path.shape == (40, 3)
    assert made.accept_probs.shape == (40, 6)
    assert ((made.next_token >= 0) & (made.next_token < 5)).all()
    np.testing.assert_array_equal((made.path > 0).sum(1), made.num_accepted)
  empty = draft.replace(lengths=jnp.zeros(40, jnp.int32))
  none = Draft(tokens=tokens[:, :0], probs=q[:, :0], lengths=empty.lengths)
  made, without = rule(row_keys, empty, p), rule(row_keys, none, p[:, :1])
  np.testing.assert_array_equal(made.next_token, without.next_token)
  assert not made.path.any()
  assert not without.path.any()
  assert not made.accept_probs.any()
  assert without.accept_probs.shape == (40, 0)

  sure = jnp.eye(5, dtype=jnp.float32)[np.array([[2, 0, 1, 1, 1, 3, 4]] * 40)]
  chosen = jnp.array([[0, 2, 4, 0, 1, 1]] * 40, jnp.int32)
  silent = Draft(tokens=chosen, probs=None, lengths=draft.lengths)
  made = rule(row_keys, silent, sure)
  # Of the root 2, which is the second node; of that 1, which is its child.
  np.testing.assert_array_equal(made.path, [[2, 5, 0]] * 40)
  np.testing.assert_array_equal(made.next_token, 3)


@pytest.mark.parametrize('name', RULES)
def test_rule_for_another_tree_is_refused(name):
  draft = Draft(
    tokens=jnp.zeros((1, 4), jnp.int32),
    probs=None,
    lengths=jnp.full(1, 4, jnp.int32),
  )
  keys = jax.random.split(jax.random.key(0), (4, 1))
  with pytest.raises(ValueError, match=r'of 4 .*6 nodes'):
    toy_tree.rule(name, toy_tree.BENT)(keys, draft, jnp.ones((1, 5, 3)) / 3)


def test_the_arithmetic_of_a_tree():
  bent = toy_tree.BENT
  assert trees.depths(bent).tolist() == [0, 1, 1, 2, 2, 2, 3]
  assert trees.depth(bent) == 3
  assert [list(level) for level in trees.levels(bent)] == [
    [1, 2],
    [3, 4, 5],
    [6],
  ]
  assert trees.ranks(bent).tolist() == [0, 0, 1, 0, 1, 0, 0]
  sees = trees.ancestors(bent)
  assert [np.flatnonzero(row).tolist() for row in sees] == [
    [0],
    [0, 1],
    [0, 2],
    [0, 1, 3],
    [0, 1, 4],
    [0, 2, 5],
    [0, 1, 3, 6],
  ]
  nodes = jnp.array([0, 2, 3, 4, 6])
  assert trees.path_of(bent, nodes).tolist() == [
    [0, 0, 0],
    [2, 0, 0],
    [1, 3, 0],
    [1, 4, 0],
    [1, 3, 6],
  ]
  assert trees.line_of(bent, nodes).tolist() == [
    [1, 3, 6],
    [2, 5, 0],
    [1, 3, 6],
    [1, 4, 0],
    [1, 3, 6],
  ]


def test_where_nodes_stand_and_what_they_see():
  """The second level of a tree whose root is at 2 in a row, at 0 in another."""
  bent = toy_tree.BENT
  starts = jnp.array([2, 0], jnp.int32)
  placed = trees.placement(bent, range(3, 6), starts, 9)
  assert placed.positions.tolist() == [[4, 4, 4], [2, 2, 2]]
  assert placed.key_positions.tolist() == [
    [0, 1, 2, 3, 3, 4, 4, 4, 8],
    [0, 1, 1, 2, 2, 2, 6, 7, 8],
  ]
  seen = [
    [np.flatnonzero(row).tolist() for row in rows] for rows in placed.mask
  ]
  assert seen == [
    [[0, 1, 2, 3, 5], [0, 1, 2, 3, 6], [0, 1, 2, 4, 7]],
    [[0, 1, 3], [0, 1, 4], [0, 2, 5]],
  ]


@pytest.mark.parametrize(
  ('parents', 'message'),
  [
    ((), 'one node'),
    ((1,), 'before its child'),
    ((0, -1), 'before its child'),
    ((0, 1, 0), 'breadth-first'),
  ],
)
def test_a_tree_out_of_order_is_refused(parents, message):
  with pytest.raises(ValueError, match=message):
    trees.check(Tree(parents=parents))


def test_rules_are_public():
  assert {*RULES} <= {*verification.__all__}
