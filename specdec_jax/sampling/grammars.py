"""Masks of the tokens that rows' grammars allow, which the host makes.

Once an iteration, after the draft and before the target's call, the compiled
program calls `Grammar.read` for the masks of all positions of the draft. They
are applied to the target's logits; drafters know nothing of a grammar, and what
they draft against it has p = 0.
"""

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
  num_rows, gamma = draft.tokens.shape
  shape_of = jax.ShapeDtypeStruct
  shapes = (
    shape_of((num_rows, gamma + 1, -(-vocab_size // 32)), jnp.int32),
    shape_of((num_rows, gamma), jnp.int32),
    shape_of((num_rows,), jnp.int32),
    shape_of((num_rows, gamma), jnp.bool_),
  )
  host = functools.partial(
    grammar.read,
    paths=None if tree is None else trees.leaf_paths(tree),
    completes=completes,
    is_certain=draft.probs is None,
  )
  masks, tokens, lengths, is_forced = _on_hosts(
    host,
    shapes,
    jnp.where(done, 0, grammar.numbers),
    context.starts,
    context.lengths,
    context.tokens,
    draft.tokens,
    draft.lengths,
  )
  probs = draft.probs
  if probs is not None and completes and tree is None:
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
  host: Callable[..., Any], shapes: Any, *arrays: Array
) -> tuple[Array, ...]:
  """Calls a function of arrays with rows first; on a mesh each process calls it
  with the rows of its own devices."""
  mesh = jax.typeof(arrays[0]).sharding.mesh
  if mesh.empty:
    mesh = jax.sharding.get_abstract_mesh()
  rows = mesh.axis_names[0] if mesh.axis_names else ''
  num_parts = dict(mesh.shape).get(rows, 1)
  if num_parts == 1 or arrays[0].shape[0] % num_parts:
    return _callback(host, shapes, *arrays)

  def of_part(shape: Any) -> Any:
    num_rows, *row_shape = shape.shape
    return jax.ShapeDtypeStruct(
      (num_rows // num_parts, *row_shape), shape.dtype
    )

  of_parts = functools.partial(_callback, host, jax.tree.map(of_part, shapes))
  spec = PartitionSpec(rows)
  return jax.shard_map(
    of_parts, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )(*arrays)


def _callback(
  host: Callable[..., Any], shapes: Any, *arrays: Array
) -> tuple[Array, ...]:
  """Calls a function with numpy arrays, in pieces of `_MOST_BYTES`."""
  pieces = [_pieces(array) for array in arrays]

  def call(pieces: list[list[Any]]) -> Any:
    arrays = []
    for array_pieces in pieces:
      parts = [np.asarray(piece) for piece in array_pieces]
      arrays.append(np.concatenate(parts, axis=-1))
    return host(*arrays)

  return jax.pure_callback(call, shapes, pieces)


def _pieces(array: Array) -> list[Array]:
  """Splits an array by its last axis."""
  size = array.shape[-1]
  row_bytes = max(array.nbytes // max(size, 1), 1)
  width = max(_MOST_BYTES // row_bytes, 1)
  starts = range(0, max(size, 1), width)
  return [array[..., start : start + width] for start in starts]
