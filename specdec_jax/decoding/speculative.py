"""Draft, verify, commit: the speculative decoding loop.

Leviathan et al., Algorithm 1 (https://arxiv.org/abs/2211.17192), batched: rows
advance each at their own pace inside one `lax.while_loop`, and the target
scores all gamma + 1 positions of all rows in one call. `generate` is the whole
program; `init`, `step` and `run` are its pieces, for streaming, traces and
benchmarks.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import (
  Array,
  Draft,
  Drafter,
  LanguageModel,
  LogitsToProbsFn,
  Params,
  Prompt,
  Verification,
  VerifyFn,
)
from specdec_jax.decoding import commit, keys, statistics
from specdec_jax.decoding.commit import EosId, Rows
from specdec_jax.decoding.statistics import Statistics


@flax.struct.dataclass(kw_only=True)
class DecodeState:
  """All that the next iteration needs.

  Invariant: the target's cache holds all of the context but its last token,
  which the next iteration feeds in front of the draft.

  Attributes:
    rows: context, log-probabilities, done flags and keys of each row.
    target_cache: the target's cache.
    drafter_state: the drafter's own.
    statistics: counters so far.
  """

  rows: Rows
  target_cache: Any
  drafter_state: Any
  statistics: Statistics

  @property
  def context(self):
    return self.rows.context

  @property
  def done(self) -> Array:
    return self.rows.done


@flax.struct.dataclass(kw_only=True)
class StepInfo:
  """What a researcher wants to see of one iteration.

  Attributes:
    draft: what was proposed.
    verification: what became of it.
    target_probs: float32 `[B, G+1, V]`, p at each position. Zero beyond the
      first in an iteration in which no row drafted.
    starts: int32 `[B]`, committed lengths before the iteration.
    counts: int32 `[B]`, how many tokens each row committed.
  """

  draft: Draft
  verification: Verification
  target_probs: Array
  starts: Array
  counts: Array


@flax.struct.dataclass(kw_only=True)
class DecodeOutput:
  """The decoded rows.

  Attributes:
    tokens: int32 `[B, S]`, prompt included, 0 beyond `lengths`.
    lengths: int32 `[B]`.
    log_probs: float32 `[B, S]`, see `Rows`.
    done: bool `[B]`.
    has_nan: bool `[B]`, rows that a NaN stopped.
    statistics: the counters.
  """

  tokens: Array
  lengths: Array
  log_probs: Array
  done: Array
  has_nan: Array
  statistics: Statistics


def generate(
  params: Params,
  rng_key: Array,
  prompt: Prompt,
  *,
  target: LanguageModel,
  drafter: Drafter,
  verify_fn: VerifyFn,
  logits_to_probs: LogitsToProbsFn,
  max_len: int,
  eos_id: EosId,
) -> DecodeOutput:
  """Decodes every row of `prompt` until EOS or its limit; jit it whole.

  Args:
    params: weights of target and drafter.
    rng_key: one key; rows derive theirs from it and `prompt.row_ids`.
    prompt: what to continue.
    target: the model whose law or argmax the output has.
    drafter: the source of guesses; it changes the speed, not the law.
    verify_fn: the acceptance rule.
    logits_to_probs: how the target is sampled; the drafter's is its own.
    max_len: S, the most tokens a row can have, prompt included.
    eos_id: ends a row once committed; a tuple lists several, -1 none.

  Raises:
    ValueError: if the prompt exceeds `max_len`, or shapes disagree.
  """
  state = init(
    params, rng_key, prompt, target=target, drafter=drafter, max_len=max_len
  )
  state = run(
    params,
    state,
    target=target,
    drafter=drafter,
    verify_fn=verify_fn,
    logits_to_probs=logits_to_probs,
    eos_id=eos_id,
  )
  return output(state)


def init(
  params: Params,
  rng_key: Array,
  prompt: Prompt,
  *,
  target: LanguageModel,
  drafter: Drafter,
  max_len: int,
) -> DecodeState:
  """Encoder pass and prefill of both models; see `generate`."""
  row_keys = keys.row_keys(rng_key, prompt.row_ids)
  rows = commit.init_rows(row_keys, prompt, max_len)
  # Blocks start before max_len and are up to gamma + 1 wide, and the last of
  # them may end beyond it.
  capacity = max_len + drafter.gamma + 1
  return DecodeState(
    rows=rows,
    target_cache=target.init(params.target, prompt, capacity),
    drafter_state=drafter.init(params.drafter, prompt, capacity),
    statistics=statistics.init(rows.done.shape[0], drafter.gamma),
  )


def run(
  params: Params,
  state: DecodeState,
  *,
  target: LanguageModel,
  drafter: Drafter,
  verify_fn: VerifyFn,
  logits_to_probs: LogitsToProbsFn,
  eos_id: EosId,
) -> DecodeState:
  """Iterates until every row is done, in one `lax.while_loop`."""

  def iterate(state: DecodeState) -> DecodeState:
    draft, state = _propose(params, state, drafter)

    def judge(state: DecodeState, width: int) -> DecodeState:
      state, _ = _judge(
        params,
        state,
        _narrow(draft, width),
        target=target,
        verify_fn=verify_fn,
        logits_to_probs=logits_to_probs,
        eos_id=eos_id,
      )
      return state

    if not drafter.may_abstain or not drafter.gamma:
      return judge(state, drafter.gamma)
    return jax.lax.cond(
      jnp.any(draft.lengths > 0),
      lambda state: judge(state, drafter.gamma),
      lambda state: judge(state, 0),
      state,
    )

  return jax.lax.while_loop(
    lambda state: ~jnp.all(state.rows.done), iterate, state
  )


def step(
  params: Params,
  state: DecodeState,
  *,
  target: LanguageModel,
  drafter: Drafter,
  verify_fn: VerifyFn,
  logits_to_probs: LogitsToProbsFn,
  eos_id: EosId,
) -> tuple[DecodeState, StepInfo]:
  """One iteration of `run`, with what happened in it."""
  draft, state = _propose(params, state, drafter)

  def judge(state: DecodeState, width: int) -> tuple[DecodeState, StepInfo]:
    state, info = _judge(
      params,
      state,
      _narrow(draft, width),
      target=target,
      verify_fn=verify_fn,
      logits_to_probs=logits_to_probs,
      eos_id=eos_id,
    )
    return state, _widen(info, draft)

  if not drafter.may_abstain or not drafter.gamma:
    return judge(state, drafter.gamma)
  return jax.lax.cond(
    jnp.any(draft.lengths > 0),
    lambda state: judge(state, drafter.gamma),
    lambda state: judge(state, 0),
    state,
  )


def output(state: DecodeState) -> DecodeOutput:
  """What a decode leaves behind, without caches and keys."""
  context = state.rows.context
  is_committed = arrays.is_within(context.lengths, context.tokens.shape[1])
  return DecodeOutput(
    tokens=jnp.where(is_committed, context.tokens, 0),
    lengths=context.lengths,
    log_probs=jnp.where(is_committed, state.rows.log_probs, 0.0),
    done=state.rows.done,
    has_nan=state.rows.has_nan,
    statistics=state.statistics,
  )


def _propose(
  params: Params, state: DecodeState, drafter: Drafter
) -> tuple[Draft, DecodeState]:
  """Asks the drafter; finished rows get an empty draft."""
  draft_keys, _ = keys.iteration_keys(
    state.rows.row_keys, state.rows.context.lengths
  )
  draft, drafter_state = drafter.propose(
    params.drafter, draft_keys, state.rows.context, state.drafter_state
  )
  if draft.tokens.shape[1] != drafter.gamma:
    raise ValueError(
      f'the drafter declares gamma {drafter.gamma} and proposes '
      f'{draft.tokens.shape[1]} tokens'
    )
  draft = draft.replace(lengths=jnp.where(state.rows.done, 0, draft.lengths))
  return draft, state.replace(drafter_state=drafter_state)


def _judge(
  params: Params,
  state: DecodeState,
  draft: Draft,
  *,
  target: LanguageModel,
  verify_fn: VerifyFn,
  logits_to_probs: LogitsToProbsFn,
  eos_id: EosId,
) -> tuple[DecodeState, StepInfo]:
  """Scores a draft of any width, verifies it and commits what passed."""
  context = state.rows.context
  pending = arrays.read_block(context.tokens, context.lengths - 1, 1)
  with jax.named_scope('verify'):
    logits, cache = target.extend(
      params.target,
      jnp.concatenate([pending, draft.tokens], axis=1),
      state.target_cache,
    )
    if draft.probs is not None and draft.probs.shape[-1] != logits.shape[-1]:
      raise ValueError(
        f'the drafter has {draft.probs.shape[-1]} token ids, the target '
        f'{logits.shape[-1]}'
      )
    target_probs = logits_to_probs(logits)
    _, verify_keys = keys.iteration_keys(state.rows.row_keys, context.lengths)
    verification = verify_fn(verify_keys, draft, target_probs)

  with jax.named_scope('commit'):
    rows, counts = commit.append(
      state.rows,
      _block(draft, verification),
      logits,
      verification.num_accepted + 1,
      _is_bad(draft),
      eos_id=eos_id,
    )
    new_state = state.replace(
      rows=rows,
      target_cache=target.rewind(cache, rows.context.lengths - 1),
      statistics=_count(state, draft, verification, counts),
    )
  info = StepInfo(
    draft=draft,
    verification=verification,
    target_probs=target_probs,
    starts=context.lengths,
    counts=counts,
  )
  return new_state, info


def _block(draft: Draft, verification: Verification) -> Array:
  """Accepted tokens, then the next one, repeated: int32 `[B, W+1]`."""
  accepted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
  return jnp.where(
    arrays.is_within(verification.num_accepted, accepted.shape[1]),
    accepted,
    verification.next_token[:, None],
  )


def _is_bad(draft: Draft) -> Array:
  """bool `[B]`: rows with a drafted token whose probability is not a number."""
  if draft.probs is None or not draft.tokens.shape[1]:
    return jnp.zeros(draft.lengths.shape, jnp.bool_)
  is_nan = jnp.isnan(arrays.pick(draft.probs, draft.tokens))
  is_drafted = arrays.is_within(draft.lengths, draft.tokens.shape[1])
  return jnp.any(is_nan & is_drafted, axis=1)


def _narrow(draft: Draft, width: int) -> Draft:
  """The first `width` positions of a draft that has no more than them."""
  return Draft(
    tokens=draft.tokens[:, :width],
    probs=None if draft.probs is None else draft.probs[:, :width],
    lengths=jnp.minimum(draft.lengths, width),
  )


def _widen(info: StepInfo, draft: Draft) -> StepInfo:
  """The info of an iteration that scored one position, in full shapes."""
  missing = draft.tokens.shape[1] - info.draft.tokens.shape[1]

  def pad(values: Array | None) -> Array | None:
    if values is None:
      return None
    widths = [(0, 0)] * values.ndim
    widths[1] = (0, missing)
    return jnp.pad(values, widths)

  verification = info.verification
  return info.replace(
    draft=draft,
    verification=verification.replace(
      accept_probs=pad(verification.accept_probs),
      uniforms=pad(verification.uniforms),
    ),
    target_probs=pad(info.target_probs),
  )


def _count(
  state: DecodeState, draft: Draft, verification: Verification, counts: Array
) -> Statistics:
  """The counters after an iteration that committed `counts` tokens a row."""
  before = state.statistics
  gamma = before.num_tested.shape[1]
  width = draft.tokens.shape[1]
  was_active = (counts > 0).astype(jnp.int32)
  num_accepted = jnp.minimum(verification.num_accepted, counts)
  # A rejection counts only when its correction was committed.
  is_whole = counts > verification.num_accepted
  is_rejection = is_whole & (verification.num_accepted < draft.lengths)
  num_tested = num_accepted + is_rejection.astype(jnp.int32)
  num_drafted = jnp.where(
    is_whole, draft.lengths, jnp.minimum(draft.lengths, counts)
  )
  is_tested = arrays.is_within(num_tested, width)
  accept_prob = jnp.sum(
    jnp.where(is_tested, verification.accept_probs, 0.0), axis=1
  )
  to_counts = lambda lengths: arrays.is_within(lengths, gamma).astype(jnp.int32)
  return Statistics(
    num_tokens=before.num_tokens + counts,
    num_target_runs=before.num_target_runs + was_active,
    num_short_runs=before.num_short_runs + was_active * int(width < gamma),
    num_drafted=before.num_drafted + num_drafted * was_active,
    num_tested=before.num_tested + to_counts(num_tested),
    num_accepted=before.num_accepted + to_counts(num_accepted),
    accept_prob=before.accept_prob + accept_prob,
  )
