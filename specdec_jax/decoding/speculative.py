"""Draft, verify, commit: the speculative decoding loop.

Leviathan et al., Algorithm 1 (https://arxiv.org/abs/2211.17192), batched: rows
advance each at their own pace inside one `lax.while_loop`, and the target
scores all gamma + 1 positions of all rows in one call. `generate` is the whole
program; `init`, `step`, `run` and `output` are its pieces.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base, keys, trees
from specdec_jax.base import Array, Draft, Drafter, Params, Verification
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding import statistics, tree_drafts
from specdec_jax.decoding.state import DecodeOutput, DecodeState, EosId, output


@base.value
class StepInfo:
  """What a researcher wants to see of one iteration; of trees, whose depth is
  then G, along the chain of `tree_drafts.along_line`.

  Attributes:
    draft: what was proposed.
    verification: what became of it.
    target_probs: float32 `[B, G+1, V]`, p; beyond the first 0 if none drafts.
    starts: int32 `[B]`, committed lengths before the iteration.
    counts: int32 `[B]`, how many tokens each row committed.
  """

  draft: Draft
  verification: Verification
  target_probs: Array
  starts: Array
  counts: Array


def generate(
  params: Params,
  rng_key: Array,
  prompt: base.Prompt,
  *,
  target: base.LanguageModel,
  drafter: Drafter,
  verify_fn: base.VerifyFn,
  logits_to_probs: base.LogitsToProbsFn,
  max_len: int,
  eos_id: EosId,
) -> DecodeOutput:
  """Decodes every row of `prompt` until EOS or its limit; jit it whole.

  Args:
    params: weights of target and drafter.
    rng_key: one key of any kind; rows derive theirs, which are threefry's, from
      it and `prompt.row_ids`.
    prompt: what to continue.
    target: the model whose distribution or argmax the output has.
    drafter: the source of guesses; it changes the speed, not the distribution.
    verify_fn: the acceptance rule.
    logits_to_probs: how the target is sampled; the drafter's is its own.
    max_len: S, the most tokens per row can have, prompt included.
    eos_id: ends a row once committed; a tuple lists several, -1 none.

  Raises:
    ValueError: if the prompt has no rows or exceeds `max_len`, shapes disagree,
      or the drafter proposes trees and the target or the rule takes none.
  """
  models: dict[str, Any] = {'target': target, 'drafter': drafter}
  state = init(params, rng_key, prompt, **models, max_len=max_len)
  state = run(
    params,
    state,
    **models,
    verify_fn=verify_fn,
    logits_to_probs=logits_to_probs,
    eos_id=eos_id,
  )
  return output(state)


def init(
  params: Params,
  rng_key: Array,
  prompt: base.Prompt,
  *,
  target: base.LanguageModel,
  drafter: Drafter,
  max_len: int,
) -> DecodeState:
  """Encoder pass and prefill of both models; see `generate`."""
  prompt = state_lib.checked(prompt, max_len)
  tree_drafts.check(target, drafter)
  # Blocks start before max_len and are up to gamma + 1 wide, and the last of
  # them may end beyond it.
  capacity = max_len + drafter.gamma + 1
  cache: Any = target.init(params.target, prompt, capacity)
  arguments = params.drafter, prompt, capacity
  if drafter.reads_target_cache:
    own, cache = drafter.init(*arguments, cache)
  else:
    own = drafter.init(*arguments)
  return state_lib.init(
    rng_key,
    prompt,
    cache,
    own,
    gamma=drafter.gamma if drafter.tree is None else trees.depth(drafter.tree),
    max_len=max_len,
  )


def run(
  params: Params,
  state: DecodeState,
  *,
  num_done: Array | None = None,
  **rule: Any,
) -> DecodeState:
  """Iterates `step` until every row is done, in one `lax.while_loop`.

  Args:
    params: weights of target and drafter.
    state: of `init`, or of an earlier `run`.
    num_done: int32, returns once this many rows are done; None means all.
    **rule: the keyword arguments of `step`.
  """
  num_due = state.done.shape[0] if num_done is None else num_done
  return jax.lax.while_loop(
    lambda state: jnp.sum(state.done, dtype=jnp.int32) < num_due,
    lambda state: step(params, state, **rule)[0],
    state,
  )


def step(
  params: Params,
  state: DecodeState,
  *,
  target: base.LanguageModel,
  drafter: Drafter,
  verify_fn: base.VerifyFn,
  logits_to_probs: base.LogitsToProbsFn,
  eos_id: EosId,
) -> tuple[DecodeState, StepInfo]:
  """One iteration of `run`, with what happened in it."""
  draft, state = propose(params, state, drafter)
  tree = drafter.tree
  starts, size = state.context.lengths, target.vocab_size
  if draft.probs is not None and draft.probs.shape[-1] != size:
    raise ValueError(
      f'the drafter has {draft.probs.shape[-1]} token ids, the target {size}'
    )
  probs = jnp.zeros((starts.size, drafter.gamma + 1, size), jnp.float32)
  shapes = jax.eval_shape(
    lambda: verify_fn(_verify_keys(state, tree), draft, probs)
  )
  if tree is not None and shapes.path is None:
    raise ValueError(
      f'the drafter proposes trees of {drafter.gamma} nodes, and the rule '
      'accepts prefixes of chains: it gives no path'
    )
  nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
  shown: tuple[Any, ...] = draft, nothing, probs
  if tree is not None:
    shown = tree_drafts.along_line(tree, *shown)
  no_info = StepInfo(
    draft=shown[0],
    verification=shown[1],
    target_probs=shown[2],
    starts=starts,
    counts=starts,
  )

  def judge(width: int, carry):
    state, info = _judge(
      params,
      carry[0],
      _narrow(draft, width),
      target=target,
      drafter=drafter,
      verify_fn=verify_fn,
      logits_to_probs=logits_to_probs,
      eos_id=eos_id,
    )
    is_shown = tree is not None and width > 0
    return state, info if is_shown else _widen(info, no_info)

  return _judge_at_width(drafter, draft, judge, (state, no_info))


def _judge_at_width(
  drafter: Drafter, draft: Draft, judge: Callable[[int, Any], Any], carry: Any
) -> Any:
  """Judges all positions, or just the pending one if no row drafted anything.

  Both programs are there, and the choice is at run time, by `run_if`.
  """
  if not drafter.may_abstain or not drafter.gamma:
    return judge(drafter.gamma, carry)
  has_draft = jnp.any(draft.lengths > 0)

  judge_at = lambda width: functools.partial(judge, width)
  carry = run_if(has_draft, judge_at(drafter.gamma), carry)
  return run_if(~has_draft, judge_at(0), carry)


def run_if(is_taken: Array, step: Callable[[Any], Any], carry: Any) -> Any:
  """`step(carry)` if a bool `[]` is set, else `carry`.

  It is a loop of at most one trip, since `lax.cond` would copy the caches in
  `carry` on their way in and out; a loop updates them in place.
  """
  take = lambda loop: (jnp.zeros_like(is_taken), step(loop[1]))
  return jax.lax.while_loop(lambda loop: loop[0], take, (is_taken, carry))[1]


def propose(
  params: Params, state: DecodeState, drafter: Drafter
) -> tuple[Draft, DecodeState]:
  """Asks the drafter; finished rows get an empty draft."""
  context = state.context
  draft_keys, _ = keys.iteration_keys(state.row_keys, context.lengths)
  seen = (state.target_cache,) if drafter.reads_target_cache else ()
  with jax.named_scope('draft'):
    draft, drafter_state = drafter.propose(
      params.drafter, draft_keys, context, state.drafter_state, *seen
    )
  if draft.tokens.shape[1] != drafter.gamma:
    raise ValueError(
      f'the drafter declares gamma {drafter.gamma} and proposes '
      f'{draft.tokens.shape[1]} tokens'
    )
  draft = dataclasses.replace(
    draft, lengths=jnp.where(state.done, 0, draft.lengths)
  )
  return draft, dataclasses.replace(state, drafter_state=drafter_state)


def _judge(
  params: Params,
  state: DecodeState,
  draft: Draft,
  *,
  target: base.LanguageModel,
  drafter: Drafter,
  verify_fn: base.VerifyFn,
  logits_to_probs: base.LogitsToProbsFn,
  eos_id: EosId,
) -> tuple[DecodeState, StepInfo]:
  """Scores a draft of any width, verifies it and commits what passed."""
  starts = state.context.lengths
  # The pending token alone is a chain, whatever would have followed it.
  tree = drafter.tree if draft.tokens.shape[1] else None
  with jax.named_scope('verify'):
    pending = arrays.read_block(state.context.tokens, starts - 1, 1)
    tokens = jnp.concatenate([pending, draft.tokens], axis=1)
    placed: dict[str, Any] = {}
    if tree is not None:
      room = state.target_cache.capacity
      nodes = range(tokens.shape[1])
      placed['placement'] = trees.placement(tree, nodes, starts - 1, room)
    logits, cache = target.extend(
      params.target, tokens, state.target_cache, **placed
    )
    target_probs = logits_to_probs(logits)
    verify_keys = _verify_keys(state, drafter.tree)
    verification = verify_fn(verify_keys, draft, target_probs)
    # What is committed and counted: all of a chain, the path of a tree.
    line: tuple[Any, ...] = draft, verification, target_probs, logits
    if tree is not None:
      assert verification.path is not None
      cache = tree_drafts.keep_path(
        target, cache, starts, verification.path, drafter.gamma
      )
      line = tree_drafts.along_line(tree, *line)
    made, verdict, line_probs, line_logits = line

  with jax.named_scope('commit'):
    state, counts = state_lib.commit(
      state,
      _block(made, verdict),
      line_logits,
      verdict.num_accepted + 1,
      _is_bad(made),
      eos_id=eos_id,
    )
    num_nodes = None if tree is None else drafter.gamma
    state = dataclasses.replace(
      state,
      target_cache=target.rewind(cache, state.context.lengths - 1),
      statistics=statistics.count(
        state.statistics, made, verdict, counts, num_nodes=num_nodes
      ),
    )
  info = StepInfo(
    draft=made,
    verification=verdict,
    target_probs=line_probs,
    starts=starts,
    counts=counts,
  )
  return state, info


def _verify_keys(state: DecodeState, tree: base.Tree | None) -> Array:
  """Keys `[B]` for the rule, or those `[D+1, B]` of a rule for trees."""
  lengths = state.context.lengths
  if tree is None:
    return keys.iteration_keys(state.row_keys, lengths)[1]
  return keys.verify_keys_by_depth(state.row_keys, lengths, trees.depth(tree))


def _block(draft: Draft, verification: Verification) -> Array:
  """Accepted tokens, then the next one, repeated: int32 `[B, W+1]`."""
  accepted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
  return jnp.where(
    arrays.is_within(verification.num_accepted, accepted.shape[1]),
    accepted,
    verification.next_token[:, None],
  )


def _is_bad(draft: Draft) -> Array:
  """bool `[B, W+1]`: drafted tokens whose probability is not a number, and the
  next token, which is none of them."""
  is_drafted = arrays.is_within(draft.lengths, draft.tokens.shape[1] + 1)
  if draft.probs is None or not draft.tokens.shape[1]:
    return jnp.zeros_like(is_drafted)
  is_nan = jnp.isnan(arrays.pick(draft.probs, draft.tokens))
  return is_drafted & jnp.pad(is_nan, ((0, 0), (0, 1)))


def _narrow(draft: Draft, width: int) -> Draft:
  """The first `width` positions of a draft that has no more than them."""
  return Draft(
    tokens=draft.tokens[:, :width],
    probs=None if draft.probs is None else draft.probs[:, :width],
    lengths=jnp.minimum(draft.lengths, width),
  )


def _widen(info: StepInfo, like: StepInfo) -> StepInfo:
  """The info of an iteration that scored fewer positions, in the shapes of
  `like`, whose draft it has."""

  def pad(values: Array, full: Array) -> Array:
    if values.ndim == 1:
      return values
    sizes = zip(values.shape, full.shape, strict=True)
    return jnp.pad(values, [(0, wide - narrow) for narrow, wide in sizes])

  return dataclasses.replace(jax.tree.map(pad, info, like), draft=like.draft)
