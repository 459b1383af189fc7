"""Masks of the tokens that rows' grammars allow, which the host makes.

Once an iteration, after the draft and before the target's call, the compiled
program calls `Grammar.read` for the masks of all positions of the draft. They
are applied to the target's logits; drafters know nothing of a grammar, and what
they draft against it has p = 0.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from specdec_jax import trees
from specdec_jax.base import Array, Context, Draft, Tree

# JAX copies larger arguments of a callback by a thread of the CPU, of which the
# program that waits for the callback may occupy all.
_MOST_BYTES = 2**15


def read(
  context: Context,
  draft: Draft,
  done: Array,
  *,
  tree: Tree | None,
  completes: bool,
  vocab_size: int,
) -> tuple[Draft, Array | None]:
  """Reads a draft by the rows' grammars.

  Where a grammar leaves a chain no choice, the draft has the grammar's tokens.
  Whether it has one at position i depends on what was drafted before, but never
  on token i if the draft has probabilities, as q would ignore that.

  Args:
    context: the committed text.
    draft: what follows it.
    done: bool `[B]`, rows whose masks do not matter.
    tree: the draft's shape, which is then left as it is; None for a chain.
    completes: whether the grammars' tokens are drafted.
    vocab_size: V.

  Returns:
    The draft, and masks for `masked`, int32 `[B, G + 1, W]`; None without a
    grammar.
  """
  grammar = context.grammar
  if grammar is None:
    return draft, None
  assert context.starts is not None
  gamma = draft.tokens.shape[1]
  # A chain is a tree of one path.
  shape = Tree(tuple(range(gamma))) if tree is None else tree
  completes = completes and tree is None
  host = functools.partial(
    grammar.read,
    paths=trees.leaf_paths(shape),
    completes=completes,
    is_certain=draft.probs is None,
  )
  numbers = jnp.where(done, 0, grammar.numbers)
  masks, tokens, lengths, is_forced = _on_hosts(
    functools.partial(_callback, host, -(-vocab_size // 32)),
    dataclasses.replace(
      context,
      sampling=None,
      processors=None,
      grammar=dataclasses.replace(grammar, numbers=numbers),
    ),
    dataclasses.replace(draft, probs=None),
  )
  probs = draft.probs
  if probs is not None and completes:
    one_hot = jax.nn.one_hot(tokens, vocab_size, dtype=probs.dtype)
    probs = jnp.where(is_forced[..., None], one_hot, probs)
  return Draft(tokens=tokens, probs=probs, lengths=lengths), masks


def after_text(
  context: Context, done: Array, *, vocab_size: int
) -> Array | None:
  """Masks of what follows a text, int32 `[B, 1, W]`; see `read`."""
  nothing = jnp.zeros_like(context.lengths)
  empty = Draft(tokens=nothing[:, None][:, :0], probs=None, lengths=nothing)
  return read(
    context, empty, done, tree=None, completes=False, vocab_size=vocab_size
  )[1]


def masked(logits: Array, masks: Array | None) -> Array:
  """Logits `[B, T, V]`, -inf where the bit of a token in `masks[B, T, W]`, 32
  tokens a word and the first lowest, is 0."""
  if masks is None:
    return logits
  bits = jnp.arange(32, dtype=masks.dtype).reshape(1, 1, 1, 32)
  may_come = (masks[..., None] >> bits) & 1
  may_come = may_come.reshape(*masks.shape[:2], -1)[..., : logits.shape[2]]
  return jnp.where(may_come == 1, logits, -jnp.inf)


def _on_hosts(
  call: Callable[..., tuple[Array, ...]], context: Context, draft: Draft
) -> tuple[Array, ...]:
  """Calls a function of names of rows, their context and their draft; on a mesh
  each process calls it with the rows of its own devices. No two devices have
  the same names."""
  num_rows = context.lengths.size
  mesh = jax.typeof(context.lengths).sharding.mesh
  if mesh.empty:
    mesh = jax.sharding.get_abstract_mesh()
  rows = mesh.axis_names[0] if mesh.axis_names else ''
  num_parts = dict(mesh.shape).get(rows, 1)
  if num_parts == 1 or num_rows % num_parts:
    return call(jnp.arange(num_rows), context, draft)
  size = num_rows // num_parts

  def of_device(context: Context, draft: Draft) -> tuple[Array, ...]:
    first = jax.lax.axis_index(mesh.axis_names) * size
    return call(first + jnp.arange(size), context, draft)

  spec = PartitionSpec(rows)
  return jax.shard_map(
    of_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )(context, draft)


def _callback(
  host: Callable[..., Any],
  num_words: int,
  names: Array,
  context: Context,
  draft: Draft,
) -> tuple[Array, ...]:
  """Calls a `text.grammars.Reader` with numpy arrays."""
  num_rows, gamma = draft.tokens.shape
  outputs = (
    jax.ShapeDtypeStruct((num_rows, gamma + 1, num_words), jnp.int32),
    *(draft.tokens, draft.lengths),
    jax.ShapeDtypeStruct((num_rows, gamma), jnp.bool_),
  )
  leaves, structure = jax.tree.flatten((names, context, draft))

  def call(pieces_of_leaves: list[list[Any]]) -> Any:
    leaves = [
      np.concatenate([*map(np.asarray, pieces)], axis=-1)
      for pieces in pieces_of_leaves
    ]
    return host(*jax.tree.unflatten(structure, leaves))

  return jax.pure_callback(call, outputs, [*map(_pieces, leaves)])


def _pieces(array: Array) -> list[Array]:
  """Splits an array by its last axis into pieces of `_MOST_BYTES`."""
  size = array.shape[-1]
  row_bytes = max(array.nbytes // max(size, 1), 1)
  width = max(_MOST_BYTES // row_bytes, 1)
  starts = range(0, max(size, 1), width)
  return [array[..., start : start + width] for start in starts]
