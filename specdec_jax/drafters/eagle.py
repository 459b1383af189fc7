"""EAGLE-3 (Li et al., arXiv 2503.01840): a drafter that reads features, hidden
states of the target."""

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

  Position t of its cache belongs to token t: it has read that token's features,
  the target's or its own guess of them, and token t + 1, and knows of t + 2.

  Attributes:
    init: `(params, batch_size, max_len) -> cache`, empty.
    join: `(params, features[B, T, F]) -> hidden[B, T, D]`.
    extend: `(params, tokens[B, T], hidden[B, T, D], cache, at=None,
      placement=None) -> (logits[B, T, V], hidden[B, T, D], cache)`: appends T
      positions; `tokens` are those after them, and the logits and the guesses
      of the next features are those of each, or `[B, 1, V]` and `[B, 1, D]`, of
      the one at `at[B]`. A `Placement` is as of a `LanguageModel`.
    rewind: `(cache, lengths[B]) -> cache`, as of a `LanguageModel`.
  """

  init: Callable[[Arrays, int, int], Arrays]
  join: Callable[[Arrays, Array], Array]
  extend: Callable[..., tuple[Array, Array, Arrays]]
  rewind: Callable[[Arrays, Array], Arrays]


def eagle(model: EagleModel) -> Chain:
  """A chain that reads features, for `autoregressive` and what is like it.

  https://arxiv.org/abs/2503.01840. What is left of a token is the guess `[B, T,
  D]` of the next one's features. A catch-up feeds all that the target's last
  call scored, or of a tree the path that was accepted, in one call over true
  features: keys and values that were made of guessed ones are overwritten. A
  row whose prompt is one token has none before the first call; its first draft
  is made of zeros.

  The model is one of `models.families`, whose target must be the loop's; its
  params are the drafter's.
  """

  def init(
    params: Arrays,
    prompt: base.Prompt,
    max_len: int,
    target_cache: FeatureCache,
  ) -> tuple[Arrays, FeatureCache]:
    batch_size, prompt_len = prompt.decoder_tokens.shape
    # Room for a catch-up, whose width is the target's affair.
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
    # Beyond the last token there is nothing to read, nor is it needed.
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
    placement: Placement | None = None,
  ) -> tuple[Array, Array, Arrays]:
    return model.extend(params, tokens, hidden, cache, placement=placement)

  return Chain(init, catch_up, extend, reads_target_cache=True, lag=1)
