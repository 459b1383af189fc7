"""One cache row for all live sequences of a beam search, as a trie.

A row holds its prompt without the last token, then K entries per step: the last
tokens of the K sequences that were live at that step. The last tokens of the
current sequences are pending: the next call writes them behind these entries,
and the draft behind them, level by level. Sequences come and go, entries stay:
a mask says what a sequence sees, and an entry's index gives its position.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Placement
from specdec_jax.contrib.beams import beam_search
from specdec_jax.contrib.beams.beam_search import Search


@base.value
class Beams:
  """The live sequences of a search, and what they see of a cache of C entries.

  Attributes:
    search: the state of the search.
    num_prompt: int32 `[B]`, entries of the prompt: its tokens but the last.
    sees: bool `[B, K, C]`, the entries of each sequence, without its pending
      token.
  """

  search: Search
  num_prompt: Array
  sees: Array

  @property
  def num_entries(self) -> Array:
    """int32 `[B]`, a row's entries; pending tokens are written behind them."""
    # A prompt of 3 tokens has 2 entries; after 2 steps of 2 beams there are 6.
    num_steps = self.search.lengths - 1 - self.num_prompt
    return self.num_prompt + self.sees.shape[1] * num_steps

  @property
  def pending(self) -> Array:
    """int32 `[B, K]`, the sequences' last tokens."""
    return beam_search.last_tokens(self.search.live, self.search.lengths)


@base.value
class BeamDraft:
  """A trie below the live sequences, level by level.

  Attributes:
    tokens: int32 `[B, G, U]`.
    parents: int32 `[B, G, U]`: each node's parent, a node of the level above
      or, on the first level, a live sequence; -1 if the node does not exist.
  """

  tokens: Array
  parents: Array


class BeamDrafter(NamedTuple):
  """A source of tries, as three pure functions.

  Attributes:
    gamma: G, the levels of a draft.
    width: U, the nodes per level. With fewer than the K live sequences no level
      could be followed.
    init: `(params, prompt, capacity) -> state`; a cache in it has room for
      `capacity` entries, as the target's does.
    propose: `(params, beams, state) -> (BeamDraft, state)`.
    keep: `(state, starts[B], offsets[B, G * K], lengths[B]) -> state`: does in
      a draft model's cache, whose entries lie as the target's, what
      `LanguageModel.gather` and then `rewind` do in the target's. The default,
      for drafters without a cache, returns the state unchanged.
  """

  gamma: int
  width: int
  init: Callable[[Arrays, base.Prompt, int], Arrays]
  propose: Callable[[Arrays, Beams, Arrays], tuple[BeamDraft, Arrays]]
  keep: Callable[[Arrays, Array, Array, Array], Arrays] = (
    lambda state, starts, offsets, lengths: state
  )


def with_own(sees: Array, starts: Array) -> Array:
  """Adds their own entries, `starts[b] + m`, to what M tokens see."""
  entries = arrays.block_positions(starts, sees.shape[1])
  return sees | is_at(entries, sees.shape[2])


def is_at(entries: Array, capacity: int) -> Array:
  """Makes a bool `[B, M, C]` that is true at entries int32 `[B, M]` alone."""
  every = jnp.arange(capacity, dtype=entries.dtype)
  return entries[:, :, None] == every[None, None, :]


def below(sees: Array, parents: Array, starts: Array) -> Array:
  """Computes what the nodes of a level see, bool `[B, U, C]`: what their
  parents in the level above see, `sees` bool `[B, M, C]`, and themselves.

  The nodes are written from `starts[B]` on; `parents` are int32 `[B, U]`, -1
  for a node that does not exist.
  """
  # A node that does not exist sees what node 0 of the level above sees: with
  # nothing to see, its softmax would be over no entry.
  return with_own(arrays.take(sees, jnp.maximum(parents, 0)), starts)


def placement(
  beams: Beams, sees: Array, depths: Array | int, width: int
) -> Placement:
  """Places T tokens of a call that follow `beams`.

  Args:
    beams: the live sequences.
    sees: bool `[B, T, C]`, what the tokens see, their own entries included.
    depths: int32 `[1, T]`, or one number, levels below the pending tokens.
    width: nodes per level.
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
  """Lists the pending tokens and then the draft's, int32 `[B, K + G * U]`, with
  their placement."""
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
  """Computes C, the entries that a row needs: K per token after the prompt, and
  those of a draft. Without `max_new_tokens` a prompt may have one token and
  still fill `max_len`."""
  # The prompt has one entry per token, whatever K is; later tokens have K.
  entries = num_beams * max_len
  if max_new_tokens is not None:
    entries = min(entries, prompt_len + num_beams * (max_new_tokens + 1))
  return entries + drafter.gamma * drafter.width
