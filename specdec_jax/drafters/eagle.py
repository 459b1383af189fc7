"""EAGLE-3 (Li et al., arXiv 2503.01840): drafting from the target's hidden
states, its features."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context, Placement
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.drafters.features import FeatureCache


class EagleModel(NamedTuple):
  """A network that drafts from features, as pure functions.

  Entry t of its cache has read the features of token t, the target's or its own
  guess of them, and token t + 1; its logits predict token t + 2.

  Attributes:
    init: `(params, batch_size, max_len) -> cache`, empty.
    join: `(params, features[B, T, F]) -> hidden[B, T, D]`.
    extend: `(params, tokens[B, T], hidden[B, T, D], cache, at=None,
      placement=None) -> (logits[B, T, V], hidden[B, T, D], cache)`: appends T
      entries; `tokens` are those after them. Returns each entry's logits and
      guess of the next features, or only those of entry `at[B]`, `[B, 1, V]`
      and `[B, 1, D]`. `placement` is as in `LanguageModel`.
    rewind: `(cache, lengths[B]) -> cache`, as in `LanguageModel`.
  """

  init: Callable[[Arrays, int, int], Arrays]
  join: Callable[[Arrays, Array], Array]
  extend: Callable[..., tuple[Array, Array, Arrays]]
  rewind: Callable[[Arrays, Array], Arrays]


def eagle(model: EagleModel) -> Chain:
  """Makes a chain that reads features, for any drafter that takes a chain.

  https://arxiv.org/abs/2503.01840. A token's `left` is the guess `[B, T, D]` of
  the next features. A catch-up feeds everything the target's last call scored,
  or the accepted path of a tree, in one call with true features, and so
  overwrites keys and values of guessed ones. If a row's prompt is one token,
  there are no features yet, and its first draft is made from zeros.

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
      tokens = prompt.decoder_tokens[:, 1:]
      hidden = model.join(params, target_cache.prompt)
      first = jnp.zeros(batch_size, jnp.int32)
      _, _, cache = model.extend(params, tokens, hidden, cache, first)
    return cache, dataclasses.replace(target_cache, prompt=None)

  def catch_up(
    params: Arrays, context: Context, cache: Arrays, target_cache: FeatureCache
  ) -> tuple[Array, Array, Arrays]:
    starts = jnp.maximum(target_cache.starts, 0)
    last, width = context.lengths - 1, target_cache.features.shape[1]
    # starts 5, width 4, last 7: tokens 6, 7, 7, 7. The logits are of entry 1,
    # which has read token 7; what lies beyond is rewound.
    after = jnp.minimum(
      arrays.block_positions(starts + 1, width), last[:, None]
    )
    tokens = jnp.take_along_axis(context.tokens, after, axis=1)
    logits, hidden, cache = model.extend(
      params,
      tokens,
      model.join(params, target_cache.features),
      model.rewind(cache, starts),
      jnp.clip(last - 1 - starts, 0, width - 1),
    )
    return logits[:, 0], hidden, model.rewind(cache, last)

  def extend(
    params: Arrays,
    tokens: Array,
    hidden: Array,
    cache: Arrays,
    target_cache: FeatureCache,
    placement: Placement | None = None,
  ) -> tuple[Array, Array, Arrays]:
    # The target has not read drafted tokens yet.
    del target_cache
    return model.extend(params, tokens, hidden, cache, placement=placement)

  return Chain(init, catch_up, extend, reads_target_cache=True, lag=1)
