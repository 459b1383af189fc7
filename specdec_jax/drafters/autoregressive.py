"""Drafting with a smaller language model (Leviathan et al., Algorithm 1)."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter, Placement
from specdec_jax.drafters.stateless import check_gamma
from specdec_jax.sampling import distributions, keys, processors

# Logits, `left` (empty for a language model), and the cache.
_Fed = tuple[Array, tuple[()], Arrays]


class Chain(NamedTuple):
  """A network that drafts token by token, as three pure functions.

  `left`, arrays `[B, T, ...]`, is what the tokens after each of a call's T
  tokens need beside the cache, such as EAGLE's features.

  Attributes:
    init: as in `Drafter`; its state is the cache.
    catch_up: `(params, context, cache) -> (logits[B, V], left, cache)`: feeds
      what was committed since the last call and returns the logits after it;
      `left` is of the last token alone.
    extend: `(params, tokens[B, T], left, cache, placement=None) -> (logits[B,
      T, V], left, cache)`: appends tokens, given the `left` of the token before
      each, or with a `Placement`, by keyword, of its parent; the cache then has
      `capacity`.
    reads_target_cache: as in `Drafter`, for all three.
    has_entries: whether the cache has an entry for each token; otherwise a tree
      needs no `Placement`.
    confidence: `(left) -> float32[B, T]`, the probability that the token that
      is drafted next, and those of its draft before it, are all accepted; None
      if the network does not say.
    lag: a token's position in the text less its entry in the cache.
  """

  init: Callable[..., Arrays]
  catch_up: Callable[..., tuple[Array, Arrays, Arrays]]
  extend: Callable[..., tuple[Array, Arrays, Arrays]]
  reads_target_cache: bool = False
  has_entries: bool = True
  confidence: Callable[[Arrays], Array] | None = None
  lag: int = 0


def autoregressive(
  model: base.LanguageModel | Chain,
  *,
  gamma: int,
  logits_to_probs: base.LogitsToProbsFn,
  is_argmax: bool = False,
  token_ids: np.ndarray | None = None,
) -> Drafter:
  """Drafts gamma tokens one by one from `model`.

  Args:
    model: a language model, or another chain, such as `drafters.eagle`; its
      params are the drafter's params.
    gamma: tokens per iteration.
    logits_to_probs: how the drafter is sampled. Any is lossless; the target's
      own has the most drafts accepted.
    is_argmax: drafts the likeliest token, so that q is one-hot, for greedy
      decoding; `logits_to_probs` then only has to keep the argmax.
    token_ids: int32 `[N]`, a draft vocabulary: the tokens the model has logits
      of (FR-Spec, https://arxiv.org/abs/2502.14856). Needs `is_argmax`.

  Raises ValueError if `gamma` is below 1 or `token_ids` lack `is_argmax`.
  """
  check_gamma(gamma)
  if token_ids is not None and not is_argmax:
    raise ValueError('token_ids need is_argmax: set it, or leave them out')
  chain = as_chain(model)

  def propose(
    params: Arrays,
    row_keys: Array,
    context: Context,
    cache: Arrays,
    *target: Arrays,
  ) -> tuple[Draft, Arrays]:
    # The model has not read what a grammar put in the place of its draft.
    reading = (
      chain
      if context.grammar is None
      else as_chain(model, num_unread=gamma + 1)
    )
    logits, left, cache = reading.catch_up(params, context, cache, *target)
    step_keys = keys.split(row_keys, gamma)
    text = processors.text_of(context)
    draw = functools.partial(
      _draw,
      logits_to_probs=lambda logits: logits_to_probs(logits, context.sampling),
      is_argmax=is_argmax,
      token_ids=token_ids,
    )

    def draw_and_extend(carry, row_keys):
      logits, left, cache, text = carry
      drawn = draw(logits, text, row_keys)
      text = processors.followed_by(text, drawn[0])
      logits, left, cache = chain.extend(
        params, drawn[0][:, None], left, cache, *target
      )
      return (logits[:, 0], left, cache, text), drawn

    (logits, _, cache, text), most = jax.lax.scan(
      draw_and_extend, (logits, left, cache, text), step_keys[:-1]
    )
    # The last token is drawn but not fed: the next catch-up feeds it.
    last = draw(logits, text, step_keys[-1])
    join = lambda a, b: jnp.moveaxis(jnp.concatenate([a, b[None]]), 0, 1)
    tokens, probs = jax.tree.map(join, most, last)  # [G-1, B] + [B] -> [B, G]
    lengths = jnp.full_like(context.lengths, gamma)
    return Draft(tokens=tokens, probs=probs, lengths=lengths), cache

  return Drafter(
    gamma,
    chain.init,
    propose,
    reads_target_cache=chain.reads_target_cache,
    read=reader(model),
  )


def _draw(
  logits: Array,
  text: Context | None,
  row_keys: Array,
  *,
  logits_to_probs: Callable[[Array], Array],
  is_argmax: bool,
  token_ids: np.ndarray | None,
) -> tuple[Array, Array | None]:
  """Draws a token for each row from the `logits[B, N]` after a text; also
  returns the probabilities `[B, V]`, None for the likeliest token."""
  # Processors of a text need logits of all ids.
  if token_ids is not None and text is not None:
    logits = _of_all_ids(logits, token_ids)
    token_ids = None
  probs = logits_to_probs(processors.after_text(logits, text))
  if not is_argmax:
    return distributions.sample(row_keys, probs), probs
  token = arrays.argmax(probs)
  if token_ids is not None:
    token = jnp.asarray(token_ids)[token]
  return token, None


def _of_all_ids(logits: Array, token_ids: np.ndarray) -> Array:
  """Scatters logits `[B, N]` of some ids among all ids up to the largest."""
  # ids [0, 3] -> [a, -inf, -inf, b]
  shape = logits.shape[0], int(token_ids.max()) + 1
  return jnp.full(shape, -jnp.inf).at[:, jnp.asarray(token_ids)].set(logits)


def reader(model: base.LanguageModel | Chain) -> Callable[..., Arrays]:
  """Makes a `Drafter.read`: a catch-up over given text."""

  def read(params: Arrays, *args: Arrays, width: int) -> Arrays:
    # This feeds the last token as well; the next catch-up feeds it again.
    chain = as_chain(model, num_unread=width + 1)
    return chain.catch_up(params, *args)[-1]

  return read


def as_chain(
  model: base.LanguageModel | Chain, *, num_unread: int = 2
) -> Chain:
  """Makes a chain of a model; catching up feeds `num_unread` committed tokens.

  The cache lacks one token, or, after full acceptance, two: the last drafted
  one and the bonus. Two are fed always, for a static shape, except that with
  one row on a CPU only the missing ones are fed, one by one. After a tree of
  depth D up to D + 1 may be missing, as the cache has the tree's order.
  """
  if isinstance(model, Chain):
    return model

  def catch_up(params: Arrays, context: Context, cache: Arrays) -> _Fed:
    is_lone = context.lengths.size == 1 and hasattr(cache, 'lengths')
    if not is_lone or num_unread > 2:
      return together(params, context, cache)
    return jax.lax.platform_dependent(
      params, context, cache, cpu=one_by_one, default=together
    )

  def one_by_one(params: Arrays, context: Context, cache: Arrays) -> _Fed:
    # Usually one token is missing; a CPU's kernels are faster over one row.
    last = context.lengths[0] - 1

    def feed(position, carry):
      starts = position[None]
      cache = model.rewind(carry[1], starts)
      tokens = arrays.read_block(context.tokens, starts, 1)
      logits, cache = model.extend(params, tokens, cache)
      return logits[:, 0], cache

    nothing = jnp.zeros((1, model.vocab_size), jnp.float32)
    start = jnp.minimum(cache.lengths[0], last)
    fed = jax.lax.fori_loop(start, last + 1, feed, (nothing, cache))
    return fed[0], (), fed[1]

  def together(params: Arrays, context: Context, cache: Arrays) -> _Fed:
    # Length 9 feeds tokens 7 and 8; length 1 feeds 0 and a stale one, and reads
    # the logits at 0.
    starts = jnp.maximum(context.lengths - num_unread, 0)
    cache = model.rewind(cache, starts)
    tokens = arrays.read_block(context.tokens, starts, num_unread)
    last = context.lengths - 1 - starts
    logits, cache = model.extend(params, tokens, cache, at=last)
    return logits[:, 0], (), model.rewind(cache, context.lengths)

  def extend(
    params: Arrays,
    tokens: Array,
    left: tuple[()],
    cache: Arrays,
    placement: Placement | None = None,
  ) -> _Fed:
    # A model without `gather` does not accept the keyword.
    more = {} if placement is None else {'placement': placement}
    logits, cache = model.extend(params, tokens, cache, **more)
    return logits, left, cache

  return Chain(model.init, catch_up, extend)
