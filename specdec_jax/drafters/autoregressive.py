"""A smaller language model as the drafter (Leviathan et al., Algorithm 1)."""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base, distributions, keys
from specdec_jax.base import Array, Context, Draft, Drafter
from specdec_jax.drafters.stateless import check_gamma


def autoregressive(
  model: base.LanguageModel,
  *,
  gamma: int,
  logits_to_probs: base.LogitsToProbsFn,
  is_argmax: bool = False,
) -> Drafter:
  """Drafts gamma tokens one by one from `model`.

  Args:
    model: the drafter's language model; its params are the drafter's params.
    gamma: tokens per iteration.
    logits_to_probs: how the drafter is sampled. For the loop to accept well,
      the same standardisation as the target's; for it to be lossless, any.
    is_argmax: drafts the likeliest token of that distribution, which is not
      handed over: for greedy decoding, in which q is one-hot.

  Raises:
    ValueError: if `gamma` is less than 1.
  """
  check_gamma(gamma)

  def init(params: Any, prompt: base.Prompt, max_len: int) -> Any:
    return model.init(params, prompt, max_len)

  def propose(
    params: Any, row_keys: Array, context: Context, cache: Any
  ) -> tuple[Draft, Any]:
    logits, cache = catch_up(model, params, context, cache)
    step_keys = keys.split(row_keys, gamma)

    def draw(logits, row_keys):
      probs = logits_to_probs(logits)
      if is_argmax:
        return arrays.argmax(probs), None
      return distributions.sample(row_keys, probs), probs

    def draw_and_extend(carry, row_keys):
      logits, cache = carry
      drawn = draw(logits, row_keys)
      logits, cache = model.extend(params, drawn[0][:, None], cache)
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

  return Drafter(gamma, init, propose)


def catch_up(
  model: base.LanguageModel, params: Any, context: Context, cache: Any
) -> tuple[Array, Any]:
  """Feeds the last two committed tokens; logits `[B, V]` of what follows.

  After full acceptance the cache lacks the last drafted token and the bonus
  token, otherwise one; that two are fed always keeps one static shape.
  """
  starts = jnp.maximum(context.lengths - 2, 0)
  cache = model.rewind(cache, starts)
  tokens = arrays.read_block(context.tokens, starts, 2)
  last = context.lengths - 1 - starts
  logits, cache = model.extend(params, tokens, cache, at=last)
  return logits[:, 0], model.rewind(cache, context.lengths)
