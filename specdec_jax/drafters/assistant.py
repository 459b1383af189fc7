"""Assistants, as those of Gemma 4: drafting from the target's own cache."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context, Placement
from specdec_jax.drafters import features
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.drafters.features import FeatureCache


class AssistantModel(NamedTuple):
  """A network that attends to its target's keys and values, as a pure function.

  Attributes:
    step: `(params, tokens[B, T], hidden[B, T, F], target_cache, lengths[B]) ->
      (logits[B, T, V], hidden[B, T, F])`: what follows each token, given the
      hidden state that predicted it, and the hidden state that predicts what
      follows. All T tokens are at position `lengths - 1` and see the entries of
      the target's cache before it.
  """

  step: Callable[..., tuple[Array, Array]]


@base.value
class AssistantState:
  """Committed lengths, int32 `[B]`, when the drafts of an iteration began."""

  lengths: Array


def assistant(model: AssistantModel) -> Chain:
  """Makes a chain that reads the target's cache and has none of its own, for
  any drafter that takes a chain.

  As transformers' `SinglePositionMultiTokenCandidateGenerator`: the first draft
  follows the pending token and the target's last hidden state before it; later
  ones follow the draft and the network's own hidden state; all have the
  pending token's position. transformers also shows the network the entry that a
  rejected draft left at that position; here it sees committed tokens alone. If
  a row's prompt is one token, its first hidden state is zeros.

  The model is from `models.families` and bound to the loop's target; its params
  are the drafter's.
  """

  def init(
    params: Arrays,
    prompt: base.Prompt,
    max_len: int,
    target_cache: FeatureCache,
  ) -> tuple[AssistantState, FeatureCache]:
    del params, max_len
    state = AssistantState(lengths=prompt.decoder_lengths)
    # The last hidden state is among the features; those before it are not read.
    return state, dataclasses.replace(target_cache, prompt=None)

  def catch_up(
    params: Arrays,
    context: Context,
    state: AssistantState,
    target_cache: FeatureCache,
  ) -> tuple[Array, Array, AssistantState]:
    del state
    lengths = context.lengths
    hidden, is_known = features.of_last_read(target_cache, lengths)
    hidden = jnp.where(is_known[:, None], hidden, jnp.zeros_like(hidden))
    pending = arrays.read_block(context.tokens, lengths - 1, 1)
    logits, hidden = model.step(
      params, pending, hidden[:, None], target_cache.target, lengths
    )
    return logits[:, 0], hidden, AssistantState(lengths=lengths)

  def extend(
    params: Arrays,
    tokens: Array,
    hidden: Array,
    state: AssistantState,
    target_cache: FeatureCache,
    placement: Placement | None = None,
  ) -> tuple[Array, Array, AssistantState]:
    # A node of a tree needs its parent's hidden state, and no place.
    del placement
    logits, hidden = model.step(
      params, tokens, hidden, target_cache.target, state.lengths
    )
    return logits, hidden, state

  return Chain(
    init, catch_up, extend, reads_target_cache=True, has_entries=False
  )
