"""Draft models that stop early: gamma varies by row and by iteration."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base, distributions, keys
from specdec_jax.base import Array, Context, Draft, Drafter
from specdec_jax.drafters import schedules
from specdec_jax.drafters.autoregressive import catch_up
from specdec_jax.drafters.stateless import check_gamma


@base.value
class AdaptiveState:
  """The draft model's cache, the schedule's memory and the last draft.

  `lengths` int32 `[B]` is what was committed before it, 0 if there was none,
  and `num_drafted` int32 `[B]` what it proposed.
  """

  cache: Any
  memory: Any
  lengths: Array
  num_drafted: Array


def adaptive(
  model: base.LanguageModel,
  *,
  gamma: int,
  logits_to_probs: base.LogitsToProbsFn,
  schedule: schedules.Schedule | None = None,
  min_prob: float = 0.0,
) -> Drafter:
  """Drafts from `model` up to a limit that changes, one per row.

  Drafting ends when no row of the batch wants another token. What was accepted
  is inferred from how far a row has come (invariant 4); a row that has not
  moved is finished. It stays lossless because what decides on drafting a token
  is known before the token: a doubtful one is the last of its draft, and is
  proposed. Leaving it out would favour the tokens that the drafter likes.

  Args:
    model: as for `autoregressive`.
    gamma: tokens per iteration, at most.
    logits_to_probs: as for `autoregressive`.
    schedule: sets a row's limit before it drafts; None means gamma.
    min_prob: a token to which the model itself, at temperature 1, gives less
      is the last one of its draft.

  Raises:
    ValueError: if `gamma` is less than 1 or `min_prob` outside [0, 1].
  """
  check_gamma(gamma)
  if not 0 <= min_prob <= 1:
    raise ValueError(f'min_prob must lie in [0, 1], got {min_prob}')
  schedule = schedule or schedules.fixed()

  def init(params: Any, prompt: base.Prompt, max_len: int) -> AdaptiveState:
    batch_size = prompt.decoder_lengths.shape[0]
    return AdaptiveState(
      cache=model.init(params, prompt, max_len),
      memory=schedule.init(batch_size),
      lengths=jnp.zeros(batch_size, jnp.int32),
      num_drafted=jnp.zeros(batch_size, jnp.int32),
    )

  def propose(
    params: Any, row_keys: Array, context: Context, state: AdaptiveState
  ) -> tuple[Draft, AdaptiveState]:
    num_accepted = context.lengths - state.lengths - 1
    num_accepted = jnp.clip(num_accepted, 0, state.num_drafted)
    memory, limits = schedule.update(
      state.memory, state.num_drafted, num_accepted, gamma
    )
    is_finished = context.lengths == state.lengths
    limits = jnp.where(is_finished, 0, jnp.clip(limits, 1, gamma))
    logits, cache = catch_up(model, params, context, state.cache)
    draw_fn = functools.partial(
      _draw, logits_to_probs, min_prob, keys.split(row_keys, gamma)
    )
    extend_fn = functools.partial(model.extend, params)
    draft, cache = _draft(draw_fn, extend_fn, logits, cache, limits, gamma)
    return draft, AdaptiveState(
      cache=cache,
      memory=memory,
      lengths=context.lengths,
      num_drafted=draft.lengths,
    )

  return Drafter(gamma, init, propose)


def _draw(logits_to_probs, min_prob, step_keys, i, logits, draft: Draft):
  """The draft with its token i, drawn from `logits[B, V]`."""
  probs = logits_to_probs(logits)
  tokens = distributions.sample(step_keys[i], probs)
  confidence = arrays.pick(jax.nn.softmax(logits), tokens)
  put = jax.lax.dynamic_update_index_in_dim
  return Draft(
    tokens=put(draft.tokens, tokens, i, axis=1),
    probs=put(draft.probs, probs, i, axis=1),
    lengths=jnp.where(
      confidence < min_prob, jnp.minimum(draft.lengths, i + 1), draft.lengths
    ),
  )


def _draft(draw_fn, extend_fn, logits, cache, limits, gamma: int):
  """Draws a token a row, and more while some row is below its limit."""

  def is_due(carry):
    i, draft, _ = carry
    return jnp.any(i < draft.lengths)

  def extend_and_draw(carry):
    i, draft, cache = carry
    last = jax.lax.dynamic_slice_in_dim(draft.tokens, i - 1, 1, axis=1)
    logits, cache = extend_fn(last, cache)
    return i + 1, draw_fn(i, logits[:, 0], draft), cache

  batch_size, vocab_size = logits.shape
  empty = Draft(
    tokens=jnp.zeros((batch_size, gamma), jnp.int32),
    probs=jnp.zeros((batch_size, gamma, vocab_size), jnp.float32),
    lengths=limits,
  )
  first = jnp.zeros((), jnp.int32)
  carry = (first + 1, draw_fn(first, logits, empty), cache)
  _, draft, cache = jax.lax.while_loop(is_due, extend_and_draw, carry)
  return draft, cache
