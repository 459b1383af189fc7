"""Block drafters: a block in one pass over the target's features, and a cheap
chain through it (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context, Placement
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.drafters.features import FeatureCache


class Left(NamedTuple):
  """What the tokens after each of a call's T tokens need beside the cache.

  Attributes:
    slots: int32 `[B, T]`, the next slot of the block.
    state: float32 `[B, T, R]`, of the head that chains the slots; R is 0 if it
      has none.
    confidence: float32 `[B, T]`, the probability that the drafts of the slots
      so far are all accepted, as the confidence head says; 1 without it.
  """

  slots: Array
  state: Array
  confidence: Array


class BlockNetwork(NamedTuple):
  """A network that fills a block of masks, as pure functions.

  Entry t of its cache has read the target's features of token t.

  Attributes:
    init: `(params, batch_size, max_len) -> cache`, empty.
    read: `(params, features[B, T, F], cache) -> cache`: appends T entries.
    fill: `(params, anchors[B], cache, target_cache) -> cache`: keeps what slots
      0 .. k - 1 guess of the tokens after the anchor, the pending token, which
      stands at the cache's lengths.
    score: `(params, tokens[B, T], slots[B, T], state[B, T, R], cache) ->
      (logits[B, T, V], state)`: the logits of slots, each given the token
      before it.
    confidence: `(params, tokens[B, T], slots[B, T], cache) -> float32[B, T]`:
      how likely the drafts of slots are accepted once those before them are,
      each given the token before it; None without such a head.
    state_size: R, of the state that `score` carries along a block.
    rewind: `(cache, lengths[B]) -> cache`, as in `LanguageModel`.
  """

  init: Callable[[Arrays, int, int], Arrays]
  read: Callable[[Arrays, Array, Arrays], Arrays]
  fill: Callable[[Arrays, Array, Arrays, Arrays], Arrays]
  score: Callable[..., tuple[Array, Array]]
  confidence: Callable[[Arrays, Array, Array, Arrays], Array] | None
  state_size: int
  rewind: Callable[[Arrays, Array], Arrays]


def block(model: BlockNetwork) -> Chain:
  """Makes a chain of a block drafter, for any drafter that takes a chain.

  https://arxiv.org/abs/2602.06036. A catch-up reads the true features of what
  the target's last call scored, over what was rejected, and fills the block in
  one pass. Each further step of the chain scores one slot, given the token that
  was drafted before it; without a Markov head (arXiv 2607.05147) that token
  changes nothing. A chain's q is therefore exactly what its tokens are drawn
  from, and so is that of a tree, whose nodes of one depth share a slot.

  The model is from `models.families` and bound to the loop's target; its params
  are the drafter's.
  """

  def init(
    params: Arrays,
    prompt: base.Prompt,
    max_len: int,
    target_cache: FeatureCache,
  ) -> tuple[Arrays, FeatureCache]:
    batch_size, prompt_len = prompt.decoder_tokens.shape
    # Room for a catch-up, as wide as the features that the target keeps.
    capacity = max_len + target_cache.features.shape[1]
    cache = model.init(params, batch_size, capacity)
    if prompt_len > 1 and target_cache.prompt is not None:
      cache = model.read(params, target_cache.prompt, cache)
    return cache, dataclasses.replace(target_cache, prompt=None)

  def catch_up(
    params: Arrays, context: Context, cache: Arrays, target_cache: FeatureCache
  ) -> tuple[Array, Left, Arrays]:
    # The target has read all committed tokens but the last, the anchor. Before
    # the first token is read, features are zeros; what they write is rewound.
    starts, last = jnp.maximum(target_cache.starts, 0), context.lengths - 1
    cache = model.rewind(cache, starts)
    cache = model.read(params, target_cache.features, cache)
    cache = model.rewind(cache, last)
    anchors = arrays.read_block(context.tokens, last, 1)
    cache = model.fill(params, anchors[:, 0], cache, target_cache.target)
    left = Left(
      slots=jnp.zeros_like(anchors),
      state=jnp.zeros((*anchors.shape, model.state_size), jnp.float32),
      confidence=jnp.ones(anchors.shape, jnp.float32),
    )
    logits, left, cache = extend(params, anchors, left, cache, target_cache)
    return logits[:, 0], left, cache

  def extend(
    params: Arrays,
    tokens: Array,
    left: Left,
    cache: Arrays,
    target_cache: FeatureCache,
    placement: Placement | None = None,
  ) -> tuple[Array, Left, Arrays]:
    # Nothing is read or appended: a slot depends on the tokens before it
    # through the head alone.
    del target_cache, placement
    slots, confidence = left.slots, left.confidence
    logits, state = model.score(params, tokens, slots, left.state, cache)
    if model.confidence is not None:
      confidence *= model.confidence(params, tokens, slots, cache)
    return logits, Left(slots + 1, state, confidence), cache

  def confidence(left: Left) -> Array:
    return left.confidence

  return Chain(
    init,
    catch_up,
    extend,
    reads_target_cache=True,
    has_entries=False,
    confidence=confidence if model.confidence else None,
  )


def check_depth(depth: int, block_size: int) -> None:
  """Raises ValueError if more is drafted than a block has slots."""
  if depth > block_size:
    raise ValueError(
      f'the drafter fills blocks of {block_size} tokens, got {depth}: give a '
      f'gamma, or a tree of a depth, of at most {block_size}'
    )
