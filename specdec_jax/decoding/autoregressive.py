"""Plain decoding, one token a target call: the baseline and the reference."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax import arrays, distributions
from specdec_jax.base import (
  Array,
  LanguageModel,
  LogitsToProbsFn,
  Params,
  Prompt,
)
from specdec_jax.decoding import commit, keys, statistics
from specdec_jax.decoding.commit import EosId, Rows
from specdec_jax.decoding.speculative import DecodeOutput, output
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.verification.decision import split_by_purpose


@flax.struct.dataclass(kw_only=True)
class DecodeState:
  """All that the next token needs; see `speculative.DecodeState`."""

  rows: Rows
  target_cache: Any
  statistics: Statistics


def generate(
  params: Params,
  rng_key: Array,
  prompt: Prompt,
  *,
  target: LanguageModel,
  logits_to_probs: LogitsToProbsFn,
  max_len: int,
  eos_id: EosId,
) -> DecodeOutput:
  """Decodes every row of `prompt` until EOS or its limit; jit it whole.

  It draws from the same streams as speculative decoding, so that a speculative
  decode with an empty draft gives the same tokens.

  Args:
    params: weights; only `params.target` is read.
    rng_key: one key; rows derive theirs from it and `prompt.row_ids`.
    prompt: what to continue.
    target: the model.
    logits_to_probs: how it is sampled.
    max_len: S, the most tokens a row can have, prompt included.
    eos_id: ends a row once committed; a tuple lists several, -1 none.

  Raises:
    ValueError: if the prompt exceeds `max_len`.
  """
  state = init(params, rng_key, prompt, target=target, max_len=max_len)
  state = run(
    params,
    state,
    target=target,
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
  max_len: int,
) -> DecodeState:
  """Encoder pass and prefill; see `generate`."""
  row_keys = keys.row_keys(rng_key, prompt.row_ids)
  rows = commit.init_rows(row_keys, prompt, max_len)
  return DecodeState(
    rows=rows,
    target_cache=target.init(params.target, prompt, max_len + 1),
    statistics=statistics.init(rows.done.shape[0], 0),
  )


def run(
  params: Params,
  state: DecodeState,
  *,
  target: LanguageModel,
  logits_to_probs: LogitsToProbsFn,
  eos_id: EosId,
) -> DecodeState:
  """Iterates until every row is done, in one `lax.while_loop`."""

  def iterate(state: DecodeState) -> DecodeState:
    context = state.rows.context
    logits, cache = target.extend(
      params.target,
      arrays.read_block(context.tokens, context.lengths - 1, 1),
      state.target_cache,
    )
    _, verify_keys = keys.iteration_keys(state.rows.row_keys, context.lengths)
    _, next_keys = split_by_purpose(verify_keys)
    tokens = distributions.sample(next_keys, logits_to_probs(logits)[:, 0])
    rows, counts = commit.append(
      state.rows,
      tokens[:, None],
      logits,
      jnp.ones_like(context.lengths),
      jnp.zeros_like(state.rows.done),
      eos_id=eos_id,
    )
    before = state.statistics
    return DecodeState(
      rows=rows,
      target_cache=target.rewind(cache, rows.context.lengths - 1),
      statistics=before.replace(
        num_tokens=before.num_tokens + counts,
        num_target_runs=before.num_target_runs + counts,
      ),
    )

  return jax.lax.while_loop(
    lambda state: ~jnp.all(state.rows.done), iterate, state
  )
