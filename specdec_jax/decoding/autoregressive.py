"""Plain decoding, one token per target call: the baseline and the reference."""

import dataclasses

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Params
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeOutput, DecodeState, output
from specdec_jax.sampling import distributions, grammars, keys, processors
from specdec_jax.verification.decision import split_by_purpose


def generate(
  params: Params,
  rng_key: Array,
  prompt: base.Prompt,
  *,
  method: Method,
  max_len: int,
) -> DecodeOutput:
  """Decodes every row of `prompt` until EOS or its limit; jit the whole call.

  Draws from the same streams as speculative decoding, so that a speculative
  decode with empty drafts gives the same tokens. Arguments and errors are as in
  `speculative.generate`; the drafter, its params and the rule are not read.
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
  """Runs the encoder and prefills the target; see `generate`."""
  prompt = state_lib.checked(prompt, max_len)
  cache = method.target.init(params.target, prompt, max_len + 1)
  return state_lib.init(rng_key, prompt, cache, (), gamma=0, max_len=max_len)


def run(params: Params, state: DecodeState, *, method: Method) -> DecodeState:
  """Decodes until every row is done, in one `lax.while_loop`."""
  target = method.target

  def iterate(state: DecodeState) -> DecodeState:
    lengths = state.context.lengths
    logits, cache = target.extend(
      params.target,
      arrays.read_block(state.context.tokens, lengths - 1, 1),
      state.target_cache,
    )
    _, verify_keys = keys.iteration_keys(state.row_keys, lengths)
    _, next_keys = split_by_purpose(verify_keys)
    masks = grammars.after_text(
      state.context, state.done, vocab_size=target.vocab_size
    )
    processed = processors.after_drafts(logits, state.context)
    processed = grammars.masked(processed, masks)
    probs = method.logits_to_probs(processed, state.context.sampling)[:, 0]
    tokens = distributions.sample(next_keys, probs)
    state, counts = state_lib.commit(
      state,
      tokens[:, None],
      processors.checked(logits, processed, method.num_ids),
      jnp.ones_like(lengths),
      jnp.zeros_like(state.done)[:, None],
      eos_id=method.eos_id,
    )
    before = state.statistics
    return dataclasses.replace(
      state,
      target_cache=target.rewind(cache, state.context.lengths - 1),
      statistics=dataclasses.replace(
        before,
        num_tokens=before.num_tokens + counts,
        num_target_runs=before.num_target_runs + counts,
      ),
    )

  return jax.lax.while_loop(lambda state: ~jnp.all(state.done), iterate, state)
