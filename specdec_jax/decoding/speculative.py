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
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeOutput, DecodeState, output


@base.value
class StepInfo:
  """What a researcher wants to see of one iteration; of trees, whose depth is
  then G, along the chain of `tree_drafts.along_line`.

  Attributes:
    draft: what was proposed.
    verification: what became of it.
    target_probs: float32 `[B, G+1, V]`, p; beyond the first not the target's if
      no row drafts.
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
  method: Method,
  max_len: int,
) -> DecodeOutput:
  """Decodes every row of `prompt` until EOS or its limit; jit it whole.

  Args:
    params: weights of target and drafter.
    rng_key: one key of any kind; rows derive theirs, which are threefry's, from
      it and `prompt.row_ids`.
    prompt: what to continue.
    method: who drafts, who judges and by which rule.
    max_len: S, the most tokens that a row can have, prompt included.

  Raises:
    ValueError: if the prompt has no rows or exceeds `max_len`, shapes disagree,
      or the drafter proposes trees and the target or the rule takes none.
  """
  state = init(params, rng_key, prompt, method=method, max_len=max_len)
  return output(run(params, state, method=method))


def init(
  params: Params,
  rng_key: Array,
  prompt: base.Prompt,
  *,
  method: Method,
  max_len: int,
) -> DecodeState:
  """Encoder pass and prefill of both models; see `generate`."""
  prompt = state_lib.checked(prompt, max_len)
  target, drafter = method.target, method.drafter
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
    rng_key, prompt, cache, own, gamma=method.depth, max_len=max_len
  )


def run(
  params: Params,
  state: DecodeState,
  *,
  method: Method,
  num_done: Array | None = None,
) -> DecodeState:
  """Iterates `step` until every row is done, in one `lax.while_loop`.

  Args:
    params: weights of target and drafter.
    state: of `init`, or of an earlier `run`.
    method: the one of `init`.
    num_done: int32, returns once this many rows are done; None means all.
  """
  num_due = state.done.shape[0] if num_done is None else num_done
  return jax.lax.while_loop(
    lambda state: jnp.sum(state.done, dtype=jnp.int32) < num_due,
    lambda state: step(params, state, method=method)[0],
    state,
  )


def step(
  params: Params,
  state: DecodeState,
  *,
  method: Method,
) -> tuple[DecodeState, StepInfo]:
  """One iteration of `run`, with what happened in it.

  The target's call alone is narrower where no row drafted; all rows are judged
  at one width, those without a draft by their pending token.
  """
  target, drafter = method.target, method.drafter
  draft, state = propose(params, state, drafter)
  tree, starts = drafter.tree, state.context.lengths
  if draft.probs is not None and draft.probs.shape[-1] != target.vocab_size:
    raise ValueError(
      f'the drafter has {draft.probs.shape[-1]} token ids, the target '
      f'{target.vocab_size}'
    )
  with jax.named_scope('verify'):
    logits, cache, is_short = _score(
      params.target, state, draft, drafter, target
    )
    target_probs = method.logits_to_probs(logits)
    verify_keys = _verify_keys(state, tree)
    verification = method.verify_fn(verify_keys, draft, target_probs)
    # What is committed and counted: all of a chain, the path of a tree.
    of_nodes = target_probs, logits, _is_bad(draft)
    line: tuple[Any, ...] = draft, verification, *of_nodes
    if tree is not None:
      if verification.path is None:
        raise ValueError(
          f'the drafter proposes trees of {drafter.gamma} nodes, and the rule '
          'accepts prefixes of chains: it gives no path'
        )
      cache = tree_drafts.keep_path(
        target, cache, starts, verification.path, drafter.gamma
      )
      line = tree_drafts.along_line(tree, *line)
    made, verdict, line_probs, line_logits, is_bad = line

  with jax.named_scope('commit'):
    state, counts = state_lib.commit(
      state,
      _block(made, verdict),
      line_logits,
      verdict.num_accepted + 1,
      jnp.pad(is_bad[:, 1:, 0], ((0, 0), (0, 1))),
      eos_id=method.eos_id,
    )
    num_nodes = None if tree is None else drafter.gamma
    counted = statistics.count(
      *(state.statistics, made, verdict, counts),
      is_short=is_short,
      num_nodes=num_nodes,
    )
    state = dataclasses.replace(
      state,
      target_cache=target.rewind(cache, state.context.lengths - 1),
      statistics=counted,
    )
  return state, StepInfo(
    draft=made,
    verification=verdict,
    target_probs=line_probs,
    starts=starts,
    counts=counts,
  )


def _score(
  params: Any,
  state: DecodeState,
  draft: Draft,
  drafter: Drafter,
  target: base.LanguageModel,
) -> tuple[Array, Any, Array]:
  """The target's call: logits `[B, G+1, V]` of what follows the pending token
  and each drafted one; the cache; and bool `[]`, whether no row drafted, so
  that only the pending token was scored and 0 stands for the rest.

  Both calls are compiled, and the choice is at run time, by `run_if`.
  """
  starts, gamma = state.context.lengths, drafter.gamma
  pending = arrays.read_block(state.context.tokens, starts - 1, 1)
  tokens = jnp.concatenate([pending, draft.tokens], axis=1)

  def score(width: int, carry: tuple[Array, Any]) -> tuple[Array, Any]:
    cache, placed = carry[1], {}
    # The pending token alone is a chain, whatever would have followed it.
    if drafter.tree is not None and width:
      placed['placement'] = trees.placement(
        drafter.tree, range(width + 1), starts - 1, cache.capacity
      )
    logits, cache = target.extend(
      params, tokens[:, : width + 1], cache, **placed
    )
    return jnp.pad(logits, ((0, 0), (0, gamma - width), (0, 0))), cache

  shape = starts.size, gamma + 1, target.vocab_size
  carry = jnp.zeros(shape, jnp.float32), state.target_cache
  if not drafter.may_abstain or not gamma:
    return *score(gamma, carry), jnp.zeros((), jnp.bool_)
  has_draft = jnp.any(draft.lengths > 0)
  carry = run_if(has_draft, functools.partial(score, gamma), carry)
  return *run_if(~has_draft, functools.partial(score, 0), carry), ~has_draft


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
  """bool `[B, W+1, 1]`: whether the probability of a drafted token is not a
  number; the pending token stands before them."""
  num_drafted = draft.tokens.shape[1]
  is_bad = arrays.is_within(draft.lengths, num_drafted)
  if draft.probs is None or not num_drafted:
    is_bad = jnp.zeros_like(is_bad)
  else:
    is_bad = is_bad & jnp.isnan(arrays.pick(draft.probs, draft.tokens))
  return jnp.pad(is_bad, ((0, 0), (1, 0)))[..., None]
