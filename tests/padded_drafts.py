"""Drafts with ids that are no tokens, such as a copier's padding of -1, or more
tokens than gamma, and what a rule for chains should make of them."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Draft, VerifyFn

# Ids that are no tokens of a vocabulary of `V`.
V = 4
NO_TOKENS = {
  'padded': -1,
  'beyond': V,
  'far_beyond': 2**31 - 1,
  'least': -(2**31),
}
_NUM_ROWS, _GAMMA = 512, 3


def check(rule: VerifyFn, *, has_probs: bool) -> None:
  """Asserts that a rule judges a draft of too many tokens, one of which is
  none, as the draft that ends before it."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.dirichlet(np.ones(V), shape).astype(np.float32)
  target_probs, probs = draw(_NUM_ROWS, _GAMMA + 1), draw(_NUM_ROWS, _GAMMA)
  # Mass at the last id, which -1 would pick.
  target_probs[:, :, -1] += 1
  target_probs /= target_probs.sum(axis=-1, keepdims=True)
  best = target_probs[:, :_GAMMA].argmax(axis=-1)
  is_best = rng.random(best.shape) < 0.7
  tokens = np.where(is_best, best, rng.integers(0, V, best.shape))
  # One of positions 0, 1 and 2, or none.
  places = np.arange(_NUM_ROWS) % (_GAMMA + 1)
  no_tokens = rng.choice([*NO_TOKENS.values()], _NUM_ROWS)
  is_faulty = np.arange(_GAMMA) == places[:, None]
  padded = np.where(is_faulty, no_tokens[:, None], tokens)

  def draft(tokens, lengths) -> Draft:
    return Draft(
      tokens=jnp.asarray(tokens, jnp.int32),
      probs=jnp.asarray(probs) if has_probs else None,
      lengths=jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), _NUM_ROWS),
    )

  judge = jax.jit(rule)
  row_keys = jax.random.split(jax.random.key(0), _NUM_ROWS)
  expected = judge(row_keys, draft(tokens, places), target_probs)
  verdict = judge(row_keys, draft(padded, 9), target_probs)
  assert np.max(verdict.num_accepted) == _GAMMA
  jax.tree.map(np.testing.assert_array_equal, verdict, expected)
  # A draft of less than nothing is empty.
  nothing = judge(row_keys, draft(tokens, -2), target_probs)
  empty = judge(row_keys, draft(tokens, 0), target_probs)
  jax.tree.map(np.testing.assert_array_equal, nothing, empty)
