"""What every drafter promises."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.base import Context, Drafter, Tree
from tests import slow, toy
from tests.contracts.table_of_drafters import ROWS, VOCAB_SIZE, every_drafter

CAPACITY, WIDTH = 24, 20
PREFIXES = [[1, 2, 3, 1, 2], [2], [4, 4], [0, 3, 0, 3, 0, 3], [1, 0, 2, 1]]


def _context(rows: list[list[int]]) -> Context:
  """The rows in a buffer whose rest holds tokens that must not matter."""
  tokens = np.full((len(rows), CAPACITY), 2, np.int32)
  for row, ids in enumerate(rows):
    tokens[row, : len(ids)] = ids
  lengths = np.array([len(ids) for ids in rows], np.int32)
  return Context(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths))


def _keys(count: int, seed: int = 0):
  return jax.random.split(jax.random.key(seed), count)


@functools.cache
def _compiled(name: str, gamma: int):
  """A drafter, each of its functions jitted, and its params."""
  drafter = ROWS[name].make(gamma)
  compiled = drafter._replace(
    init=jax.jit(drafter.init, static_argnums=2),
    propose=jax.jit(drafter.propose),
  )
  return compiled, ROWS[name].make_params()


def _start(name: str, gamma: int, rows: list[list[int]]):
  """A drafter, its params and its state before the first proposal."""
  drafter, params = _compiled(name, gamma)
  state = drafter.init(params, toy.prompt(rows, width=WIDTH), CAPACITY)
  return drafter, params, state


def _assert_equal(first, second, *, up_to=None):
  """Two drafts say the same, bit for bit."""
  np.testing.assert_array_equal(first.lengths, second.lengths)
  is_drafted = (
    np.arange(first.tokens.shape[1]) < np.asarray(first.lengths)[:, None]
  )
  np.testing.assert_array_equal(
    np.where(is_drafted, first.tokens, 0),
    np.where(is_drafted, second.tokens, 0),
  )
  if first.probs is None:
    assert second.probs is None
    return
  np.testing.assert_allclose(
    np.where(is_drafted[..., None], first.probs, 0),
    np.where(is_drafted[..., None], second.probs, 0),
    rtol=up_to or 0,
    atol=up_to or 0,
  )


@every_drafter
@slow.parametrize(
  ('gamma', 'batch_size'), [(1, 5), (3, 1), (3, 5)], now=[(3, 5)]
)
def test_draft_is_well_formed(name, gamma, batch_size):
  rows = PREFIXES[:batch_size]
  drafter, params, state = _start(name, gamma, rows)
  assert isinstance(drafter, Drafter)
  assert drafter.gamma == gamma
  if ROWS[name].is_tree and gamma > 1:
    assert len(drafter.tree.parents) == gamma
  draft, new_state = drafter.propose(
    params, _keys(batch_size), _context(rows), state
  )
  assert draft.tokens.shape == (batch_size, gamma)
  assert draft.tokens.dtype == jnp.int32
  assert draft.lengths.shape == (batch_size,)
  assert draft.lengths.dtype == jnp.int32
  assert (draft.lengths >= 0).all()
  assert (draft.lengths <= gamma).all()
  assert (draft.tokens >= 0).all()
  assert (draft.tokens < VOCAB_SIZE).all()
  if ROWS[name].has_constant_length:
    assert (draft.lengths == gamma).all()
  else:
    assert drafter.may_abstain or (draft.lengths > 0).all()
  shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
  assert shapes(new_state) == shapes(state)


@pytest.mark.parametrize(
  'name', [name for name in ROWS if not ROWS[name].is_one_hot]
)
def test_draft_law_is_normalised_and_possible(name):
  rows = PREFIXES * 200
  drafter, params, state = _start(name, 3, rows)
  draft, _ = drafter.propose(params, _keys(len(rows)), _context(rows), state)
  assert draft.probs.shape == (len(rows), 3, VOCAB_SIZE)
  assert draft.probs.dtype == jnp.float32
  assert (draft.probs >= 0).all()
  is_drafted = np.arange(3) < np.asarray(draft.lengths)[:, None]
  assert is_drafted[:, 0].all()
  sums = np.asarray(draft.probs.sum(-1))
  np.testing.assert_allclose(sums[is_drafted], 1, atol=1e-6)
  drawn = np.take_along_axis(
    np.asarray(draft.probs), np.asarray(draft.tokens)[..., None], axis=-1
  )
  assert (drawn[is_drafted] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', [name for name in ROWS if ROWS[name].is_one_hot]
)
def test_one_hot_drafter_ignores_its_keys(name):
  drafter, params, state = _start(name, 3, PREFIXES)
  context = _context(PREFIXES)
  first, _ = drafter.propose(params, _keys(5, 0), context, state)
  second, _ = drafter.propose(params, _keys(5, 1), context, state)
  assert first.probs is None
  _assert_equal(first, second)


@pytest.mark.parametrize(
  'name', [name for name in ROWS if not ROWS[name].is_one_hot]
)
def test_first_token_is_drawn_from_the_law_that_is_handed_over(name):
  """1000 draws after one prefix, held against q within five deviations."""
  rows = [PREFIXES[0]] * 1000
  drafter, params, state = _start(name, 3, rows)
  draft, _ = drafter.propose(params, _keys(1000, 7), _context(rows), state)
  q = np.asarray(draft.probs[0, 0], np.float64)
  counts = np.bincount(draft.tokens[:, 0], minlength=VOCAB_SIZE)
  deviation = np.sqrt(1000 * q * (1 - q)) + 1e-3
  assert (np.abs(counts - 1000 * q) <= 5 * deviation + 1e-3).all()
  # Rows of one context have one distribution, whatever their keys drew before.
  np.testing.assert_allclose(
    draft.probs[:, 0], np.tile(q, (1000, 1)), atol=1e-6
  )


@pytest.mark.slow
@every_drafter
def test_propose_is_pure_and_compiles(name):
  drafter, params, state = _start(name, 3, PREFIXES)
  context = _context(PREFIXES)
  first, _ = drafter.propose(params, _keys(5), context, state)
  again, _ = drafter.propose(params, _keys(5), context, state)
  _assert_equal(first, again)
  eager, _ = ROWS[name].make(3).propose(params, _keys(5), context, state)
  _assert_equal(first, eager, up_to=1e-6)


@pytest.mark.slow
@every_drafter
def test_row_alone_drafts_as_in_a_batch(name):
  drafter, params, state = _start(name, 3, PREFIXES)
  keys = _keys(5)
  together, _ = drafter.propose(params, keys, _context(PREFIXES), state)
  for row, prefix in enumerate(PREFIXES):
    _, _, own_state = _start(name, 3, [prefix])
    alone, _ = drafter.propose(
      params, keys[row : row + 1], _context([prefix]), own_state
    )
    one = lambda a, row=row: a[row : row + 1]
    _assert_equal(alone, jax.tree.map(one, together), up_to=1e-6)


@every_drafter
def test_drafter_that_was_rolled_back_is_as_good_as_fresh(name):
  """Invariants 4 and 5: after any accepted prefix of its draft and another
  token, and from a one-token prompt too, it drafts as if it had begun there."""
  gamma = 3
  rows = [list(prefix) for prefix in PREFIXES]
  drafter, params, state = _start(name, gamma, rows)
  # Row r accepts the path to the node that the step and r ask for; all
  # accepted, none accepted and those between turn up in every row.
  parents = (drafter.tree or Tree(parents=tuple(range(gamma)))).parents
  for step in range(5):
    draft, state = drafter.propose(
      params, _keys(5, step), _context(rows), state
    )
    for row, tokens in enumerate(rows):
      node = min((step + row) % (gamma + 1), int(draft.lengths[row]))
      drafted = draft.tokens[row].tolist()
      # Never a token that was drafted next: a stale one must not survive.
      following = {drafted[i] for i, p in enumerate(parents) if p == node}
      following |= {drafted[-1]} if node == gamma else set()
      wrong = [t for t in range(VOCAB_SIZE) if t not in following][step % 2]
      path = []
      while node:
        path.insert(0, drafted[node - 1])
        node = parents[node - 1]
      tokens += [*path, wrong]
  keys = _keys(5, 99)
  used, _ = drafter.propose(params, keys, _context(rows), state)
  fresh_state = drafter.init(params, toy.prompt(rows, width=WIDTH), CAPACITY)
  fresh, _ = drafter.propose(params, keys, _context(rows), fresh_state)
  _assert_equal(used, fresh, up_to=1e-5)


@pytest.mark.parametrize(
  'name', [name for name in ROWS if not ROWS[name].is_tree]
)
@pytest.mark.parametrize('gamma', [0, -1, True, 1.5, 10**9])
def test_bad_gamma_is_refused(name, gamma):
  with pytest.raises(
    ValueError, match=f'gamma must be .* got {re.escape(repr(gamma))}'
  ):
    ROWS[name].make(gamma)
