"""The distribution that a rule for trees gives to the next tokens, integrated
exactly over all that can be drafted and all draws, as `integrate` does it for
chains; and the two rules for sampled trees in numpy, step by step."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from specdec_jax import base, trees
from specdec_jax.base import Draft
from tests import goodness_of_fit, integrate


@dataclasses.dataclass(frozen=True)
class Drafts:
  """Everything that a drafter can propose, one row each.

  Attributes:
    tokens: int32 `[A, N]`.
    p: `[A, N+1, V]`, the target's after each node, in the dtype of its tables.
    q: `[A, N, V]`, what each token was drawn from.
    weights: float64 `[A]`, how often each is drafted.
  """

  tokens: np.ndarray
  p: np.ndarray
  q: np.ndarray
  weights: np.ndarray


def drafts(
  shape: base.Tree, tables: integrate.Tree, *, is_sampled: bool = True
) -> Drafts:
  """Siblings are drawn without replacement, or else are the likeliest."""
  vocab_size, parents = tables.vocab_size, (-1, *shape.parents)
  tokens = goodness_of_fit.sequences(vocab_size, len(shape.parents))
  rows = np.arange(len(tokens))
  prefixes: dict[int, tuple] = {0: ()}
  left: dict[int, np.ndarray] = {}
  p, q, weights = [], [], np.ones(len(tokens))
  at = lambda table, prefix: np.broadcast_to(
    table[prefix], (len(tokens), vocab_size)
  )
  for node, parent in enumerate(parents):
    if node:
      drawn = tokens[:, node - 1]
      prefix = prefixes[parent]
      probs = left.get(parent)
      if probs is None:
        probs = at(tables.q[len(prefix)], prefix)
      chances = probs[rows, drawn].astype(np.float64)
      if not is_sampled:
        chances = (probs.argmax(-1) == drawn).astype(np.float64)
      # Where nothing is left the token is 0, and its node is none.
      weights = weights * np.where(probs.any(-1), chances, drawn == 0)
      q.append(probs)
      rest = probs.copy()
      rest[rows, drawn] = 0
      mass = rest.sum(-1, keepdims=True)
      left[parent] = (rest / np.where(mass == 0, 1, mass)).astype(probs.dtype)
      prefixes[node] = (*prefix, drawn)
    p.append(at(tables.p[len(prefixes[node])], prefixes[node]))
  kept = weights > 0
  stack = lambda arrays: np.stack(arrays, axis=1)[kept]
  return Drafts(tokens[kept], stack(p), stack(q), weights[kept])


def integrate_rule(
  decide, shape: base.Tree, tables: integrate.Tree, *, is_sampled: bool = True
) -> integrate.Integrated:
  """What `decide(uniforms, draft, target_probs)` makes of the next D+1 tokens.

  Each node's test passes or fails; every combination is fed to the rule, and
  weighted by its probability.
  """
  made = drafts(shape, tables, is_sampled=is_sampled)
  num_nodes = len(shape.parents)
  every_pass = goodness_of_fit.sequences(2, num_nodes).astype(bool)
  passes = np.repeat(every_pass, len(made.tokens), axis=0)
  copies = lambda array: np.concatenate([array] * len(every_pass))
  tokens, weights = copies(made.tokens), copies(made.weights)
  draft = Draft(
    tokens=jnp.asarray(tokens),
    probs=jnp.asarray(copies(made.q)) if is_sampled else None,
    lengths=jnp.full(len(tokens), num_nodes, jnp.int32),
  )
  p = jnp.asarray(copies(made.p))
  halves = jnp.full(tokens.shape, 0.5, jnp.float32)
  thresholds = np.asarray(decide(halves, draft, p).accept_probs, np.float64)
  weights = weights * np.where(passes, thresholds, 1 - thresholds).prod(1)
  draws = np.where(passes, thresholds / 2, (1 + thresholds) / 2)
  draws = np.minimum(draws, 1 - 1e-7).astype(np.float32)
  decision = decide(jnp.asarray(draws), draft, p)
  paths = np.asarray(decision.path)
  return _integrated(
    tables,
    np.take_along_axis(tokens, np.maximum(paths - 1, 0), axis=1),
    np.asarray(decision.num_accepted),
    np.asarray(decision.next_probs, np.float64),
    weights,
  )


def _integrated(
  tables, along, num_accepted, next_probs, weights
) -> integrate.Integrated:
  """Of rows that accept so many of the tokens `along[A, D]`."""
  vocab_size, depth = tables.vocab_size, tables.gamma
  joint = np.zeros((vocab_size,) * (depth + 1))
  for n in range(depth + 1):
    is_n = num_accepted == n
    emitted = np.zeros((vocab_size**n, vocab_size))
    prefixes = along[is_n, :n] @ vocab_size ** np.arange(n)[::-1]
    np.add.at(emitted, prefixes, weights[is_n, None] * next_probs[is_n])
    joint += integrate.complete(
      emitted.reshape((vocab_size,) * (n + 1)), tables.p
    )
  return integrate.Integrated(joint, float(weights @ num_accepted))


Outcome = tuple[int, float, np.ndarray]


def traversal(parents, tokens, p, q) -> Iterator[Outcome]:
  """Traversal verification of one draft: each node at which it can end, with
  the chance of that and the distribution of the next token, in float64.

  Leaves are accepted or deleted, the leftmost first, until one is accepted.
  """
  p = np.array(p, np.float64)
  children = {node: [] for node in range(len(parents) + 1)}
  for node, parent in enumerate(parents, start=1):
    children[parent].append(node)
  changed: dict[int, float] = {}
  rest = 1.0
  while True:
    path, weight = [0], [changed.get(0, 1.0)]
    while children[path[-1]]:
      child = children[path[-1]][0]
      token = tokens[child - 1]
      ratio = p[path[-1]][token] / q[child - 1][token]
      weight.append(changed.get(child, min(1.0, weight[-1] * ratio)))
      path.append(child)
    yield path[-1], rest * weight[-1], p[path[-1]]
    rest *= 1 - weight[-1]
    if len(path) == 1:
      return
    parent = path[-2]
    residual = np.maximum(weight[-2] * p[parent] - q[path[-1] - 1], 0)
    mass = residual.sum()
    if mass + 1 - weight[-2] > 0:
      changed[parent] = mass / (mass + 1 - weight[-2])
    if mass > 0:
      p[parent] = residual / mass
    children[parent].pop(0)


def recursive_rejection(parents, tokens, p, q) -> Iterator[Outcome]:
  """The rule that goes down from the root, one sibling after the other, and
  stops where all are rejected."""

  def visit(node: int, chance: float) -> Iterator[Outcome]:
    probs = np.array(p[node], np.float64)
    for child, parent in enumerate(parents, start=1):
      if parent != node:
        continue
      token, drawn_from = tokens[child - 1], q[child - 1]
      passes = min(1.0, probs[token] / drawn_from[token])
      yield from visit(child, chance * passes)
      chance *= 1 - passes
      residual = np.maximum(probs - drawn_from, 0)
      if residual.sum() > 0:
        probs = residual / residual.sum()
    yield node, chance, probs

  return visit(0, 1.0)


def integrate_reference(
  rule, shape: base.Tree, tables: integrate.Tree
) -> integrate.Integrated:
  """The same for one of the two rules above."""
  made = drafts(shape, tables)
  depths = trees.depths(shape)
  ends, chances, next_probs, rows = [], [], [], []
  for row in range(len(made.tokens)):
    outcomes = rule(shape.parents, made.tokens[row], made.p[row], made.q[row])
    for node, chance, probs in outcomes:
      ends.append(node)
      chances.append(made.weights[row] * chance)
      next_probs.append(probs)
      rows.append(row)
  paths = np.asarray(trees.path_of(shape, jnp.asarray(ends, jnp.int32)))
  return _integrated(
    tables,
    np.take_along_axis(made.tokens[rows], np.maximum(paths - 1, 0), axis=1),
    depths[ends],
    np.stack(next_probs),
    np.array(chances),
  )
