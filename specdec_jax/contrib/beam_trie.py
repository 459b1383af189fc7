"""One cache row for all live sequences of a beam search, as a trie.

A row holds its prompt but the last token, and then K entries for each step: the
tokens that the K sequences ended with which were live. The last tokens of the K
sequences of now are pending: the next call writes them behind these, and what
was drafted behind them, level by level. Sequences come and go and entries stay:
what a sequence sees is a mask, and a position follows from the entry.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Placement
from specdec_jax.decoding import beam_search
from specdec_jax.decoding.beam_search import Search


@base.value
class Beams:
  """The live sequences of a search, and what they see of a cache of C entries.

  Attributes:
    search: where it stands.
    num_prompt: int32 `[B]`, entries of the prompt, which are its tokens but the
      last.
    sees: bool `[B, K, C]`, the entries of a sequence, the pending one excepted.
  """

  search: Search
  num_prompt: Array
  sees: Array

  @property
  def num_entries(self) -> Array:
    """int32 `[B]`, all that a row has: pending tokens are written behind."""
    num_steps = self.search.lengths - 1 - self.num_prompt
    return self.num_prompt + self.sees.shape[1] * num_steps

  @property
  def pending(self) -> Array:
    """int32 `[B, K]`, the last tokens."""
    return beam_search.last_tokens(self.search.live, self.search.lengths)


@base.value
class BeamDraft:
  """A trie below the live sequences, level by level.

  Attributes:
    tokens: int32 `[B, G, U]`.
    parents: int32 `[B, G, U]`: the node of the level above that a node follows,
      and on the first level the live sequence; -1: there is no such node.
  """

  tokens: Array
  parents: Array


class BeamDrafter(NamedTuple):
  """A source of tries, as three pure functions.

  Attributes:
    gamma: G, the levels of a draft.
    width: U, the nodes of a level. With less than the K live sequences no level
      could be followed.
    init: `(params, prompt, capacity) -> state`; a cache of its own has room for
      `capacity` entries, as the target's.
    propose: `(params, beams, state) -> (BeamDraft, state)`.
    keep: `(state, starts[B], offsets[B, G * K], lengths[B]) -> state`: of the
      last draft's entries, in a cache that has them where the target's has,
      those at `starts + offsets[:, i]` move to `starts + i`, and `lengths` then
      count: `LanguageModel.gather` and `rewind`. By default the state stays, as
      that of a drafter without a cache does.
    may_abstain: whether a draft can have no node at all; the loop then has a
      narrow target call as well.
  """

  gamma: int
  width: int
  init: Callable[[Arrays, base.Prompt, int], Arrays]
  propose: Callable[[Arrays, Beams, Arrays], tuple[BeamDraft, Arrays]]
  keep: Callable[[Arrays, Array, Array, Array], Arrays] = (
    lambda state, starts, offsets, lengths: state
  )
  may_abstain: bool = False


def with_own(sees: Array, starts: Array) -> Array:
  """What M tokens see, `[B, M, C]`, and their own entries `starts[b] + m`."""
  entries = arrays.block_positions(starts, sees.shape[1])
  return sees | is_at(entries, sees.shape[2])


def is_at(entries: Array, capacity: int) -> Array:
  """bool `[B, M, C]`, true at int32 `[B, M]` alone."""
  every = jnp.arange(capacity, dtype=entries.dtype)
  return entries[:, :, None] == every[None, None, :]


def below(sees: Array, parents: Array, starts: Array) -> Array:
  """What the nodes of a level see, written from `starts[B]` on: what `sees`,
  bool `[B, M, C]`, the level above, and themselves. Of `parents[B, U]`, -1 is
  that of a node that does not exist, and sees something.
  """
  # A node that does not exist sees what node 0 of the level above does: with
  # nothing to see, its softmax would be over no entry.
  return with_own(arrays.take(sees, jnp.maximum(parents, 0)), starts)


def placement(
  beams: Beams, sees: Array, depths: Array | int, width: int
) -> Placement:
  """Where tokens of a call stand that follow `beams` and see `sees[B, T, C]`,
  their own entries included; `depths`, int32 `[1, T]` or one of all, say how
  far they are below a pending token, in levels of `width` nodes.
  """
  # Of a prompt of 3 tokens and 2 beams, entries 0 and 1 are the prompt's, 2 and
  # 3 have position 2, and 4 and 5, the next step of both, position 3.
  num_beams, capacity = beams.sees.shape[1:]
  start, lengths = beams.num_prompt[:, None], beams.search.lengths[:, None]
  entries = jnp.arange(capacity, dtype=jnp.int32)[None, :]
  committed = start + (entries - start) // num_beams
  drafted = entries - beams.num_entries[:, None] - num_beams
  key_positions = jnp.where(entries < start, entries, committed)
  return Placement(
    positions=jnp.broadcast_to(lengths - 1 + depths, sees.shape[:2]),
    key_positions=jnp.where(
      drafted < 0, key_positions, lengths + drafted // width
    ),
    mask=sees,
  )


def laid_out(beams: Beams, draft: BeamDraft) -> tuple[Array, Placement]:
  """Pending tokens and then the draft's, int32 `[B, K + G * U]`, and where they
  stand."""
  num_beams = beams.sees.shape[1]
  batch_size, gamma, width = draft.tokens.shape
  starts = beams.num_entries
  levels = [with_own(beams.sees, starts)]
  for i in range(gamma):
    first = starts + num_beams + i * width
    levels.append(below(levels[-1], draft.parents[:, i], first))
  drafted = draft.tokens.reshape(batch_size, gamma * width)
  # Of 2 beams and 2 levels of 3 nodes: [0, 0, 1, 1, 1, 2, 2, 2].
  sizes = [num_beams] + [width] * gamma
  depths = jnp.asarray(np.repeat(np.arange(gamma + 1, dtype=np.int32), sizes))
  tokens = jnp.concatenate([beams.pending, drafted], axis=1)
  sees = jnp.concatenate(levels, axis=1)
  return tokens, placement(beams, sees, depths[None, :], width)


def capacity(
  num_beams: int,
  drafter: BeamDrafter,
  *,
  max_len: int,
  prompt_len: int,
  max_new_tokens: int | None,
) -> int:
  """C, entries that a row needs: K for every token but the prompt's, and what a
  call writes. Without `max_new_tokens` a prompt may have one token and fill
  `max_len` all the same."""
  # The prompt has one entry a token, whatever K is; all after it has K.
  entries = num_beams * max_len
  if max_new_tokens is not None:
    entries = min(entries, prompt_len + num_beams * (max_new_tokens + 1))
  return entries + drafter.gamma * drafter.width
