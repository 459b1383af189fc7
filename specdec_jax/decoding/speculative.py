"""Draft, verify, commit: the speculative decoding loop.

Leviathan et al., Algorithm 1 (https://arxiv.org/abs/2211.17192), batched: each
row advances at its own pace inside one `lax.while_loop`, and the target scores
all gamma + 1 positions of all rows in one call. `generate` is the whole
program; `init`, `step`, `run` and `output` are its pieces.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Draft, Drafter, Params, Verification
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding import statistics, target_call, tree_drafts
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeOutput, DecodeState, output
from specdec_jax.decoding.tree_drafts import Line
from specdec_jax.sampling import grammars, keys, processors
from specdec_jax.verification import decision


@base.value
class StepInfo:
  """The draft, verification and commit of one iteration. A tree appears as the
  chain of `tree_drafts.along_line`, with its depth as G.

  Attributes:
    draft: the draft.
    verification: the result of its verification.
    target_probs: float32 `[B, G+1, V]`, p; if no row drafted, only the first
      position is valid.
    starts: int32 `[B]`, committed lengths before the iteration.
    counts: int32 `[B]`, the number of tokens that every row committed.
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
  """Decodes every row of `prompt` until EOS or its limit; jit the whole call.

  Args:
    params: weights of target and drafter.
    rng_key: one key of any kind; rows derive threefry keys from it and
      `prompt.row_ids`.
    prompt: the batch of prompts.
    method: the target, the drafter, the rule, the sampling and EOS.
    max_len: S, the maximum number of tokens of a row, with its prompt.

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
  """Runs the encoder and prefills both models; see `generate`."""
  prompt = state_lib.checked(prompt, max_len)
  target, drafter = method.target, method.drafter
  tree_drafts.check(target, drafter)
  # A block starts before max_len and is up to gamma + 1 wide: with max_len 8
  # and gamma 3 the last one may take positions 7 to 10.
  capacity = max_len + drafter.gamma + 1
  cache: Any = target.init(params.target, prompt, capacity)
  arguments = params.drafter, prompt, capacity
  if drafter.reads_target_cache:
    drafter_state, cache = drafter.init(*arguments, cache)
  else:
    drafter_state = drafter.init(*arguments)
  return state_lib.init(
    rng_key, prompt, cache, drafter_state, gamma=method.depth, max_len=max_len
  )


def run(
  params: Params,
  state: DecodeState,
  *,
  method: Method,
  num_done: Array | None = None,
) -> DecodeState:
  """Iterates `step` until enough rows are done, in one `lax.while_loop`.

  Args:
    params: weights of target and drafter.
    state: of `init`, or of an earlier `run`.
    method: that of `init`.
    num_done: int32 `[]`, the number of rows at which to stop; None for all.
  """
  num_required = state.done.shape[0] if num_done is None else num_done
  return jax.lax.while_loop(
    lambda state: jnp.sum(state.done, dtype=jnp.int32) < num_required,
    lambda state: step(params, state, method=method)[0],
    state,
  )


def step(
  params: Params, state: DecodeState, *, method: Method
) -> tuple[DecodeState, StepInfo]:
  """Runs one iteration of `run`; returns the state and the details.

  If no row drafted, the target's call is narrower. The rule always gets the
  full width, and decides on the next token of rows without a draft.
  """
  tree = method.drafter.tree
  starts = state.context.lengths
  vocab_size = method.target.vocab_size
  draft, state = propose(params, state, method.drafter, vocab_size=vocab_size)
  draft, masks = grammars.read(
    state.context,
    draft,
    state.done,
    tree=tree,
    completes=method.drafter.takes_guesses,
    vocab_size=vocab_size,
  )
  with jax.named_scope('verify'):
    scored = target_call.score(params.target, state, draft, method)
    logits, cache, is_short = scored
    context, drafted = state.context, draft.tokens
    processed = processors.after_drafts(logits, context, drafted, tree=tree)
    processed = grammars.masked(processed, masks)
    logits = processors.checked(logits, processed, method.num_ids)
    target_probs = method.logits_to_probs(processed, context.sampling)
    verify_keys = tree_drafts.verify_keys(tree, state.row_keys, starts)
    verification = method.verify_fn(verify_keys, draft, target_probs)
    line = Line(draft, verification, target_probs, logits, _is_bad(draft))
    if tree is not None:
      line, cache = tree_drafts.taken(method, line, cache, starts)

  with jax.named_scope('commit'):
    state, counts = state_lib.commit(
      state,
      line.block(),
      line.logits,
      line.verification.num_accepted + 1,  # and the token after them
      jnp.pad(line.is_bad[:, 1:, 0], ((0, 0), (0, 1))),  # False for the last
      eos_id=method.eos_id,
    )
    counted = statistics.count(
      *(state.statistics, line.draft, line.verification, counts),
      is_short=is_short,
      tree=tree,
    )
    cache = method.target.rewind(cache, state.context.lengths - 1)
    state = dataclasses.replace(state, target_cache=cache, statistics=counted)
  return state, StepInfo(
    draft=line.draft,
    verification=line.verification,
    target_probs=line.target_probs,
    starts=starts,
    counts=counts,
  )


def propose(
  params: Params, state: DecodeState, drafter: Drafter, *, vocab_size: int
) -> tuple[Draft, DecodeState]:
  """Runs the drafter, and removes invalid drafted tokens and the drafts of
  finished rows.

  Raises ValueError if the draft has other shapes than the drafter declares, or
  its vocabulary is not the target's, of `vocab_size` tokens.
  """
  context = state.context
  draft_keys, _ = keys.iteration_keys(state.row_keys, context.lengths)
  seen = (state.target_cache,) if drafter.reads_target_cache else ()
  with jax.named_scope('draft'):
    draft, drafter_state = drafter.propose(
      params.drafter, draft_keys, context, state.drafter_state, *seen
    )
    _check_shapes(draft, drafter, vocab_size)
    is_tree = drafter.tree is not None
    draft = decision.proposed(draft, vocab_size, is_tree=is_tree)
  lengths = jnp.where(state.done, 0, draft.lengths)  # invariant 9
  draft = dataclasses.replace(draft, lengths=lengths)
  return draft, dataclasses.replace(state, drafter_state=drafter_state)


def _check_shapes(draft: Draft, drafter: Drafter, vocab_size: int) -> None:
  """Raises ValueError unless a draft has the width and the vocabulary that the
  loop expects."""
  if draft.tokens.shape[1] != drafter.gamma:
    raise ValueError(
      f'the drafter declares gamma {drafter.gamma} and proposes '
      f'{draft.tokens.shape[1]} tokens'
    )
  if draft.probs is not None and draft.probs.shape[-1] != vocab_size:
    raise ValueError(
      f'the drafter has {draft.probs.shape[-1]} token ids, the target '
      f'{vocab_size}'
    )


def _is_bad(draft: Draft) -> Array:
  """Tells, bool `[B, W+1, 1]`, whether a drafted token's probability is NaN;
  the first entry is the pending token's, False."""
  is_drafted = arrays.is_within(draft.lengths, draft.tokens.shape[1])
  is_drafted = is_drafted & (draft.tokens != decision.NO_TOKEN)
  is_bad = is_drafted & jnp.isnan(decision.drafted_probs(draft))
  return jnp.pad(is_bad, ((0, 0), (1, 0)))[..., None]
