"""Drafts of adaptive length, which varies by row and by iteration."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter
from specdec_jax.drafters.autoregressive import Chain, as_chain, reader
from specdec_jax.drafters.stateless import check_gamma
from specdec_jax.sampling import distributions, keys, processors


@base.value
class AdaptiveState:
  """The state of an adaptive drafter.

  Attributes:
    cache: the draft model's cache.
    lengths: int32 `[B]`, the committed lengths at the last draft, 0 before it.
    first: the state of the drafter that precedes the model.
  """

  cache: Arrays
  lengths: Array
  first: Arrays


def adaptive(
  model: base.LanguageModel | Chain,
  *,
  gamma: int,
  logits_to_probs: base.LogitsToProbsFn,
  min_prob: float = 0.0,
  min_confidence: float = 0.0,
  is_argmax: bool = False,
  first: Drafter | None = None,
) -> Drafter:
  """Drafts from `model` up to gamma tokens, fewer where it is not confident.

  Drafting ends when no row of the batch needs another token. A row that has not
  advanced since its last draft is finished (invariant 4), and needs none.
  Lossless: whether a token is drafted is decided before it is drawn. A token of
  low probability is therefore proposed, as the last; to drop it would bias the
  output towards tokens that are likely to the drafter.

  Args:
    model: as in `autoregressive`, like `logits_to_probs` and `is_argmax`.
    gamma: the maximum number of tokens per iteration.
    min_prob: a token with less probability than this, in the model's
      distribution at temperature 1, is the last of its draft.
    min_confidence: a row's draft ends before the token of which `confidence` of
      a chain says that it is accepted, with all before it, with less
      probability than this. The first token is drafted always.
    first: a deterministic drafter without weights, such as `prompt_lookup`. The
      model drafts only for the rows in which it has no draft.

  Raises ValueError if `gamma` is below 1, `min_prob` or `min_confidence` is
  outside [0, 1], the latter is given for a model without `confidence`, or
  `first` has another gamma.
  """
  chain = as_chain(model)
  _check(chain, gamma, min_prob, min_confidence, first)

  def propose(
    params: Arrays,
    row_keys: Array,
    context: Context,
    state: AdaptiveState,
    *target: Arrays,
  ) -> tuple[Draft, AdaptiveState]:
    # Finished rows need no token, and neither do those that `first` drafts for.
    is_finished = context.lengths == state.lengths
    limits = jnp.where(is_finished, 0, gamma)
    first_draft, first_state = None, state.first
    if first:
      first_draft, first_state = first.propose(
        (), row_keys, context, first_state
      )
      limits = jnp.where(first_draft.lengths > 0, 0, limits)

    # The model's cache lacks a draft that `first` or a grammar completed.
    is_complete = first is None and context.grammar is None
    feeding = as_chain(model, num_unread=2 if is_complete else gamma + 1)
    fed = feeding.catch_up(params, context, state.cache, *target)

    # Tokens are drawn until each row has reached its limit.
    to_probs = functools.partial(logits_to_probs, sampling=context.sampling)
    step_keys = keys.split(row_keys, gamma)
    draw_fn = functools.partial(_draw, to_probs, min_prob, step_keys)
    empty = _empty(fed[0], limits, gamma, is_argmax)
    extend_fn = lambda *fed: chain.extend(params, *fed, *target)
    stop_fn = functools.partial(_stop, chain.confidence, min_confidence)
    draft, cache = _draft(draw_fn, extend_fn, stop_fn, *fed, context, empty)
    if first_draft is not None:
      draft = _first_if_any(first_draft, draft)
    state = AdaptiveState(
      cache=cache, lengths=context.lengths, first=first_state
    )
    return draft, state

  return Drafter(
    gamma,
    functools.partial(_init, chain, first),
    propose,
    reads_target_cache=chain.reads_target_cache,
    read=functools.partial(_read, reader(model)),
  )


def _check(
  chain: Chain,
  gamma: int,
  min_prob: float,
  min_confidence: float,
  first: Drafter | None,
) -> None:
  """Raises the errors of `adaptive`."""
  check_gamma(gamma)
  if not 0 <= min_prob <= 1:
    raise ValueError(f'min_prob must lie in [0, 1], got {min_prob}')
  if not 0 <= min_confidence <= 1:
    raise ValueError(f'min_confidence must lie in [0, 1], got {min_confidence}')
  if first is not None and first.gamma != gamma:
    raise ValueError(f'`first` needs gamma {gamma}, too, not {first.gamma}')
  if min_confidence and chain.confidence is None:
    raise ValueError(
      'min_confidence needs a drafter with a confidence head: give min_prob, '
      'or another drafter'
    )


def _init(
  chain: Chain,
  first: Drafter | None,
  params: Arrays,
  prompt: base.Prompt,
  max_len: int,
  *target: Arrays,
) -> Arrays:
  """Makes the state as `Drafter.init`, with the target's cache if the chain
  reads it."""
  chain_state = chain.init(params, prompt, max_len, *target)
  # A chain that reads the target's cache also returns that cache.
  target_cache = ()
  if target:
    chain_state, *target_cache = chain_state
  state = AdaptiveState(
    cache=chain_state,
    lengths=jnp.zeros(prompt.decoder_lengths.size, jnp.int32),
    first=first.init((), prompt, max_len) if first else (),
  )
  return (state, *target_cache) if target else state


def _read(read_fn, params, context, state, *target, width: int):
  """Reads text as `Drafter.read`."""
  return AdaptiveState(
    cache=read_fn(params, context, state.cache, *target, width=width),
    lengths=jnp.zeros_like(context.lengths),
    first=state.first,
  )


def _draw(logits_to_probs, min_prob, step_keys, i, logits, text, draft: Draft):
  """Adds token i to the draft, drawn from the `logits[B, V]` after a text; the
  likeliest one if the draft has no probabilities."""
  probs = logits_to_probs(processors.after_text(logits, text))
  put = jax.lax.dynamic_update_index_in_dim
  if draft.probs is None:
    tokens, all_probs = arrays.argmax(probs), None
  else:
    tokens = distributions.sample(step_keys[i], probs)
    all_probs = put(draft.probs, probs, i, axis=1)
  confidence = arrays.pick(jax.nn.softmax(logits), tokens)
  # A doubtful token i is the last, so that its row has i + 1 tokens.
  shorter = jnp.minimum(draft.lengths, i + 1)
  return Draft(
    tokens=put(draft.tokens, tokens, i, axis=1),
    probs=all_probs,
    lengths=jnp.where(confidence < min_prob, shorter, draft.lengths),
  )


def _empty(logits, limits, gamma: int, is_argmax: bool) -> Draft:
  """Makes a draft without tokens yet, whose lengths are the rows' limits."""
  shape = limits.size, gamma
  probs = None
  if not is_argmax:
    probs = jnp.zeros((*shape, logits.shape[1]), jnp.float32)
  tokens = jnp.zeros(shape, jnp.int32)
  return Draft(tokens=tokens, probs=probs, lengths=limits)


def _stop(confidence_fn, min_confidence, i, left, draft: Draft):
  """Ends drafts before token i where it is unlikely to be accepted; only the
  tokens before it decide that."""
  if not min_confidence:
    return draft
  is_unlikely = confidence_fn(left)[:, 0] < min_confidence
  shorter = jnp.minimum(draft.lengths, i)
  lengths = jnp.where(is_unlikely, shorter, draft.lengths)
  return dataclasses.replace(draft, lengths=lengths)


def _draft(
  draw_fn, extend_fn, stop_fn, logits, left, cache, context, empty: Draft
):
  """Draws tokens, one per row at a time, until every row has reached its limit,
  the lengths of `empty`."""

  def is_due(carry):
    i, draft, *_ = carry
    return jnp.any(i < draft.lengths)

  def extend_and_draw(carry):
    i, draft, left, cache, text = carry
    last = jax.lax.dynamic_slice_in_dim(draft.tokens, i - 1, 1, axis=1)
    text = processors.followed_by(text, last[:, 0])
    logits, left, cache = extend_fn(last, left, cache)
    draft = stop_fn(i, left, draft)
    return i + 1, draw_fn(i, logits[:, 0], text, draft), left, cache, text

  first, text = jnp.zeros((), jnp.int32), processors.text_of(context)
  draft = draw_fn(first, logits, text, empty)
  carry = (first + 1, draft, left, cache, text)
  _, draft, _, cache, _ = jax.lax.while_loop(is_due, extend_and_draw, carry)
  return draft, cache


def _first_if_any(first: Draft, second: Draft) -> Draft:
  """Takes rows from `first`, which is one-hot, where it has a draft, and from
  `second` elsewhere."""
  if second.probs is not None:
    one_hot = functools.partial(jax.nn.one_hot, dtype=second.probs.dtype)
    probs = one_hot(first.tokens, second.probs.shape[-1])
    first = dataclasses.replace(first, probs=probs)
  is_first = first.lengths > 0

  def choose(from_first: Array, from_second: Array) -> Array:
    rows = jnp.expand_dims(is_first, tuple(range(1, from_first.ndim)))
    return jnp.where(rows, from_first, from_second)

  return jax.tree.map(choose, first, second)
