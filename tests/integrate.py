"""What a verification rule emits, integrated exactly over draft and draws.

A rule is its `decide(uniforms, draft, target_probs)`. For a drafted block, the
i-th token passes if its uniform draw lies below the threshold that
`accept_probs` names; every combination of passing and failing is fed to the
rule, and weighted by its probability.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Draft
from tests import goodness_of_fit


class Tree(NamedTuple):
  """Distributions after every sequence of up to G tokens.

  Attributes:
    p: float32 `[V]*(i+1)` for i = 0 .. G: the target's, after i tokens.
    q: float32 `[V]*(i+1)` for i = 0 .. G-1: the drafter's.
    is_one_hot: whether the drafter hands over no probabilities.
  """

  p: list[np.ndarray]
  q: list[np.ndarray]
  is_one_hot: bool = False

  @property
  def gamma(self) -> int:
    return len(self.q)

  @property
  def vocab_size(self) -> int:
    return self.p[0].shape[0]


class Integrated(NamedTuple):
  """What a rule does to a tree.

  Attributes:
    joint: float64 `[V]*(G+1)`, of the next G+1 tokens, those that the
      iteration did not emit being drawn from the target.
    num_accepted: expected accepted tokens.
  """

  joint: np.ndarray
  num_accepted: float


def random_tree(rng, *, gamma: int, vocab_size: int = 3, kind: str = 'full'):
  """A random tree; `kind` shapes the goodness_of_fit.

  full: no zeros. zeros: some tokens impossible in p, others in q. disjoint: no
  token is possible in both. equal: q is p. near: q is p up to rounding.
  one_hot: a deterministic drafter, probabilities and all; silent: the same
  without its probabilities. greedy: p and q are both one-hot.
  """
  shapes = [(vocab_size,) * (i + 1) for i in range(gamma + 1)]
  draw = lambda shape: rng.dirichlet(np.full(vocab_size, 0.7), shape[:-1])
  p = [_mask(rng, draw(shape), kind, 'p') for shape in shapes]
  q = [_mask(rng, draw(shape), kind, 'q') for shape in shapes[:-1]]
  if kind == 'disjoint':
    q = [_normalize(np.where(a > 0, 0, 1)) for a in p[:-1]]
  if kind == 'equal':
    q = [a.copy() for a in p[:-1]]
  if kind == 'near':
    noise = lambda a: a * (1 + 3e-7 * rng.normal(size=a.shape))
    q = [_normalize(noise(a)) for a in p[:-1]]
  return Tree(p, q, is_one_hot=kind == 'silent')


def _mask(rng, probs: np.ndarray, kind: str, side: str) -> np.ndarray:
  """Zeros some of `probs`, float32."""
  if kind == 'greedy' or (kind in ('one_hot', 'silent') and side == 'q'):
    return np.eye(probs.shape[-1], dtype=np.float32)[probs.argmax(-1)]
  if kind in ('zeros', 'disjoint'):
    is_kept = rng.random(probs.shape) < 0.6
    # At least one token is possible, and in p at least one is not.
    np.put_along_axis(is_kept, probs.argmax(-1)[..., None], True, -1)
    if kind == 'disjoint':
      np.put_along_axis(is_kept, probs.argmin(-1)[..., None], False, -1)
    probs = np.where(is_kept, probs, 0)
  return _normalize(probs)


def _normalize(weights: np.ndarray) -> np.ndarray:
  return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def along(tables: list[np.ndarray], paths: np.ndarray) -> np.ndarray:
  """The distributions met on `paths[N, W]`: float32 `[N, len(tables), V]`."""
  met = [tables[i][tuple(paths[:, :i].T)] for i in range(len(tables))]
  met = [np.broadcast_to(a, (len(paths), a.shape[-1])) for a in met]
  return np.stack(met, axis=1)


def path_probs(tables: list[np.ndarray], paths: np.ndarray) -> np.ndarray:
  """Probability of each token of `paths[N, W]` given those before: `[N, W]`."""
  met = along(tables[: paths.shape[1]], paths).astype(np.float64)
  return np.take_along_axis(met, paths[..., None], axis=-1)[..., 0]


def make_draft(tree: Tree, paths: np.ndarray, lengths: np.ndarray) -> Draft:
  """The draft that proposes `paths[N, G]`; what is beyond `lengths` is junk."""
  probs = along(tree.q, paths)
  is_drafted = np.arange(tree.gamma) < lengths[:, None]
  probs = np.where(is_drafted[..., None], probs, 1 / 7).astype(np.float32)
  return Draft(
    tokens=jnp.asarray(paths),
    probs=None if tree.is_one_hot else jnp.asarray(probs),
    lengths=jnp.asarray(lengths, jnp.int32),
  )


def integrate(decide, tree: Tree, *, length_fn=None) -> Integrated:
  """The distribution that `decide` gives to the next G+1 tokens.

  Args:
    decide: the rule.
    tree: the distributions of target and drafter.
    length_fn: paths `[N, G]` to how many of each are proposed `[N]`. It may
      look at a token only to stop after it. None proposes all.
  """
  gamma, vocab_size = tree.gamma, tree.vocab_size
  paths = goodness_of_fit.sequences(vocab_size, gamma)
  lengths = np.full(len(paths), gamma)
  if length_fn is not None:
    lengths = length_fn(paths)
  is_drafted = np.arange(gamma) < lengths[:, None]
  # Tokens beyond a draft's length are never drawn: they count as uniform junk.
  drawn = np.where(is_drafted, path_probs(tree.q, paths), 1 / vocab_size)
  weights = drawn.prod(1)
  decide = jax.jit(decide)

  every_pass = goodness_of_fit.sequences(2, gamma).astype(bool)
  passes = np.repeat(every_pass, len(paths), axis=0)
  paths, lengths, weights = (
    np.concatenate([a] * len(every_pass)) for a in (paths, lengths, weights)
  )
  draft = make_draft(tree, paths, lengths)
  p = jnp.asarray(along(tree.p, paths))
  halves = jnp.full(paths.shape, 0.5, jnp.float32)
  thresholds = np.asarray(decide(halves, draft, p).accept_probs, np.float64)
  weights = weights * np.where(passes, thresholds, 1 - thresholds).prod(1)
  draws = np.where(passes, thresholds / 2, (1 + thresholds) / 2)
  draws = np.minimum(draws, 1 - 1e-7).astype(np.float32)
  decision = decide(jnp.asarray(draws), draft, p)

  num_accepted = np.asarray(decision.num_accepted)
  emitted_probs = np.asarray(decision.next_probs, np.float64)
  joint = np.zeros((vocab_size,) * (gamma + 1))
  for n in range(gamma + 1):
    is_n = num_accepted == n
    prefixes = paths[is_n, :n] @ vocab_size ** np.arange(n)[::-1]
    emitted = np.zeros((vocab_size**n, vocab_size))
    np.add.at(emitted, prefixes, weights[is_n, None] * emitted_probs[is_n])
    joint += complete(emitted.reshape((vocab_size,) * (n + 1)), tree.p)
  return Integrated(joint, float(weights @ num_accepted))


def complete(emitted: np.ndarray, p: list[np.ndarray]) -> np.ndarray:
  """The distribution of G+1 tokens whose first ones follow `emitted`."""
  for table in p[emitted.ndim :]:
    emitted = emitted[..., None] * table.astype(np.float64)
  return emitted


def target_distribution(tree: Tree) -> np.ndarray:
  """The target's distribution of the next G+1 tokens, float64 `[V]*(G+1)`."""
  return complete(tree.p[0].astype(np.float64), tree.p)


def error(found: Integrated, tree: Tree) -> float:
  """Summed absolute difference from the target's distribution."""
  return float(np.abs(found.joint - target_distribution(tree)).sum())
