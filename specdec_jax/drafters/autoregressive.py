"""A smaller language model as the drafter (Leviathan et al., Algorithm 1)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base, distributions, keys
from specdec_jax.base import Array, Context, Draft, Drafter
from specdec_jax.drafters.stateless import check_gamma


class Chain(NamedTuple):
  """What drafts token after token, as three pure functions.

  Attributes:
    init: as of `Drafter`; its state is the cache.
    catch_up: `(params, context, cache) -> (logits[B, V], cache)`: takes in what
      was committed since, and says what follows all of it.
    extend: `(params, tokens[B, 1], cache) -> (logits[B, 1, V], cache)`.
    reads_target_cache: as of `Drafter`, for `init` and `catch_up`.
  """

  init: Callable[..., Any]
  catch_up: Callable[..., tuple[Array, Any]]
  extend: Callable[[Any, Array, Any], tuple[Array, Any]]
  reads_target_cache: bool = False


def autoregressive(
  model: base.LanguageModel | Chain,
  *,
  gamma: int,
  logits_to_probs: base.LogitsToProbsFn,
  is_argmax: bool = False,
) -> Drafter:
  """Drafts gamma tokens one by one from `model`.

  Args:
    model: a language model, or another chain, such as `drafters.eagle`; its
      params are the drafter's params.
    gamma: tokens per iteration.
    logits_to_probs: how the drafter is sampled. For the loop to accept well,
      the same standardisation as the target's; for it to be lossless, any.
    is_argmax: drafts the likeliest token of that distribution, which is not
      handed over: for greedy decoding, in which q is one-hot.

  Raises:
    ValueError: if `gamma` is less than 1.
  """
  check_gamma(gamma)
  chain = as_chain(model)

  def propose(
    params: Any, row_keys: Array, context: Context, cache: Any, *target: Any
  ) -> tuple[Draft, Any]:
    logits, cache = chain.catch_up(params, context, cache, *target)
    step_keys = keys.split(row_keys, gamma)

    def draw(logits, row_keys):
      probs = logits_to_probs(logits)
      if is_argmax:
        return arrays.argmax(probs), None
      return distributions.sample(row_keys, probs), probs

    def draw_and_extend(carry, row_keys):
      logits, cache = carry
      drawn = draw(logits, row_keys)
      logits, cache = chain.extend(params, drawn[0][:, None], cache)
      return (logits[:, 0], cache), drawn

    (logits, cache), most = jax.lax.scan(
      draw_and_extend, (logits, cache), step_keys[:-1]
    )
    # The last token is drawn but not fed: the next catch-up feeds it.
    last = draw(logits, step_keys[-1])
    join = lambda a, b: jnp.moveaxis(jnp.concatenate([a, b[None]]), 0, 1)
    tokens, probs = jax.tree.map(join, most, last)
    lengths = jnp.full_like(context.lengths, gamma)
    return Draft(tokens=tokens, probs=probs, lengths=lengths), cache

  return Drafter(
    gamma, chain.init, propose, reads_target_cache=chain.reads_target_cache
  )


def as_chain(model: base.LanguageModel | Chain) -> Chain:
  """A language model as a chain, whose catch-up feeds the last two committed
  tokens.

  After full acceptance the cache lacks the last drafted token and the bonus
  token, otherwise one; that two are fed always keeps one static shape.
  """
  if isinstance(model, Chain):
    return model

  def catch_up(params: Any, context: Context, cache: Any) -> tuple[Array, Any]:
    starts = jnp.maximum(context.lengths - 2, 0)
    cache = model.rewind(cache, starts)
    tokens = arrays.read_block(context.tokens, starts, 2)
    last = context.lengths - 1 - starts
    logits, cache = model.extend(params, tokens, cache, at=last)
    return logits[:, 0], model.rewind(cache, context.lengths)

  return Chain(model.init, catch_up, model.extend)
