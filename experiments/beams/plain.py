"""Beam search with K cache rows for each example, which are reordered in every
step as T5X reorders them: the baseline of searches whose beams share a row."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Params
from specdec_jax.contrib.beams import beam_search
from specdec_jax.contrib.beams.beam_search import BeamOutput, Rules, Search
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding import statistics
from specdec_jax.decoding.state import EosId


@base.value
class _State:
  """What an iteration needs: the search, and a cache of `B * K` rows."""

  search: Search
  cache: Any


def generate(
  params: Params,
  prompt: base.Prompt,
  *,
  target: base.LanguageModel,
  num_beams: int,
  alpha: float = 0.6,
  max_len: int,
  eos_id: EosId,
  vocab_size: int | None = None,
) -> BeamOutput:
  """What `speculative_beams.generate` gives, by one target call per step; jit
  it whole. Encoder, prefill and the keys of cross-attention are computed once a
  row and then repeated for each beam; arguments and errors are as there."""
  rules = beam_search.checked_rules(
    target, num_beams, alpha, eos_id, vocab_size
  )
  prompt = state_lib.checked(prompt, max_len)
  state = init(
    params, prompt, target=target, num_beams=num_beams, max_len=max_len
  )
  state = jax.lax.while_loop(
    lambda state: jnp.any(state.search.is_active),
    functools.partial(step, params.target, target=target, rules=rules),
    state,
  )
  starts = prompt.decoder_lengths
  counts = dataclasses.replace(
    statistics.init(starts.size, 0),
    num_target_runs=state.search.lengths - starts,
  )
  return beam_search.output(state.search, starts, counts)


def init(
  params: Params,
  prompt: base.Prompt,
  *,
  target: base.LanguageModel,
  num_beams: int,
  max_len: int,
) -> _State:
  """Prefill once a row, and its cache for each beam; see `generate`."""
  cache = target.init(params.target, prompt, max_len + 1)
  return _State(
    search=beam_search.start(prompt, num_beams=num_beams, max_len=max_len),
    cache=jax.tree.map(lambda x: jnp.repeat(x, num_beams, axis=0), cache),
  )


def step(
  params: Any, state: _State, *, target: base.LanguageModel, rules: Rules
) -> _State:
  """Every live sequence by one token; rows that are not active stay put."""
  search, num_beams = state.search, rules.num_beams
  last = beam_search.last_tokens(search.live, search.lengths)
  logits, cache = target.extend(params, last.reshape(-1, 1), state.cache)
  logits = logits.reshape(*last.shape, -1)
  search, parents, _ = beam_search.advance(
    search, logits, search.is_active, rules
  )

  def reorder(old: Array, new: Array) -> Array:
    # What `extend` hands on untouched, as it does the encoder's keys, is the
    # same for all beams of a row.
    if new is old:
      return new
    by_beam = new.reshape(-1, num_beams, *new.shape[1:])
    return arrays.take(by_beam, parents).reshape(new.shape)

  cache = jax.tree.map(reorder, state.cache, cache)
  lengths = jnp.repeat(search.lengths - 1, num_beams)
  return _State(search=search, cache=target.rewind(cache, lengths))
